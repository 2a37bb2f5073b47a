"""The same files are read, or refused with the same words, as documents, pairs, captions and rows to fine-tune on."""

import gzip
import json
import os
import re

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from regard.training.reading.captioned_images import load_captions
from regard.training.reading.documents import load_documents
from regard.training.reading.tables import Column
from regard.training.reading.text_pairs import load_pairs
from regard.training.reading.typed_rows import load_table
from tests.support.reading import write
from tests.training.reading.test_captioned_images import draw

ROWS = [("a.png", "NA"), ("b.png", "ünï, “quoted”\nline"), ("a.png", "007")]
OBJECTS = [{"file_name": image, "text": text, "more": [1]} for image, text in ROWS]
LINES = [json.dumps(row, ensure_ascii=False) for row in OBJECTS]
CELLS = 'file_name,more,text\na.png,1,NA\nb.png,,"ünï, “quoted”\nline"\na.png,2,007\n'
PARQUET = pa.Table.from_pylist(OBJECTS)

GOOD = {
    "metadata.jsonl": "\n".join(LINES),
    "lines.jsonl.gz": "\n\n".join(LINES),
    "marked.jsonl": "\ufeff" + "\r\n".join(LINES) + "\r\n",
    "lines.json": "\n" + "\n".join(LINES),
    "list.json": "\n [" + ", ".join(LINES) + "]\n",
    "list.json.gz": json.dumps(OBJECTS),
    "pretty.json": "\ufeff" + json.dumps(OBJECTS, indent=2).replace("\n", "\r\n"),
    "metadata.csv": CELLS,
    "cells.csv.gz": CELLS,
    "marked.csv": "\ufeff" + CELLS.replace("\n", "\r\n").replace("“quoted”\r\n", "“quoted”\n"),
    "cells.tsv": CELLS.replace("ünï, ", "ünï; ").replace(",", "\t").replace("; ", ", "),
    "metadata.parquet": PARQUET,
    "dictionary.parquet": pa.table({name: PARQUET[name].dictionary_encode() for name in ("file_name", "text")}),
    "mapping.parquet": PARQUET.append_column("map", pa.array([None] * 3, pa.map_(pa.string(), pa.int64()))),
}

ROW = '{"file_name": "a.png", "text": "a"}'
BAD = {
    "not JSON": ("metadata.jsonl", ROW + "\n{cut", ":2 does not parse as JSON (one object a line): "),
    "no object": ("metadata.jsonl", ROW + "\n7", ":2 must be a JSON object, not int (7)"),
    "list in jsonl": ("metadata.jsonl", f"[{ROW}]", ":1 must be a JSON object, not list ("),
    "not UTF-8": ("metadata.jsonl", ROW.encode() + b'\n{"text": "\xe9"}', " is not UTF-8: byte 46 (0xe9); if it is"),
    "UTF-16": ("metadata.jsonl", ROW.encode("utf-16"), " is not UTF-8: byte 0 (0xff)"),
    "surrogate": ("metadata.jsonl", ROW.replace('"a"', r'"a\ud800"'), ":1: character 1 is half a surrogate pair"),
    "deep": ("metadata.jsonl", "[" * 100_000, ":1 does not parse as JSON (one object a line): maximum recursion"),
    "no column": ("metadata.jsonl", '{"file_name": "a.png", "b": {"c": 1}}', ":1 has no column 'text'; it has 'file_"),
    "damaged gzip": ("rows.jsonl.gz", None, " is not a complete gzip file, after line "),
    "no gzip": ("rows.csv.gz", None, " is not a complete gzip file: Not a gzipped file"),
    "no list of objects": ("rows.json", f"[\n{ROW},\n\n7]", ":4 must be a JSON object, not int (7)"),
    "list that is cut": (
        "rows.json",
        f"[\n{ROW},\n",
        ":3 does not parse as JSON (a list of objects): Expecting value",
    ),
    "list without comma": (
        "rows.json",
        f"[{ROW}\n{ROW}]",
        ":2 does not parse as JSON (a list of objects): Expecting ','",
    ),
    "comma at the end": ("rows.json", f"[{ROW},]", ":1 does not parse as JSON (a list of objects): "),
    "two lists": ("rows.json", f"[{ROW}]\n[{ROW}]", ":2 does not parse as JSON (a list of objects): Extra data"),
    "deep list": ("rows.json", "[" * 100_000, ":1 does not parse as JSON (a list of objects): maximum recursion"),
    "list that is not UTF-8": (
        "rows.json",
        f'[{ROW}, {{"text": "é"}}]'.encode("latin-1"),
        " is not UTF-8: byte 48 (0xe9)",
    ),
    "short row": ("metadata.csv", "file_name,text\na.png\n", ":2: column 'text' must hold text, not NoneType (None)"),
    "long row": ("metadata.csv", "file_name,text\na.png,b,c\n", ":2 has more fields than the header, 'file_name',"),
    "open quote": ("metadata.csv", 'file_name,text\na.png,"b\n', ":2 does not parse as CSV (excel): unexpected end"),
    "column twice": (
        "metadata.csv",
        "file_name,text,text\na.png,b,c\n",
        " has 2 columns 'text': rename or remove one",
    ),
    "other separator": ("metadata.csv", "file_name;text\na.png;b\n", ":2 has no column '"),
    "no Parquet": ("metadata.parquet", "no", " does not read as Parquet: Parquet file size is 2 bytes"),
    "Parquet without the column": ("metadata.parquet", PARQUET.drop_columns("text"), " has no column 'text'; it has"),
    "Parquet that is not UTF-8": (
        "metadata.parquet",
        pa.table({"file_name": ["a.png"], "text": pa.array([b"\xe9"]).view(pa.string())}),
        ":1 is not UTF-8",
    ),
    "Parquet without Python's values": (
        "metadata.parquet",
        pa.table({"file_name": ["a.png"], "text": pa.array([2**62], pa.timestamp("us"))}),
        ", rows 1 to 1, does not read as Parquet: date value out of range",
    ),
}


def read_documents(name):
    return load_documents(name, text_column="text")["text"][:]


def read_pairs(name):
    pairs = load_pairs(name, source_column="file_name", target_column="text")
    return list(zip(pairs["source"], pairs["target"], strict=True))


def read_captions(name):
    captions = load_captions(os.path.dirname(name)).cast_column("image", datasets.Image(decode=False))
    images = (os.path.basename(image["path"]) for image in captions["image"])
    return list(zip(images, captions["text"], strict=True))


def read_typed(name):
    rows = load_table([name], [Column("file_name", "label_column"), Column("text", "text_column")], "train").rows
    return [(row["file_name"], row["text"]) for row in rows]


def readers(name):
    """What reads a file: captions are read from files of certain names alone."""
    return [read_documents, read_pairs, read_typed, *([read_captions] if "/metadata." in name else [])]


@pytest.fixture
def make(folder):
    """Writes a file into a folder of images."""

    def make_file(name, content):
        name = f"photos/{name}"
        draw("photos/a.png")
        draw("photos/b.png")
        if isinstance(content, pa.Table):
            pa.parquet.write_table(content, name)
        elif content is None:
            data = gzip.compress(
                "".join(f'{{"text": "{row}", "file_name": "a.png"}}\n' for row in range(5000)).encode()
            )
            with open(name, "wb") as file:
                file.write(data[: len(data) // 2] if ".jsonl" in name else b"abc")
        else:
            write(name, content)
        return name

    return make_file


@pytest.mark.parametrize("name", GOOD)
def test_each_reader_gives_the_same_rows(name, make):
    file = make(name, GOOD[name])
    for read in readers(file):
        assert read(file) == ([text for _, text in ROWS] if read == read_documents else ROWS), read


@pytest.mark.parametrize("case", BAD)
def test_each_reader_gives_the_same_error(case, make):
    name, content, expected = BAD[case]
    file = make(name, content)
    messages = set()
    for read in readers(file):
        if case == "other separator" and read == read_documents:
            continue  # it asks for one of the two columns alone
        with pytest.raises(ValueError, match=r"^[^\n]+$") as raised:
            read(file)
        # Errors name the argument that chooses the column.
        messages.add(re.sub(r"`\w+_column` can be", "it has", str(raised.value)))
    (message,) = messages
    assert message.replace("'", "").startswith((file + expected).replace("'", ""))


def test_what_fine_tuning_alone_takes(make):
    """A value may be missing, and need not be a text."""
    lines = [ROW, '{"file_name": null, "text": "b"}', '{"text": "c"}']
    file = make("metadata.jsonl", "\n".join(lines))
    assert read_typed(file) == [("a.png", "a"), (None, "b"), (None, "c")]
    for read in (read_pairs, read_captions):
        with pytest.raises(ValueError, match=r"^photos/metadata.jsonl:2: column 'file_name' must hold text, not None"):
            read(file)
    assert read_documents(file) == ["a", "b", "c"]


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_records_of_a_list_are_left_out_one_by_one(action, make):
    bad = [b"7", b'{"text": "\xe9"}', b'{"text": 1}', b'{"text": "b"}']
    file = make("rows.json", b"[" + b",\n".join([ROW.encode(), *bad]) + b"]")
    if action == "skip":
        documents = load_documents(file, bad_records="skip")
        assert (documents["text"][:], documents["source"][:]) == (["a", "b"], [f"{file}:1", f"{file}:5"])
    else:
        with pytest.raises(ValueError, match=r"^photos/rows\.json:2 must be a JSON object, not int \(7\)$"):
            load_documents(file)


def test_a_list_that_is_too_large_is_refused(make, monkeypatch):
    monkeypatch.setattr("regard.training.reading.tables.MAX_LINE", 100)
    file = make("rows.json", "[" + ",\n".join([ROW] * 5) + "]")
    for read in readers(file):
        with pytest.raises(ValueError, match=r"rows\.json: a list of more than 100 characters; write one object a li"):
            read(file)
