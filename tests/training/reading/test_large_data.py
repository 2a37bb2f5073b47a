"""Corpora larger than memory: what is held of them does not grow with them, or by a few bytes a sentence."""

import json
import os
import random
import threading
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from regard.training.examples import sentence_pairs as pairs
from regard.training.examples import tokenized as corpus
from regard.training.examples.sentence_pairs import SentenceIndex, plan_pairs, plan_segments
from regard.training.examples.tokenized import tokenize_documents, tokenize_texts
from tests.support.fresh import run_python
from tests.training.conftest import make_texts

# Reading


def write_corpus(kind: str, name: str, megabytes: int) -> str:
    """Documents of about 1 kB, or files of 100 kB."""
    document = "".join(random.Random(0).choices("abcdefgh ", k=1000))
    numbers = range(megabytes * 1000)
    if kind == "files":
        os.mkdir(name)
        for number in numbers[::100]:
            with open(f"{name}/{number:06}.txt", "w") as file:
                file.write(f"{number}\n" + f"{document}\n" * 100)
        return name
    name = f"{name}.txt" if kind == "lines" else f"{name}.jsonl"
    with open(name, "w") as file:
        for number in numbers:
            text = f"{number} {document}"
            file.write((text if kind == "lines" else json.dumps({"text": text})) + "\n")
    return name


def peak_of(work: Callable[[], Any]) -> int:
    """The highest anonymous memory of this process while it works, in kB."""
    peak, done = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.01):
            with open("/proc/self/status") as status:
                fields = dict(line.split(":") for line in status)
            peak = max(peak, int(fields["RssAnon"].split()[0]))

    sampler = threading.Thread(target=sample)
    sampler.start()
    work()
    done.set()
    sampler.join()
    return peak


def measure_reading(kinds: list[str]) -> None:
    """Prints the memory that reading takes, for each kind of a small corpus and of one five times as large."""
    from regard.training.reading.documents import load_documents

    peaks = {}
    for kind in kinds:
        documents = "line" if kind == "lines" else "file"
        names = [write_corpus(kind, f"{kind}{megabytes}", megabytes) for megabytes in (8, 40)]
        peaks[kind] = [peak_of(partial(load_documents, name, documents=documents)) for name in names]
    print(json.dumps(peaks))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="tells anonymous memory apart by /proc")
def test_reading_holds_no_more_of_a_larger_corpus(tmp_path):
    kinds = ["lines", "files", "jsonl"]
    code = f"from tests.training.reading.test_large_data import measure_reading; measure_reading({kinds!r})"
    ran = run_python(code, tmp_path)
    assert ran.returncode == 0, ran.stderr
    peaks = json.loads(ran.stdout)
    assert list(peaks) == kinds
    # In kB. The whole of the larger one would be 32 MB more at the least.
    grown = {kind: large - small for kind, (small, large) in peaks.items()}
    assert max(grown.values()) < 16_000, grown


# Tokenising


class Recording:
    """A backend that records of how many characters it gave encodings at once."""

    def __init__(self, backend) -> None:
        self.backend, self.sizes = backend, []

    def __getattr__(self, name):
        method = getattr(self.backend, name)
        if not name.startswith("encode_batch"):
            return method

        def encode(texts, **options):
            self.sizes.append((sum(map(len, texts)), max(map(len, texts), default=0)))
            return method(texts, **options)

        return encode


@pytest.mark.parametrize("word_starts", [False, True])
@pytest.mark.parametrize("kind", ["documents", "texts"])
def test_little_is_encoded_at_once(folder, monkeypatch, tokenizer, byte_tokenizer, kind, word_starts):
    texts = ["", *make_texts(40, 8), make_texts(1, 200)[0], " "]
    if kind == "documents":
        by, tokenize = tokenizer, partial(tokenize_documents, tokenizer=tokenizer, word_starts=word_starts)
    else:
        by = deepcopy(byte_tokenizer)
        by.eos_token = "</s>"
        tokenize = partial(tokenize_texts, tokenizer=by)
    expected = tokenize(datasets.Dataset.from_dict({"text": texts}))[:]
    backend = Recording(corpus.plain_backend(by))
    monkeypatch.setattr(corpus, "plain_backend", lambda _: backend)
    monkeypatch.setattr(corpus, "_CHARACTERS_AT_ONCE", 500)
    monkeypatch.setattr(corpus, "_BYTES_AT_ONCE", 3000)
    found = tokenize(datasets.Dataset.from_dict({"text": texts, "other": texts}).select_columns(["text"]))
    assert found[:] == expected
    assert len(found) == len(texts)
    assert len(backend.sizes) > 20
    assert all(size < 500 + longest for size, longest in backend.sizes)


@pytest.mark.parametrize(("size", "number"), [(10, 100), (2**18, 64), (2**23, 2), (2**25, 1)])
def test_fewer_large_documents_are_in_memory_at_once(size, number):
    table = pa.table({"text": pa.array(["x" * size] * 3)})
    assert corpus._batch_size(datasets.Dataset(table)) in (number, number - 1)


# Planning an epoch


@pytest.mark.parametrize("plan", [plan_pairs, plan_segments])
def test_plan_of_an_epoch_takes_no_memory_for_sentences_and_examples(plan, monkeypatch):
    monkeypatch.setattr(pairs, "_AT_ONCE", 1_000)
    rng = np.random.default_rng(0)
    per_document = rng.integers(1, 30, size=7_000)
    lengths = rng.integers(1, 60, size=int(per_document.sum()), dtype=np.int32)
    plan(SentenceIndex(lengths[:31], np.array([9, 22]), 62), 125, seed=0, epoch=0)  # what is loaded once
    tracemalloc.start()
    try:
        index = SentenceIndex(lengths, per_document, 62)
        rows = plan(index, 125, seed=0, epoch=0)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    documents = len(per_document)
    assert len(rows) > 20 * 1_000
    # A place for each document, and what is memory-mapped is not allocated.
    assert kept < 8 * documents + 20_000
    assert peak < 24 * documents + 200 * 1_000


@pytest.mark.parametrize("plan", [plan_pairs, plan_segments])
@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_plan_does_not_depend_on_how_much_is_in_memory(plan, at_once, monkeypatch):
    rng = np.random.default_rng(0)
    # Documents without sentences, and sentences that are cut into pieces.
    per_document = rng.integers(0, 9, size=50)
    lengths = rng.integers(1, 60, size=int(per_document.sum()), dtype=np.int32)
    whole = SentenceIndex(lengths, per_document, 25)
    rows = plan(whole, 40, seed=0, epoch=0)
    monkeypatch.setattr(pairs, "_AT_ONCE", at_once)
    parts = SentenceIndex(lengths, per_document, 25)
    np.testing.assert_array_equal(parts.bounds, whole.bounds)
    np.testing.assert_array_equal(parts.documents, whole.documents)
    np.testing.assert_array_equal(plan(parts, 40, seed=0, epoch=0), rows)
