import os
from functools import partial

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from regard.training.reading import sources, text_files
from regard.training.reading.documents import load_documents
from regard.training.reading.text_pairs import load_pairs
from tests.support.reading import refusal_by, write, write_lines

refusal = partial(refusal_by, load_pairs)


def pairs_of(*args, **kwargs) -> list[tuple[str, str]]:
    pairs = load_pairs(*args, **kwargs)
    assert pairs.column_names == ["source", "target"]
    assert set(map(str, pairs.features.values())) == {"Value('string')"}
    return list(zip(pairs["source"], pairs["target"], strict=True))


# Tables


def test_tables_of_every_kind(folder):
    write_lines("1.jsonl", {"target": "1t", "id": 1, "source": "1s"})
    write("2.csv.gz", 'target,source\n2t,"2s\nof two lines, é"\n')
    write("3.tsv", "source\tid\ttarget\n3s\t1\t3t\n")
    pa.parquet.write_table(pa.table({"target": ["4t"], "source": ["4s"]}), "4.parquet")
    expected = [("1s", "1t"), ("2s\nof two lines, é", "2t"), ("3s", "3t"), ("4s", "4t")]
    assert pairs_of(".") == expected
    assert pairs_of(["3.tsv", "*.jsonl", folder / "3.tsv", "."]) == [expected[i] for i in (2, 0, 1, 3)]


def test_columns_are_chosen(folder):
    name = write_lines("t.jsonl", {"a": "a", "b": "b", "pair": {"en": "en", "de": "de"}})
    assert pairs_of(name, source_column="a", target_column="b") == [("a", "b")]
    assert pairs_of(name, source_column="b", target_column="a") == [("b", "a")]
    assert pairs_of(name, source_column="pair.de", target_column="pair.en") == [("de", "en")]
    assert pairs_of(name, source_column="a", target_column="a") == [("a", "a")]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "t.csv:2 has no column 'source'; `source_column` can be 'en', 'de'"),
        ({"source_column": "en"}, "t.csv:2 has no column 'target'; `target_column` can be 'en', 'de'"),
    ],
)
def test_missing_column(folder, columns, message):
    assert refusal(write("t.csv", "en,de\na,b\n"), **columns) == message


@pytest.mark.parametrize("column", ["source", "target"])
@pytest.mark.parametrize("text", ["", " \t\n\u3000"])
def test_empty_text(folder, column, text):
    name = write_lines("t.jsonl", {"source": "a", "target": "b"}, {"source": "a", "target": "b"} | {column: text})
    assert refusal(name) == f"t.jsonl:2: column '{column}' must hold text, not nothing or white space alone"
    assert pairs_of(name, max_pairs=1) == [("a", "b")]


def test_text_is_kept_as_it_is(folder):
    assert pairs_of(write_lines("t.jsonl", {"source": " a\n", "target": "\tb "})) == [(" a\n", "\tb ")]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"source": "a", "target": null}', "t.jsonl:1: column 'target' must hold text, not NoneType (None)"),
        ('{"source": 3, "target": "b"}', "t.jsonl:1: column 'source' must hold text, not int (3)"),
        (r'{"source": "a", "target": "b\ud800"}', "t.jsonl:1: character 1 is half a surrogate pair, which is no text"),
        ("a\tb", "t.jsonl:1 does not parse as JSON (one object a line): Expecting value: line 1 column 1 (char 0)"),
        ("", "there is no pair in 't.jsonl' (1 file)"),
    ],
)
def test_table_that_holds_no_pairs(folder, rows, message):
    assert refusal(write("t.jsonl", rows)) == message


def test_file_that_is_no_table(folder):
    suffixes = "'.jsonl', '.json', '.csv', '.tsv', '.parquet'"
    write("docs/a.txt", "a")
    message = f"'docs/a.txt' is not a table: its name must end in {suffixes}"
    assert refusal("docs/a.txt") == refusal("docs/*") == message
    assert refusal("docs") == f"folder 'docs' holds no file that ends in {suffixes}"
    # A folder's description is not in the way.
    write_lines("docs/a.jsonl", {"source": "a", "target": "b"})
    assert pairs_of("docs") == [("a", "b")]


@pytest.mark.parametrize("name", ["date", "no/such/folder", "data/corpus.txt", "data/pairs.jsonl.gz"])
def test_source_that_does_not_exist(folder, name):
    assert refusal(name) == (
        f"`data` ({name!r}) is not 'dates', a file, a folder, a glob or a data set id (org/name): "
        "there is nothing of that name"
    )


def test_data_must_name_something(folder):
    assert refusal([]) == "`data` names no source; give a file, folder, glob, data set id or 'dates'"


def test_max_pairs(folder):
    name = write_lines("t.jsonl", *({"source": f"s{i}", "target": f"t{i}"} for i in range(4)), {})
    assert pairs_of(name, max_pairs=4) == [(f"s{i}", f"t{i}") for i in range(4)]
    assert pairs_of([name], max_pairs=2) == [("s0", "t0"), ("s1", "t1")]
    assert "t.jsonl:5 has no column" in refusal(name)
    assert (
        refusal(name, max_pairs=0) == "`max_pairs` (0) must be at least 1 and less than 2**63, or None for all pairs"
    )


# Data sets on the Hub


@pytest.fixture
def hub(folder, monkeypatch):
    """Stands in for the Hub: every id is one table of five pairs inside of the column `translation`."""
    features = datasets.Features(
        {"id": datasets.Value("int64"), "translation": datasets.Translation(languages=["de", "en"])}
    )
    rows = ({"id": i, "translation": {"en": f"en{i}", "de": f"de{i}"}} for i in range(5))
    options = {"data_files": write_lines("hub/rows.jsonl", *rows), "features": features}
    calls = []

    def builder(path, config):
        calls.append(("builder", path, config))
        return datasets.load_dataset_builder("json", **options)

    def whole(path, config, split):
        calls.append(("whole", path, config, split))
        return datasets.load_dataset("json", split=split, **options)

    monkeypatch.setattr(sources, "load_dataset_builder", builder)
    monkeypatch.setattr(sources, "load_dataset", whole)
    return calls


COLUMNS = {"source_column": "translation.en", "target_column": "translation.de"}


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_set(hub, streaming):
    pairs = pairs_of("org/name:de-en", split="train", streaming=streaming, **COLUMNS)
    assert pairs == [(f"en{i}", f"de{i}") for i in range(5)]
    assert hub == [("builder", "org/name", "de-en") if streaming else ("whole", "org/name", "de-en", "train")]


def test_max_pairs_streams_a_hub_data_set(hub):
    assert pairs_of("org/name", max_pairs=2, **COLUMNS) == [("en0", "de0"), ("en1", "de1")]
    assert hub == [("builder", "org/name", None)]


def test_split_of_a_hub_data_set(hub):
    assert pairs_of("org/name", split="train[3:]", **COLUMNS) == [("en3", "de3"), ("en4", "de4")]
    assert "as a data set on the Hub: Unknown split" in refusal("org/name", split="nothing", **COLUMNS)


def test_two_columns_of_a_hub_data_set(folder, monkeypatch):
    name = write_lines("rows.jsonl", {"id": 1, "a": "a", "b": "b"})
    monkeypatch.setattr(
        sources, "load_dataset", lambda *_, split: datasets.load_dataset("json", data_files=name)[split]
    )
    assert pairs_of("org/name", source_column="b", target_column="a") == [("b", "a")]
    assert pairs_of("org/name", source_column="b", target_column="b") == [("b", "b")]


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_set_without_the_column(hub, streaming):
    expected = "org/name has no column 'source'; `source_column` can be 'id', 'translation.de', 'translation.en'"
    assert refusal("org/name", streaming=streaming) == expected


def test_hub_joins_files(hub):
    name = write_lines("t.jsonl", {"translation": {"en": "a", "de": "b"}})
    assert pairs_of([name, "org/name"], **COLUMNS) == [("a", "b"), *((f"en{i}", f"de{i}") for i in range(5))]


# The cache


def test_files_are_read_once(folder, monkeypatch):
    opened = []
    original = text_files.open_file

    def open_file(name, *args, **kwargs):
        opened.append(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(
        text_files, "open_file", lambda name, *args, **kw: opened.append(name) or original(name, *args, **kw)
    )
    name = write_lines("t.jsonl", {"source": "a", "target": "b", "text": "c"})
    assert load_pairs(name)._fingerprint == load_pairs([name])._fingerprint
    assert opened == [name]
    # Other arguments, the documents of the same file, and the file once it has changed.
    assert pairs_of(name, target_column="text") == [("a", "c")]
    assert load_documents(name)["text"][:] == ["c"]
    status = os.stat(write_lines(name, {"source": "a", "target": "B", "text": "c"}))
    os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert pairs_of(name) == [("a", "B")]
    assert opened == [name] * 4
