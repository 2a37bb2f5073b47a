"""Attention maps of any model that returns its attention weights, from this package or from transformers."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel

from ...tokenization.processor import ImageSource
from .eager_mode import eager_attention
from .figure import MOST_PANELS, draw_image_map, draw_map
from .image_weights import captioner_weights, patch_weights
from .page import describe_image, describe_tokens, make_frame, make_page
from .text_weights import TokenWeights, seq2seq_weights, single_stack_weights
from .tokens import Token, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# How far above one a row of weights may sum, because half precision rounds.
SLACK = 0.05


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention weights with the tokens, or the parts of an image, that they connect.

    Args:
        weights: float32, (layers, heads, queries, keys). The weights of a query sum to one. They are all zero if the
            query had no key to attend to, and sum to less than one in a model with attention sinks, which take the
            rest. If only some layers of a model attend, these are the layers; `numbers` holds their numbers.
        queries: the token of each row.
        keys: the token of each column; for an image the cells of its grid, row by row.
        kind: "self"; for an encoder-decoder "encoder", "decoder" or "cross", or "alignment" if it is recurrent;
            "image" for attention over an image. In "cross", "alignment" and in "image" of a captioner, a query is the
            token that the decoder predicted with these weights. Otherwise a query is the token at that position of
            the input, or for a vision model the patch at that position, after [CLS] and the like.
        title: name of the model or other heading.
        image: the image, if the keys are its cells.
        grid: height and width of the grid over the image.
        numbers: number of each layer in the model, if only some layers attend; empty if all do.
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
        """The number of heads in each layer."""
        return self.weights.shape[1]

    def layer_name(self, layer: int) -> str:
        """Returns the number of a layer, followed by its number in the model if that differs."""
        if not self.numbers or self.numbers[layer] == layer:
            return str(layer)
        return f"{layer} ({self.numbers[layer]} of the model)"

    def matrix(self, layer: int = -1, head: int | str = "mean") -> np.ndarray:
        """Returns the weights of one layer, (queries, keys).

        Args:
            layer: number of the layer from 0, or counted from the last, which is -1.
            head: number of the head, counted in the same way; "mean" for the mean over all heads, whose rows also sum
                to one; or "max" for the largest weight of any head, whose rows do not.

        Raises:
            ValueError: if there is no such layer or head.
        """
        return select_weights(self.weights, layer, head)

    def by_words(self) -> AttentionMap:
        """Returns the same map with the tokens of each word joined.

        A query's weights on the tokens of a word are added, and the rows of a word's tokens are averaged, so rows
        still sum to one. Words do not depend on the tokenizer: a word is a run of letters and digits with the hyphens
        and apostrophes inside it, or a single sign. In a script without spaces a word is a single letter, or all
        letters that share a token.
        """
        queries, keys = _first_tokens(self.queries), _first_tokens(self.keys)
        counts = np.diff([*queries, len(self.queries)])[:, None].astype(np.float32)
        weights = np.add.reduceat(self.weights, keys, axis=3)
        weights = np.add.reduceat(weights, queries, axis=2) / counts
        return replace(self, weights=weights, queries=_join_words(self.queries), keys=_join_words(self.keys))

    def figure(self, layer: int = -1, head: int | str = "mean") -> Figure:
        """Draws one layer: a grid of weights, or for an image the weights of each query over the image.

        Args:
            layer: as for `matrix`.
            head: as for `matrix`.
        """
        matrix = self.matrix(layer, head)
        layer = range(self.layers)[layer]
        shown = describe_head(head, self.heads)
        title = f"{self.title} · {self.kind} attention, layer {self.layer_name(layer)}, {shown}".removeprefix(" · ")
        queries = [query.label for query in self.queries]
        if self.image is not None and self.grid is not None:
            if len(queries) > MOST_PANELS:
                title += f", the first {MOST_PANELS} of {len(queries)} queries"
            return draw_image_map(matrix[:MOST_PANELS], queries[:MOST_PANELS], self.image, self.grid, title)
        return draw_map(matrix, queries, [key.label for key in self.keys], title)

    def to_html(self, layer: int = -1, head: int | str = "mean", words: bool = False) -> str:
        """Returns a self-contained HTML page that shows every layer and head and needs no network.

        The page stores a weight in one byte, as 255 times its square root, so a weight w is off by at most 0.004 √w.
        That takes up to 1.34 bytes of the page per weight, less where weights are alike: twelve layers of twelve heads
        over 512 tokens take at most 51 MB, or half of that in a causal model.

        Args:
            layer: the layer that the page first shows.
            head: the head that the page first shows, or "mean" or "max".
            words: whether the page first shows whole words; it has a switch for that.
        """
        self.matrix(layer, head)
        layer = range(self.layers)[layer]
        head = head if isinstance(head, str) else range(self.heads)[head]
        return make_page(self.weights, self._description, layer, head, words)

    def save_html(
        self, path: str | os.PathLike, layer: int = -1, head: int | str = "mean", words: bool = False
    ) -> Path:
        """Writes the page of `to_html` to a file, and returns the path of the file."""
        file = Path(path)
        file.write_text(self.to_html(layer, head, words), encoding="utf-8")
        return file

    @property
    def _description(self) -> dict[str, Any]:
        """All data of the page but the weights, as values that JSON can hold."""
        keys_are_queries = self.kind in ("self", "encoder", "decoder")
        return {
            "title": printable(self.title),
            "kind": self.kind,
            "layers": [self.layer_name(layer) for layer in range(self.layers)],
            "heads": self.heads,
            "queries": describe_tokens(self.queries),
            "keys": None if keys_are_queries else describe_tokens(self.keys),
            "grid": self.grid,
            "image": None if self.image is None else describe_image(self.image),
        }

    def _repr_html_(self) -> str:
        return make_frame(self.weights, self._description)


def select_weights(weights: np.ndarray, layer: int, head: int | str) -> np.ndarray:
    """Returns the weights (layers, heads, ...) of one layer and of one head, or of all heads together.

    Args:
        weights: the weights of all layers.
        layer: number of the layer from 0, or counted from the last, which is -1.
        head: number of the head, counted in the same way, or "mean" or "max" over all heads.

    Raises:
        ValueError: if there is no such layer or head.
    """
    heads = weights[check_number("layer", layer, len(weights))]
    if head == "mean":
        return heads.mean(axis=0)
    if head == "max":
        return heads.max(axis=0)
    return heads[check_number("head", head, len(heads), ", 'mean' or 'max'")]


def check_number(name: str, number: int | np.integer | str, count: int, others: str = "") -> int:
    """Returns the number of a layer or a head as an `int`.

    Args:
        name: name of the argument, for the error.
        number: the number, from `-count` to `count - 1`.
        count: how many layers or heads there are.
        others: the end of the error, which names other values that the argument may have.

    Raises:
        ValueError: if the number is not an integer or out of range.
    """
    if not isinstance(number, (int, np.integer)) or not -count <= number < count:
        allowed = f"0 to {count - 1}, or from the last one back -1 to -{count}" if count > 1 else "0 or -1"
        raise ValueError(f"`{name}` ({number!r}) must be {allowed}{others}")
    return int(number)


def describe_head(head: int | str, heads: int) -> str:
    """Returns the words for one head, or for "mean" or "max" over all, in a title."""
    if heads == 1:
        return "the one head"
    return f"{head} of {heads} heads" if isinstance(head, str) else f"head {range(heads)[head]}"


def _first_tokens(tokens: tuple[Token, ...]) -> list[int]:
    """Returns the position of the first token of each word."""
    return [place for place, token in enumerate(tokens) if not place or tokens[place - 1].word != token.word]


def _join_words(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    words = []
    for _, members in groupby(tokens, key=lambda token: token.word):
        first, *rest = members
        spans = [member.span for member in (first, *rest) if member.span is not None]
        span = (spans[0][0], max(end for _, end in spans)) if spans else None
        piece = " ".join(member.piece for member in (first, *rest))
        words.append(replace(first, text=first.word_text, piece=piece, span=span))
    return tuple(words)


# From a model


def attention_map(
    model: PreTrainedModel,
    processor: Any,
    text: str | None = None,
    *,
    text_pair: str | None = None,
    target: str | None = None,
    image: ImageSource | None = None,
    kind: str | None = None,
) -> AttentionMap:
    """Runs a model on one text or one image and returns its attention weights.

    The model may be on any attention kernel and in training mode. It runs on the eager kernel in evaluation mode and
    is restored afterwards. A single text has no padding, so a map contains none.

    Args:
        model: any model of transformers that returns attention weights and that reads text, sees an image in patches
            (ViT), can do either (CLIP), or writes a text about an image.
        processor: its tokenizer or image processor, or a processor that has both as attributes.
        text: the text that the model reads; for an encoder-decoder the source.
        text_pair: a second text, for a model that reads pairs.
        target: the text that the decoder of an encoder-decoder or captioner writes. If None, the model generates it.
        image: the image that a captioner or a vision model sees: an image, an array or a file.
        kind: kind of attention. A model of one stack has "self"; an encoder-decoder has "cross" (the default),
            "encoder" and "decoder", or "alignment" if it is recurrent; a captioner has "image", and "decoder" if its
            decoder is a Transformer.

    Raises:
        ValueError: if the model has no weights of that kind, does not take one of the inputs, or the text has no
            tokens, more tokens than the model has positions, or is not a single text.
    """
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"a {type(model).__name__} with a learned prompt cannot be inspected: the prompt precedes every text"
        )
    whole, model = model, _part_with_input(model, "input_ids" if image is None else "pixel_values")
    reads_images = model.main_input_name == "pixel_values"
    is_captioner = reads_images and model.config.is_encoder_decoder and model.can_generate()
    name = type(model).__name__
    _check_text("text", text, not reads_images, f"a {name} takes an `image`")
    _check_text("text_pair", text_pair, not reads_images, f"a {name} takes an `image`")
    _check_text("target", target, is_captioner or model.config.is_encoder_decoder, f"a {name} has no separate decoder")
    seen_image, grid = None, None
    with eager_attention(model):
        if is_captioner:
            weights_by_kind, seen_image, grid = captioner_weights(model, processor, image, target)
        elif reads_images:
            weights_by_kind, seen_image, grid = patch_weights(model, processor, image)
        elif image is not None:
            raise ValueError(f"a {name} does not take an `image`: give a `text`, or use a model that takes images")
        elif model.main_input_name != "input_ids":
            raise ValueError(f"a {name} takes `{model.main_input_name}`: use a model of texts or images")
        elif text is None:
            raise ValueError(f"`text` is missing: a {name} needs a text to read")
        elif model.config.is_encoder_decoder:
            weights_by_kind = seq2seq_weights(model, _tokenizer(processor), text, text_pair, target)
        else:
            weights_by_kind = single_stack_weights(model, _tokenizer(processor), text, text_pair)
    kind, chosen = _choose_kind(weights_by_kind, kind, name)
    return AttentionMap(
        _stack_layers(chosen, name),
        chosen.queries,
        chosen.keys,
        kind,
        title=whole.config.name_or_path or name,
        image=seen_image if kind == "image" else None,
        grid=grid if kind == "image" else None,
        numbers=tuple(chosen.layers),
    )


def _part_with_input(model: PreTrainedModel, name: str) -> Any:
    """Returns the part of a model with several stacks (CLIP) that takes an input, or any other model itself."""
    if not hasattr(model, "get_text_features"):
        return model
    parts = (part for part in model.children() if isinstance(part, PreTrainedModel))
    return next((part for part in parts if part.main_input_name == name), model)


def _tokenizer(processor: Any) -> Any:
    return getattr(processor, "tokenizer", processor)


def _check_text(name: str, text: str | None, is_allowed: bool, reason: str) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise ValueError(f"`{name}` is a {type(text).__name__}: give one text at a time, as a string")
    if not is_allowed:
        raise ValueError(f"`{name}` is not allowed here: {reason}")


def _choose_kind(weights: dict[str, TokenWeights], kind: str | None, name: str) -> tuple[str, TokenWeights]:
    present = {key: value for key, value in weights.items() if value.layers}
    if not present:
        raise ValueError(
            f"a {name} returned no attention weights: it has none, or does not return them (if it has several "
            "attention kernels, load it with attn_implementation='eager')"
        )
    if kind is not None and kind not in present:
        raise ValueError(f"`kind` ({kind!r}) must be {' or '.join(map(repr, present))} for this {name}")
    # The first kind is the one that the family is known for.
    kind = kind or next(iter(present))
    return kind, present[kind]


def _stack_layers(weights: TokenWeights, name: str) -> np.ndarray:
    shapes = {tuple(layer.shape) for layer in weights.layers.values()}
    (shape, *others) = shapes
    if others or shape[-2:] != (len(weights.queries), len(weights.keys)):
        raise ValueError(
            f"a {name} returned weights of the shapes {', '.join(map(str, sorted(shapes)))}, but those of every layer "
            f"must be (1, heads, {len(weights.queries)}, {len(weights.keys)}), one weight for each pair of tokens"
        )
    stacked = torch.cat(tuple(weights.layers.values())).float().cpu().numpy()
    # A head with an attention sink may sum to less than one.
    if not (stacked.min() >= 0 and stacked.sum(axis=-1).max() <= 1 + SLACK):
        raise ValueError(
            f"a {name} returned numbers that are not weights: some are negative or NaN, or a row sums to more than one"
        )
    return stacked
