import collections
import copy

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, Sequence, Value

from regard.tokenization.byte_level import train_byte_level
from regard.tokenization.wordpiece import train_wordpiece
from regard.training.examples import tokenized as corpus
from regard.training.examples.sentences import split_sentences
from regard.training.examples.tokenized import (
    FlatColumn,
    count_tokens,
    plain_backend,
    tokenize_documents,
    tokenize_texts,
)
from regard.training.reading.documents import load_documents


@pytest.fixture
def documents(corpus_folder):
    """Documents on the disk, whose tokenised form is cached."""
    return load_documents(corpus_folder)


@pytest.fixture
def fresh_documents(tmp_path, texts, monkeypatch):
    """Documents that no test has tokenised before."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "fresh.txt").write_text("\n".join(texts), encoding="utf-8")
    return load_documents(tmp_path / "fresh.txt", documents="line")


@pytest.fixture
def tokenised(monkeypatch):
    """Counts the documents that are split into sentences from now on."""
    seen = []

    def counted(text, language):
        seen.append(language)
        return split_sentences(text, language)

    monkeypatch.setattr(corpus, "split_sentences", counted)
    return seen


# Tokenising


def test_rows_hold_the_ids_of_the_sentences(documents, tokenizer):
    tokens = tokenize_documents(documents, tokenizer, word_starts=True)
    assert len(tokens) == len(documents) == 12
    for row, text in zip(tokens, documents["text"], strict=True):
        sentences = [tokenizer(sentence, add_special_tokens=False)["input_ids"] for sentence in split_sentences(text)]
        assert row["ids"] == [id_ for ids in sentences for id_ in ids]
        assert row["sentence_lengths"] == [len(ids) for ids in sentences]
        pieces = tokenizer.convert_ids_to_tokens(row["ids"])
        assert row["starts_word"] == [not piece.startswith("##") for piece in pieces]
        assert {True, False} == set(row["starts_word"])


def test_word_starts_change_nothing_else(documents, tokenizer):
    with_words = tokenize_documents(documents, tokenizer, word_starts=True)
    assert with_words.column_names == ["ids", "sentence_lengths", "starts_word"]
    assert with_words.remove_columns("starts_word")[:] == tokenize_documents(documents, tokenizer)[:]


def test_word_starts_of_a_byte_level_tokenizer(documents, byte_tokenizer):
    for row in tokenize_documents(documents, byte_tokenizer, word_starts=True):
        pieces = byte_tokenizer.convert_ids_to_tokens(row["ids"])
        # The full stop at the end of a sentence is a word too.
        assert row["starts_word"] == [piece.startswith(("Ġ", ".")) for piece in pieces]


def test_names_of_special_tokens_are_text(corpus_of, texts):
    text = "A [SEP] in [MASK] the [CLS] text [PAD][UNK]. Next."
    tokenizer = train_wordpiece([text, *texts], vocab_size=120)
    (row,) = corpus_of([text], tokenizer)
    assert not set(row["ids"]) & set(tokenizer.all_special_ids)
    # The tokenizer itself still knows them.
    assert set(tokenizer.all_special_ids) <= set(tokenizer(text)["input_ids"])


def test_settings_of_an_earlier_call_play_no_part(documents, tokenizer):
    expected = tokenize_documents(documents, tokenizer)[:]
    tokenizer(["Some text."], truncation=True, max_length=4, padding="max_length")
    kept = tokenizer.backend_tokenizer.truncation, tokenizer.backend_tokenizer.padding
    documents = documents.map(lambda row: row)  # not the cached rows
    assert tokenize_documents(documents, tokenizer)[:] == expected
    # Nor is the tokenizer changed.
    assert (tokenizer.backend_tokenizer.truncation, tokenizer.backend_tokenizer.padding) == kept
    assert not tokenizer.backend_tokenizer.encode_special_tokens


def test_sentences_without_a_token_are_left_out(corpus_of, tokenizer):
    rows = corpus_of(["A river.\n\n\x00\x07\n\nA stone.", "\x00\x07", "A fish."])
    assert [len(row["sentence_lengths"]) for row in rows] == [2, 0, 1]
    assert rows[1]["ids"] == rows[1]["starts_word"] == []
    assert [sum(row["sentence_lengths"]) for row in rows] == [len(ids) for ids in rows["ids"]]


def test_several_processes_give_the_same_rows(fresh_documents, tokenizer, documents):
    expected = tokenize_documents(documents, tokenizer)[:]
    assert tokenize_documents(fresh_documents, tokenizer, num_proc=2)[:] == expected


# Cached and memory-mapped


def test_the_second_call_reads_the_cache(fresh_documents, tokenizer, tokenised):
    first = tokenize_documents(fresh_documents, tokenizer)
    assert tokenised == ["en"] * 12
    again = tokenize_documents(fresh_documents, tokenizer)
    assert len(tokenised) == 12
    assert again[:] == first[:]


def test_a_saved_tokenizer_is_the_same_one(fresh_documents, tokenizer, tokenised, tmp_path):
    tokenize_documents(fresh_documents, tokenizer)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    tokenize_documents(fresh_documents, type(tokenizer).from_pretrained(tmp_path / "tokenizer"))
    assert len(tokenised) == 12


def test_another_tokenizer_or_language_is_tokenised_anew(fresh_documents, tokenizer, tokenised, texts):
    tokenize_documents(fresh_documents, tokenizer)
    other = train_wordpiece(texts, vocab_size=80)
    assert tokenize_documents(fresh_documents, other)["ids"] != tokenize_documents(fresh_documents, tokenizer)["ids"]
    assert len(tokenised) == 24
    tokenize_documents(fresh_documents, tokenizer, language="de")
    assert tokenised == ["en"] * 24 + ["de"] * 12


def test_other_documents_are_tokenised_anew(fresh_documents, tokenizer, tokenised):
    tokenize_documents(fresh_documents, tokenizer)
    tokenize_documents(fresh_documents.select(range(5)), tokenizer)
    assert len(tokenised) == 17


def test_a_higher_version_of_the_format_is_tokenised_anew(fresh_documents, tokenizer, tokenised, monkeypatch):
    tokenize_documents(fresh_documents, tokenizer)
    monkeypatch.setattr(corpus, "FORMAT_VERSION", corpus.FORMAT_VERSION + 1)
    tokenize_documents(fresh_documents, tokenizer)
    assert len(tokenised) == 24


def test_rows_are_memory_mapped(documents, tokenizer):
    tokens = tokenize_documents(documents, tokenizer)
    assert tokens.cache_files
    assert isinstance(tokens.data, datasets.table.MemoryMappedTable)


# Whole documents


@pytest.fixture(scope="module")
def generative_tokenizer(texts):
    """A byte-level tokenizer with tokens that begin and end a text."""
    return train_byte_level(texts, vocab_size=300, model_max_length=16)


class Counted:
    """A backend that counts the texts it is given."""

    def __init__(self, backend, seen: list[str]) -> None:
        self._backend, self._seen = backend, seen

    def encode_batch(self, texts: list[str], **options):
        self._seen += texts
        return self._backend.encode_batch(texts, **options)

    def to_str(self) -> str:
        return self._backend.to_str()


@pytest.fixture
def encoded(monkeypatch):
    """Gathers the texts that are encoded from now on."""
    seen: list[str] = []
    monkeypatch.setattr(corpus, "plain_backend", lambda tokenizer: Counted(plain_backend(tokenizer), seen))
    return seen


def test_rows_hold_whole_documents(documents, generative_tokenizer):
    rows = tokenize_texts(documents, generative_tokenizer)
    assert rows.column_names == ["ids"]
    assert len(rows) == len(documents) == 12
    for ids, text in zip(rows["ids"], documents["text"], strict=True):
        assert len(ids) > generative_tokenizer.model_max_length
        assert (ids[0], ids[-1]) == (generative_tokenizer.bos_token_id, generative_tokenizer.eos_token_id)
        assert not set(ids[1:-1]) & set(generative_tokenizer.all_special_ids)
        assert generative_tokenizer.decode(ids[1:-1]) == text


def test_a_tokenizer_without_a_begin_token(documents, generative_tokenizer):
    without = copy.deepcopy(generative_tokenizer)
    without.bos_token = None
    rows, expected = tokenize_texts(documents, without), tokenize_texts(documents, generative_tokenizer)
    assert rows["ids"] == [ids[1:] for ids in expected["ids"]]


def test_names_of_special_tokens_are_text_in_whole_documents(generative_tokenizer):
    text = "A <s> in <pad> the </s> text<unk></s>."
    (row,) = tokenize_texts(Dataset.from_dict({"text": [text]}), generative_tokenizer)
    assert not set(row["ids"][1:-1]) & set(generative_tokenizer.all_special_ids)
    assert generative_tokenizer.decode(row["ids"][1:-1]) == text
    # The tokenizer itself still knows them.
    assert set(generative_tokenizer.all_special_ids) <= set(generative_tokenizer(text)["input_ids"])


def test_whole_documents_are_neither_cut_nor_padded(documents, generative_tokenizer):
    expected = tokenize_texts(documents, generative_tokenizer)["ids"]
    tokenizer = copy.deepcopy(generative_tokenizer)
    tokenizer(["Some text."], truncation=True, max_length=4, padding="max_length")
    before = tokenizer.backend_tokenizer.to_str()
    assert tokenizer.backend_tokenizer.truncation
    assert tokenizer.backend_tokenizer.padding
    documents = documents.map(lambda row: row)  # not the cached rows
    assert tokenize_texts(documents, tokenizer)["ids"] == expected
    # Nor is the tokenizer changed.
    assert tokenizer.backend_tokenizer.to_str() == before
    assert not tokenizer.backend_tokenizer.encode_special_tokens


def test_several_processes_give_the_same_whole_documents(fresh_documents, generative_tokenizer, documents):
    expected = tokenize_texts(documents, generative_tokenizer)[:]
    assert tokenize_texts(fresh_documents, generative_tokenizer, num_proc=2)[:] == expected


def test_whole_documents_are_read_from_the_cache(fresh_documents, generative_tokenizer, encoded, tmp_path):
    first = tokenize_texts(fresh_documents, generative_tokenizer)
    assert encoded == fresh_documents["text"]
    assert isinstance(first.data, datasets.table.MemoryMappedTable)
    generative_tokenizer.save_pretrained(tmp_path / "tokenizer")
    saved = type(generative_tokenizer).from_pretrained(tmp_path / "tokenizer")
    for tokenizer in (generative_tokenizer, saved):
        assert tokenize_texts(fresh_documents, tokenizer)[:] == first[:]
    assert len(encoded) == 12


def test_whole_documents_are_tokenised_anew_where_they_would_differ(
    fresh_documents, generative_tokenizer, encoded, texts, monkeypatch
):
    tokenize_texts(fresh_documents, generative_tokenizer)
    without, other_end = copy.deepcopy(generative_tokenizer), copy.deepcopy(generative_tokenizer)
    without.bos_token = None
    other_end.eos_token = "<pad>"
    for number, tokenizer in enumerate([without, other_end, train_byte_level(texts, vocab_size=280)], start=2):
        tokenize_texts(fresh_documents, tokenizer)
        assert len(encoded) == 12 * number
    tokenize_texts(fresh_documents.select(range(5)), generative_tokenizer)
    assert len(encoded) == 53
    monkeypatch.setattr(corpus, "FORMAT_VERSION", corpus.FORMAT_VERSION + 1)
    tokenize_texts(fresh_documents, generative_tokenizer)
    assert len(encoded) == 65


def test_sentences_and_whole_documents_of_one_tokenizer_are_cached_apart(fresh_documents, generative_tokenizer):
    sentences = tokenize_documents(fresh_documents, generative_tokenizer)
    whole = tokenize_texts(fresh_documents, generative_tokenizer)
    assert sentences.column_names == ["ids", "sentence_lengths"]
    assert whole.column_names == ["ids"]
    assert tokenize_documents(fresh_documents, generative_tokenizer)[:] == sentences[:]


# Flat columns

ROWS = [[1, 2, 3], [], [4], [], [], [5, 6], [7, 8, 9, 10], [11], []]


def column_of(rows: list[list], writer_batch_size: int, kind: str = "int32") -> FlatColumn:
    """A column on the disk, in chunks of so many rows."""

    def generate(rows, size):
        yield from ({"other": "x", "values": row} for row in rows)

    features = Features({"other": Value("string"), "values": Sequence(Value(kind))})
    # Arguments of the generator are part of the cache key, the size of the chunks is not.
    arguments = {"rows": rows, "size": writer_batch_size}
    dataset = Dataset.from_generator(
        generate, gen_kwargs=arguments, features=features, writer_batch_size=writer_batch_size
    )
    assert len(dataset.data.column("values").chunks) == -(-len(rows) // writer_batch_size)
    return FlatColumn(dataset, "values")


@pytest.mark.parametrize("writer_batch_size", [1, 2, 3, 100])
def test_a_flat_column_is_its_rows_joined(writer_batch_size):
    column = column_of(ROWS, writer_batch_size)
    flat = [value for row in ROWS for value in row]
    assert len(column) == len(flat)
    assert column.lengths.tolist() == [len(row) for row in ROWS]
    assert np.concatenate(list(column.parts())).tolist() == flat
    for start in range(len(flat)):
        for stop in range(start + 1, len(flat) + 1):
            assert column[start:stop].tolist() == flat[start:stop]


@pytest.mark.parametrize("writer_batch_size", [1, 2, 100])
def test_empty_spans(writer_batch_size):
    column = column_of(ROWS, writer_batch_size)
    for place in range(len(column) + 1):
        assert column[place:place].tolist() == []
    assert column_of([[], []], writer_batch_size)[0:0].tolist() == []


def test_a_flat_column_of_truth_values():
    rows = [[True, False], [False], [], [True, True, True, False, True]]
    column = column_of(rows, 2, "bool")
    assert column[0:8].dtype == np.bool_
    assert column[1:7].tolist() == [False, False, True, True, True, False]


def test_a_flat_column_of_a_part_of_a_data_set(documents, tokenizer):
    # Rows 3 to 8 of memory-mapped chunks start inside them.
    tokens = tokenize_documents(documents, tokenizer)
    column = FlatColumn(Dataset(tokens.data.slice(3, 5)), "ids")
    expected = [id_ for row in tokens.select(range(3, 8)) for id_ in row["ids"]]
    assert column[0 : len(column)].tolist() == expected


def test_reading_a_flat_column_copies_no_chunk():
    column_of([list(range(1_000))] * 100, 50)
    before = pa.total_allocated_bytes()
    column = column_of([list(range(1_000))] * 100, 50)
    assert column[49_900:50_100].tolist() == [*range(900, 1_000), *range(100)]
    part = column[10:20]
    assert pa.total_allocated_bytes() - before < 40_000  # of 400,000
    assert not part.flags.owndata


# Counts


@pytest.mark.parametrize("writer_batch_size", [1, 2, 100])
def test_tokens_are_counted(writer_batch_size):
    rows = [[3, 1, 3], [], [3], [0, 6], [], [1, 3]]
    expected = collections.Counter(id_ for row in rows for id_ in row)
    for vocab_size in (7, 11):
        counts = count_tokens(column_of(rows, writer_batch_size), vocab_size)
        assert counts.tolist() == [expected[id_] for id_ in range(vocab_size)]
    assert count_tokens(column_of([[], []], writer_batch_size), 5).tolist() == [0] * 5
