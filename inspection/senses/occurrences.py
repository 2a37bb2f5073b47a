"""Where words stand in texts, and the vectors that a model has for them there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from ..maps.eager_mode import evaluating
from ..maps.tokens import word_spans

# What a model reads at once.
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Occurrence:
    """A word in its context.

    Attributes:
        text: the context.
        start: where the word begins in it.
        end: where it ends.
    """

    text: str
    start: int
    end: int


class Context(NamedTuple):
    """A text and its words, as `WordReader` spells them."""

    text: str
    words: list[str]


class WordReader:
    """Finds the words of texts, in any script; one word may be given that is kept together.

    Words are told apart as in attention maps: hyphens and apostrophes inside a word belong to it, a sign is a word of
    its own, and so is each letter of a script that is written without spaces. That is why the given word is kept
    together where all its parts stand in a row: of such a script it may also be found inside longer words.

    Two spellings are one word if the tokenizer's normalizer makes the same of them, and so do its model's embeddings:
    "Set" and "set" for a tokenizer that lower-cases, and for no other.
    """

    def __init__(self, tokenizer: Any, word: str) -> None:
        self._normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        self._spellings: dict[str, str] = {}
        self._parts: tuple[str, ...] = ()
        self.word = self.spell(word)
        self._parts = tuple(part for part, _, _ in self.words(word))

    def spell(self, word: str) -> str:
        """A word as all its spellings are written here."""
        known = self._spellings.get(word)
        if known is None:
            normal = word if self._normalizer is None else self._normalizer.normalize_str(word)
            # Some normalizers put white space, or a sign for it, around what they are given, or around each letter.
            known = self._spellings[word] = "".join(normal.replace("▁", " ").split())
        return known

    def words(self, text: str) -> list[tuple[str, int, int]]:
        """The words of a text, each with where it begins and ends."""
        found = [(self.spell(text[start:end]), start, end) for start, end in word_spans(text)]
        count = len(self._parts)
        if count > 1:
            place = 0
            while place + count <= len(found):
                if tuple(part for part, _, _ in found[place : place + count]) == self._parts:
                    found[place : place + count] = [(self.word, found[place][1], found[place + count - 1][2])]
                place += 1
        return [word for word in found if word[0]]

    def read(self, texts: Iterable[str]) -> list[Context]:
        """Texts with their words; one that comes again is left out, since it is no other context."""
        return [Context(text, [word for word, _, _ in self.words(text)]) for text in dict.fromkeys(texts)]

    def occurrence(self, context: Context, word: str) -> Occurrence:
        """The first occurrence of a word in a context that has it."""
        return next(
            Occurrence(context.text, start, end) for found, start, end in self.words(context.text) if found == word
        )


@dataclass(frozen=True)
class Vectors:
    """Vectors of occurrences.

    Attributes:
        layers: of each layer the vectors, (occurrences, width): first those of the embeddings.
        positions: the place of each word's first piece among the tokens that were read.
        lengths: how many tokens were read.
    """

    layers: list[np.ndarray]
    positions: np.ndarray
    lengths: np.ndarray


class _Reading(NamedTuple):
    """What a model is given to read, and where in it the pieces of the word are."""

    inputs: dict[str, list[int]]
    pieces: list[int]


@torch.no_grad()
def contextual_vectors(
    model: PreTrainedModel, tokenizer: Any, occurrences: Sequence[Occurrence], max_length: int
) -> Vectors:
    """The vectors of words in their contexts: the mean of the hidden states of a word's pieces, at each layer.

    Each context is read alone, with the tokenizer's special tokens, and contexts of one length at once, so that there
    is no padding. Of a longer one the model reads as many tokens around the word.

    Args:
        model: any that reads text. Of an encoder-decoder it is the encoder.
        tokenizer: of the model, a fast one.
        occurrences: words in their contexts.
        max_length: how many tokens the model reads at most.
    """
    network: Any = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    taken = inspect.signature(network.forward).parameters
    readings = [_reading(tokenizer, occurrence, max_length) for occurrence in occurrences]
    lengths = np.array([len(reading.inputs["input_ids"]) for reading in readings])
    layers: list[np.ndarray] = []
    with evaluating(model):
        for places in _batches(lengths):
            batch = {
                name: torch.tensor([readings[place].inputs[name] for place in places], device=model.device)
                for name in ("input_ids", "attention_mask", "token_type_ids")
                if name in readings[0].inputs and name in taken
            }
            states = network(**batch, output_hidden_states=True, return_dict=True).get("hidden_states")
            if states is None:
                raise ValueError(f"`model` gave no hidden states: a {type(network).__name__} has none of each layer")
            layers = layers or [np.empty((len(readings), layer.shape[-1]), np.float32) for layer in states]
            for vectors, layer in zip(layers, states, strict=True):
                for row, place in enumerate(places):
                    vectors[place] = layer[row, readings[place].pieces].float().mean(0).cpu()
    return Vectors(layers, np.array([reading.pieces[0] for reading in readings]), lengths)


def _reading(tokenizer: Any, occurrence: Occurrence, max_length: int) -> _Reading:
    reading = _encode(tokenizer, occurrence.text, occurrence.start, occurrence.end)
    length = len(reading.inputs["input_ids"])
    return reading if length <= max_length else _window(tokenizer, occurrence, max_length)


def _encode(tokenizer: Any, text: str, start: int, end: int) -> _Reading:
    encoded = dict(tokenizer(text, return_attention_mask=True, return_offsets_mapping=True, verbose=False))
    offsets = encoded.pop("offset_mapping")
    pieces = [place for place, (first, last) in enumerate(offsets) if first < min(end, last) and last > start]
    return _Reading(encoded, pieces)


def _window(tokenizer: Any, occurrence: Occurrence, max_length: int) -> _Reading:
    """Whole words around an occurrence, as many as fit, as many on one side as on the other where it has them."""
    text = occurrence.text
    spans = [span for span in word_spans(text) if not text[slice(*span)].isspace()]
    first = next(place for place, (_, end) in enumerate(spans) if end > occurrence.start)
    last = next(place for place, (_, end) in enumerate(spans) if end >= occurrence.end)
    best: _Reading | None = None
    # No word is less than half a token, as a rule: what is found by halves is found in a few steps.
    low, high = 0, 2 * max_length
    while low <= high:
        words = (low + high) // 2
        before = min(first, max(words // 2, words - (len(spans) - 1 - last)))
        after = min(len(spans) - 1 - last, words - before)
        begin, end = spans[first - before][0], spans[last + after][1]
        tried = _encode(tokenizer, text[begin:end], occurrence.start - begin, occurrence.end - begin)
        if len(tried.inputs["input_ids"]) <= max_length:
            best, low = tried, words + 1
        else:
            high = words - 1
    if best is None:
        word = text[occurrence.start : occurrence.end]
        raise ValueError(f"`max_length` ({max_length}) has no room for {word!r}: it has more tokens")
    return best


def _batches(lengths: np.ndarray) -> Iterator[list[int]]:
    """Places of equal lengths, as many as are read at once."""
    for length in np.unique(lengths):
        places = np.flatnonzero(lengths == length).tolist()
        size = max(BATCH_TOKENS // int(length), 1)
        yield from (places[start : start + size] for start in range(0, len(places), size))


def has_own_pieces(tokenizer: Any) -> Callable[[str], bool]:
    """Tells whether a tokenizer has pieces for a word, and does not read it as one of the words that it can't tell."""
    unknown = tokenizer.unk_token_id

    def known(word: str) -> bool:
        ids = tokenizer(word, add_special_tokens=False)["input_ids"]
        return bool(ids) and (unknown is None or unknown not in ids)

    return known
