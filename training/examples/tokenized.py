"""Tokenised corpora: a corpus is tokenised once, cached, and read from memory-mapped Arrow files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, Features, Sequence, Value
from datasets.fingerprint import Hasher
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from .sentences import split_sentences

# Part of the cache key: increase it with each change that makes other rows of the same documents.
FORMAT_VERSION = 2

# A tokenizer's output takes a hundred times as much memory as the text. So a call gets about this many characters, or
# a single longer text.
_CHARACTERS_AT_ONCE = 1_000_000
# Limits of the documents in memory at once: their number, and their size in bytes.
_DOCUMENTS_AT_ONCE, _BYTES_AT_ONCE = 100, 2**24

_FEATURES = {"ids": Sequence(Value("int32")), "sentence_lengths": Sequence(Value("int32"))}
_WORD_FEATURES = {"starts_word": Sequence(Value("bool"))}


def plain_backend(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A copy of a tokenizer's backend that neither truncates nor pads, and treats names of special tokens as text."""
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend


def tokenize_documents(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    *,
    language: str = "en",
    word_starts: bool = False,
    num_proc: int | None = None,
) -> Dataset:
    """Splits documents into sentences, and sentences into word pieces.

    The result is memory-mapped. It is cached under a key made of the documents, the tokenizer and the options.

    Args:
        documents: rows with a `text`, such as those of `load_documents`.
        tokenizer: tokenizer of the texts. The name of a special token in a text, such as "[SEP]", is treated as text.
        language: ISO 639 code of the language, used to split sentences.
        word_starts: whether to add the column `starts_word`; the tokenizer takes longer then.
        num_proc: number of processes; None: one.

    Returns:
        One row per document: `ids` without special tokens, `sentence_lengths` in ids and, with `word_starts`, the
        column `starts_word`, which holds True for each id that begins a word.
    """
    backend = plain_backend(tokenizer)
    features = Features(_FEATURES | (_WORD_FEATURES if word_starts else {}))
    encode = backend.encode_batch if word_starts else backend.encode_batch_fast

    # Input and output are Arrow tables: converting the ids to Python lists would take as long as the tokenizer.
    def tokenize(batch: pa.Table) -> pa.Table:
        sentences = [split_sentences(text.as_py(), language) for text in batch["text"]]
        texts = list(chain.from_iterable(sentences))
        parts = [_read_encodings(encodings, word_starts) for encodings in _encoded(texts, encode)]
        parts = parts or [_read_encodings([], word_starts)]
        lengths, ids, starts_word = (np.concatenate(column) for column in zip(*parts, strict=True))
        ends = np.cumsum([0, *lengths])
        columns = {"ids": ids, "sentence_lengths": lengths[lengths > 0]}
        if word_starts:
            columns["starts_word"] = starts_word
        # The ends of documents: counted in all sentences, then in sentences with tokens; `ends` gives them in tokens.
        documents_end = np.cumsum([0, *map(len, sentences)])
        of_sentences = np.cumsum([0, *(lengths > 0)])[documents_end]
        lists = [
            _lists(column, of_sentences if name == "sentence_lengths" else ends[documents_end])
            for name, column in columns.items()
        ]
        return pa.table(lists, schema=features.arrow_schema)

    key = (documents._fingerprint, backend.to_str(), language, word_starts, FORMAT_VERSION)
    tokens = documents.with_format("arrow").map(
        tokenize,
        batched=True,
        batch_size=_batch_size(documents),
        remove_columns=documents.column_names,
        features=features,
        num_proc=num_proc,
        new_fingerprint=Hasher.hash(key),
        desc="Tokenising",
    )
    return tokens.with_format(None)


def _batch_size(documents: Dataset) -> int:
    """The number of documents to hold in memory at once. The result of `map` does not depend on it."""
    mean = documents.data.nbytes // len(documents.data)
    return min(_DOCUMENTS_AT_ONCE, max(1, _BYTES_AT_ONCE // max(1, mean)))


def _encoded(texts: list[str], encode: Callable[..., list[Any]]) -> Iterator[list[Any]]:
    """Encodes texts in order, in groups of about `_CHARACTERS_AT_ONCE` characters."""
    start, characters = 0, 0
    for stop, text in enumerate(texts, start=1):
        characters += len(text)
        if characters >= _CHARACTERS_AT_ONCE or stop == len(texts):
            yield encode(texts[start:stop], add_special_tokens=False)
            start, characters = stop, 0


def _read_encodings(encodings: list[Any], word_starts: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The lengths of encoded sentences, their concatenated ids, and whether each id begins a word."""
    lengths = np.fromiter(map(len, encodings), np.int32, len(encodings))
    ends = np.cumsum([0, *lengths])
    ids = _joined((encoding.ids for encoding in encodings), np.int32, ends[-1])
    if not word_starts:
        return lengths, ids, np.zeros(0, dtype=bool)
    # The word id of a token without a word becomes NaN, which differs from every value.
    words = _joined((encoding.word_ids for encoding in encodings), np.float64, ends[-1])
    starts = np.diff(words, prepend=-1) != 0
    starts[ends[:-1][lengths > 0]] = True
    return lengths, ids, starts


def _lists(values: np.ndarray, bounds: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), pa.array(values))


def _joined(parts: Iterable[list[Any]], dtype: type, length: int) -> np.ndarray:
    return np.fromiter(chain.from_iterable(parts), dtype, length)


def tokenize_texts(documents: Dataset, tokenizer: PreTrainedTokenizerFast, *, num_proc: int | None = None) -> Dataset:
    """Tokenises documents, each with the begin token before it, if the tokenizer has one, and the end token after it.

    The result is memory-mapped. It is cached under a key made of the documents and the tokenizer.

    Args:
        documents: rows with a `text`, such as those of `load_documents`.
        tokenizer: tokenizer of the texts. The name of a special token in a text is treated as text.
        num_proc: number of processes; None: one.

    Returns:
        One row per document, with its `ids`.
    """
    backend = plain_backend(tokenizer)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = tokenizer.eos_token_id

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        encodings = chain.from_iterable(_encoded(batch["text"], backend.encode_batch))
        return {"ids": [np.array([*begin, *encoding.ids, end], dtype=np.int32) for encoding in encodings]}

    return documents.map(
        tokenize,
        batched=True,
        batch_size=_batch_size(documents),
        remove_columns=documents.column_names,
        features=Features({"ids": Sequence(Value("int32"))}),
        num_proc=num_proc,
        new_fingerprint=Hasher.hash((documents._fingerprint, backend.to_str(), begin, end, FORMAT_VERSION)),
        desc="Tokenising",
    )


class FlatColumn:
    """A column of lists as one long array, which is read from the data set's memory-mapped buffers without a copy.

    Args:
        dataset: data set with the column.
        name: name of the column, which holds a list of numbers or booleans in each row.

    Attributes:
        lengths: length of each row's list.
    """

    def __init__(self, dataset: Dataset, name: str) -> None:
        chunks = dataset.data.column(name).chunks
        self._parts = [chunk.flatten() for chunk in chunks]
        self.lengths = np.concatenate([chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks])
        self._starts = np.cumsum([0, *map(len, self._parts)])
        self._row_ends = np.cumsum(self.lengths)

    def row(self, number: int) -> np.ndarray:
        """The list of a row."""
        end = int(self._row_ends[number])
        return self[end - int(self.lengths[number]) : end]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def parts(self) -> Iterator[np.ndarray]:
        """Iterates over the whole array, one chunk of the data set at a time."""
        return (part.to_numpy(zero_copy_only=False) for part in self._parts)

    def __getitem__(self, span: slice) -> np.ndarray:
        """The values from `span.start` to `span.stop`, which may extend over several chunks of the data set."""
        first = min(int(np.searchsorted(self._starts, span.start, side="right")), len(self._parts)) - 1
        found: list[np.ndarray] = []
        for number in range(first, len(self._parts)):
            part, start = self._parts[number], self._starts[number]
            if found and start >= span.stop:
                break
            piece = part.slice(max(0, span.start - start), span.stop - max(span.start, start))
            found.append(piece.to_numpy(zero_copy_only=False))
        return np.concatenate(found) if len(found) != 1 else found[0]


def log_frequencies(counts: np.ndarray) -> torch.Tensor:
    """The logarithm of each id's relative frequency, with add-one smoothing so that no probability is zero."""
    return torch.from_numpy(np.log((counts + 1) / (counts + 1).sum()))


def count_tokens(ids: FlatColumn, vocab_size: int) -> np.ndarray:
    """The number of times that each id occurs in a column of ids, (vocab_size,)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for part in ids.parts():
        counts += np.bincount(part, minlength=vocab_size)
    return counts
