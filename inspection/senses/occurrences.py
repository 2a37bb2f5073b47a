"""The occurrences of words in texts, and a model's contextual vectors of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from ..maps.eager_mode import evaluation_mode
from ..maps.tokens import word_spans

# The most tokens in a batch.
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Occurrence:
    """A word in its context.

    Attributes:
        text: the context.
        start: index of the word's first character in the context.
        end: index after the word's last character.
    """

    text: str
    start: int
    end: int


class Context(NamedTuple):
    """A text and its words, in the spelling of `WordReader`."""

    text: str
    words: list[str]


class WordReader:
    """Finds the words of texts in any script, and keeps one given word together.

    Texts are split into words as in attention maps: hyphens and apostrophes inside a word belong to it, each sign is a
    word, and so is each letter of a script without spaces. The given word counts as one word wherever all its parts
    follow one another, so in a script without spaces it is also found inside longer words.

    Two spellings count as the same word if the tokenizer's normalizer makes them equal, because then the model cannot
    tell them apart either: "Set" and "set" are one word for a tokenizer that lower-cases, and for no other.

    Args:
        tokenizer: the tokenizer of the model.
        word: the word to keep together.
    """

    def __init__(self, tokenizer: Any, word: str) -> None:
        self._normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        self._spellings: dict[str, str] = {}
        self._parts: tuple[str, ...] = ()
        self.word = self.spell(word)
        self._parts = tuple(part for part, _, _ in self.words(word))

    def spell(self, word: str) -> str:
        """Returns the common spelling of a word."""
        known = self._spellings.get(word)
        if known is None:
            normal = word if self._normalizer is None else self._normalizer.normalize_str(word)
            # Some normalizers put white space, or a sign for it, around the word or around each letter.
            known = self._spellings[word] = "".join(normal.replace("▁", " ").split())
        return known

    def words(self, text: str) -> list[tuple[str, int, int]]:
        """Returns the words of a text, each with its start and end."""
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
        """Returns the distinct texts with their words; a repeated text adds no context."""
        return [Context(text, [word for word, _, _ in self.words(text)]) for text in dict.fromkeys(texts)]

    def occurrence(self, context: Context, word: str) -> Occurrence:
        """Returns the first occurrence of a word in a context that contains it."""
        return next(
            Occurrence(context.text, start, end) for found, start, end in self.words(context.text) if found == word
        )


@dataclass(frozen=True)
class Vectors:
    """The contextual vectors of occurrences.

    Attributes:
        layers: the vectors of each layer, (occurrences, width), starting with the embeddings.
        positions: the position of each word's first token in the input of the model, (occurrences,).
        lengths: the number of tokens of each input, (occurrences,).
    """

    layers: list[np.ndarray]
    positions: np.ndarray
    lengths: np.ndarray


class _Encoding(NamedTuple):
    """The inputs of a model for one context, and the positions of the word's tokens in them."""

    inputs: dict[str, list[int]]
    positions: list[int]


def contextual_vectors(
    model: PreTrainedModel, tokenizer: Any, occurrences: Sequence[Occurrence], max_length: int
) -> Vectors:
    """Returns the vector of each occurrence at each layer: the mean of the hidden states of the word's tokens.

    Each context is a row of its own with the tokenizer's special tokens. A batch holds contexts of equal length, so
    there is no padding. Of a longer context the model reads a window of whole words around the word.

    Args:
        model: any model that reads text. Of an encoder-decoder the encoder is used.
        tokenizer: its tokenizer, a fast one.
        occurrences: the words in their contexts.
        max_length: the most tokens that the model reads of a context.

    Raises:
        ValueError: if the model returns no hidden states, or a word has more than `max_length` tokens.
    """
    network: Any = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    taken = inspect.signature(network.forward).parameters
    encodings = [_encode_occurrence(tokenizer, occurrence, max_length) for occurrence in occurrences]
    lengths = np.array([len(encoding.inputs["input_ids"]) for encoding in encodings])
    layers: list[np.ndarray] = []
    with evaluation_mode(model):
        for places in _batches(lengths):
            batch = {
                name: torch.tensor([encodings[place].inputs[name] for place in places], device=model.device)
                for name in ("input_ids", "attention_mask", "token_type_ids")
                if name in encodings[0].inputs and name in taken
            }
            states = network(**batch, output_hidden_states=True, return_dict=True).get("hidden_states")
            if states is None:
                raise ValueError(
                    f"`model` must return the hidden states of each layer: a {type(network).__name__} does not"
                )
            layers = layers or [np.empty((len(encodings), layer.shape[-1]), np.float32) for layer in states]
            for vectors, layer in zip(layers, states, strict=True):
                for row, place in enumerate(places):
                    vectors[place] = layer[row, encodings[place].positions].float().mean(0).cpu()
    return Vectors(layers, np.array([encoding.positions[0] for encoding in encodings]), lengths)


def _encode_occurrence(tokenizer: Any, occurrence: Occurrence, max_length: int) -> _Encoding:
    whole = _encode(tokenizer, occurrence.text, occurrence.start, occurrence.end)
    fits = len(whole.inputs["input_ids"]) <= max_length
    return whole if fits else _encode_window(tokenizer, occurrence, max_length)


def _encode(tokenizer: Any, text: str, start: int, end: int) -> _Encoding:
    encoded = dict(tokenizer(text, return_attention_mask=True, return_offsets_mapping=True, verbose=False))
    offsets = encoded.pop("offset_mapping")
    positions = [place for place, (first, last) in enumerate(offsets) if first < min(end, last) and last > start]
    return _Encoding(encoded, positions)


def _encode_window(tokenizer: Any, occurrence: Occurrence, max_length: int) -> _Encoding:
    """Encodes as many whole words around an occurrence as fit, equally many on each side if the text has them."""
    text = occurrence.text
    spans = [span for span in word_spans(text) if not text[slice(*span)].isspace()]
    first = next(place for place, (_, end) in enumerate(spans) if end > occurrence.start)
    last = next(place for place, (_, end) in enumerate(spans) if end >= occurrence.end)
    best: _Encoding | None = None
    # A binary search for the number of words; a word rarely takes less than half a token.
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
        raise ValueError(f"`max_length` ({max_length}) is too small for {word!r}, which has more tokens")
    return best


def _batches(lengths: np.ndarray) -> Iterator[list[int]]:
    """Yields the numbers of inputs of equal length, in batches of at most `BATCH_TOKENS` tokens."""
    for length in np.unique(lengths):
        places = np.flatnonzero(lengths == length).tolist()
        size = max(BATCH_TOKENS // int(length), 1)
        yield from (places[start : start + size] for start in range(0, len(places), size))


def is_known_word(tokenizer: Any, word: str) -> bool:
    """Returns whether a tokenizer has tokens for a word, none of them the unknown token."""
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    return bool(ids) and (tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids)
