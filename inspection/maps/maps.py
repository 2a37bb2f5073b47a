"""The attention map of a text or an image: who looks at whom, with the tokens and words that the weights belong to."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from .figure import MOST_PANELS, draw_image_map, draw_map
from .page import make_frame, make_page
from .tokens import Token

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention weights, and what they are of.

    Args:
        weights: float32, (layers, heads, queries, keys). A query's weights sum to one, or are all zero where there was
            nothing to look at; to less than one in a model with attention sinks, which take the rest. Of a model of
            which only some layers attend the layers are those: `numbers` tells which of the model's they are.
        queries: the token that each row belongs to.
        keys: the token that each column belongs to; for an image the places of its grid, row by row.
        kind: "self"; of an encoder-decoder "encoder", "decoder" or "cross"; "alignment" of a recurrent one; "image".
            Where a decoder looks at what is not its own text, in the last three, a query is the token that the
            decoder predicted with what it saw. In all others a query is the token at that place of the input, or of a
            model without a decoder that sees an image the patch at that place, after [CLS] and the like.
        title: says whose weights these are.
        image: what was looked at, for an image.
        grid: height and width of the grid over the image.
        numbers: the number in the model of each layer, where only some attend; all of them if not given.
    """

    weights: np.ndarray
    queries: tuple[Token, ...]
    keys: tuple[Token, ...]
    kind: str
    title: str = ""
    image: Image.Image | None = None
    grid: tuple[int, int] | None = None
    numbers: tuple[int, ...] = ()

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.weights.shape[0]

    @property
    def heads(self) -> int:
        """The number of heads of a layer."""
        return self.weights.shape[1]

    def layer_name(self, layer: int) -> str:
        """A layer's number, with that which it has in the model where the two differ."""
        if not self.numbers or self.numbers[layer] == layer:
            return str(layer)
        return f"{layer} ({self.numbers[layer]} of the model)"

    def matrix(self, layer: int = -1, head: int | str = "mean") -> np.ndarray:
        """The weights of one layer, (queries, keys).

        Args:
            layer: its number from 0, or from the last one, which is -1.
            head: its number in the same way; "mean" over all heads, whose rows sum to one as well; or "max", the
                largest weight that any head gives, whose rows do not.

        Raises:
            ValueError: if there is no such layer or head.
        """
        heads = self.weights[check_number("layer", layer, self.layers)]
        if head == "mean":
            return heads.mean(axis=0)
        if head == "max":
            return heads.max(axis=0)
        return heads[check_number("head", head, self.heads, ", 'mean' or 'max'")]

    def by_words(self) -> AttentionMap:
        """The same map with the pieces of each word joined.

        A query's weights on the pieces of a word are added up, and the rows of a word's pieces are averaged: so rows
        still sum to one. Words are those of the text, whatever the tokenizer: runs of letters and digits, with the
        hyphens and apostrophes inside them, or single signs; of a script that puts no space between words single
        letters, or what a token joins.
        """
        queries, keys = _firsts(self.queries), _firsts(self.keys)
        counts = np.diff([*queries, len(self.queries)])[:, None].astype(np.float32)
        weights = np.add.reduceat(self.weights, keys, axis=3)
        weights = np.add.reduceat(weights, queries, axis=2) / counts
        return replace(self, weights=weights, queries=_words(self.queries), keys=_words(self.keys))

    def figure(self, layer: int = -1, head: int | str = "mean") -> Figure:
        """Draws one layer: a grid of weights, or for an image where each word looked; see `matrix`."""
        matrix = self.matrix(layer, head)
        layer = range(self.layers)[layer]
        if self.heads == 1:
            shown = "the one head"
        else:
            shown = f"{head} of {self.heads} heads" if isinstance(head, str) else f"head {range(self.heads)[head]}"
        title = f"{self.title} · {self.kind} attention, layer {self.layer_name(layer)}, {shown}".removeprefix(" · ")
        queries = [query.label for query in self.queries]
        if self.image is not None and self.grid is not None:
            if len(queries) > MOST_PANELS:
                title += f", the first {MOST_PANELS} of {len(queries)} queries"
            return draw_image_map(matrix[:MOST_PANELS], queries[:MOST_PANELS], self.image, self.grid, title)
        return draw_map(matrix, queries, [key.label for key in self.keys], title)

    def to_html(self, layer: int = -1, head: int | str = "mean", words: bool = False) -> str:
        """A page of its own that shows every layer and head; it needs no network.

        Weights are kept in one byte each, as 255 times their square root: a weight w is off by at most 0.004 times its
        square root. In the page that is up to 1.34 bytes a weight, less where they are alike: twelve layers of twelve
        heads over 512 tokens are at most 51 MB, of a causal model half of that.

        Args:
            layer: the one to begin with.
            head: the one to begin with, or "mean" or "max".
            words: whether to begin with the pieces of words joined; the page has a switch.
        """
        self.matrix(layer, head)
        layer = range(self.layers)[layer]
        head = head if isinstance(head, str) else range(self.heads)[head]
        return make_page(self, layer, head, words)

    def save_html(
        self, path: str | os.PathLike, layer: int = -1, head: int | str = "mean", words: bool = False
    ) -> Path:
        """Writes the page: see `to_html`.

        Returns:
            The file.
        """
        file = Path(path)
        file.write_text(self.to_html(layer, head, words), encoding="utf-8")
        return file

    def _repr_html_(self) -> str:
        return make_frame(self)


def check_number(name: str, number: int | np.integer | str, count: int, others: str = "") -> int:
    """Returns the number of a layer or a head, if there is one of it.

    Raises:
        ValueError: if not, naming what it is called and the others that it may be.
    """
    if not isinstance(number, (int, np.integer)) or not -count <= number < count:
        there = f"0 to {count - 1}, or from the last one back -1 to -{count}" if count > 1 else "0 or -1"
        raise ValueError(f"`{name}` ({number!r}) must be {there}{others}")
    return int(number)


def _groups(tokens: tuple[Token, ...]) -> list[list[Token]]:
    return [list(members) for _, members in groupby(tokens, key=lambda token: token.word)]


def _firsts(tokens: tuple[Token, ...]) -> list[int]:
    """The place of each word's first token."""
    return [place for place, token in enumerate(tokens) if not place or tokens[place - 1].word != token.word]


def _words(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    words = []
    for members in _groups(tokens):
        spans = [member.span for member in members if member.span is not None]
        span = (spans[0][0], max(end for _, end in spans)) if spans else None
        first = members[0]
        words.append(replace(first, text=first.word_text, piece=" ".join(each.piece for each in members), span=span))
    return tuple(words)
