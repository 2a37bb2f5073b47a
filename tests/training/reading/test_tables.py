import csv
import io
import json
import os
import pathlib
import re
from functools import partial

import pyarrow as pa
import pyarrow.parquet
import pytest

from regard.training.reading.documents import load_documents
from regard.training.reading.tables import Column, read_table
from tests.support.reading import refusal_by, rows_of, texts_of, write

refusal = partial(refusal_by, load_documents)


# Tables

RECORDS = [
    {"id": "1", "text": 'A "quoted", text.'},
    {"id": "2", "text": "Two\nlines, é 你."},
    {"id": "3", "text": " "},
    {"id": "4", "text": "x" * 300_000},
]


def write_table(name: str, records: list[dict]) -> str:
    kind = name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(records), name, row_group_size=2)
    elif kind in ("json", "jsonl"):
        write(name, "".join(json.dumps(record) + "\n\n" for record in records))
    else:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, records[0], dialect="excel-tab" if kind == "tsv" else "excel")
        writer.writeheader()
        writer.writerows(records)
        write(name, text.getvalue())
    return name


TABLES = ["t.jsonl", "t.json", "t.jsonl.gz", "t.csv", "t.CSV.gz", "t.tsv", "t.parquet"]


@pytest.mark.parametrize("name", TABLES)
def test_table(folder, name):
    write_table(name, RECORDS)
    line_or_row = {"j": (1, 3, 7), "c": (2, 3, 6), "t": (2, 3, 6), "p": (1, 2, 4)}[name[2].lower()]
    kept = [RECORDS[i]["text"] for i in (0, 1, 3)]
    assert rows_of(name) == [(text, f"{name}:{n}") for text, n in zip(kept, line_or_row, strict=True)]
    assert texts_of(name, text_column="id") == ["1", "2", "3", "4"]


@pytest.mark.parametrize("name", TABLES)
def test_missing_column(folder, name):
    write_table(name, RECORDS)
    message = refusal(name, text_column="body")
    assert re.fullmatch(rf"{name}(:\d)? has no column 'body'; `text_column` can be 'id', 'text'", message)


@pytest.mark.parametrize(("value", "shown"), [(None, "NoneType (None)"), (3, "int (3)"), (["a"], "list (['a'])")])
@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_value_that_is_no_text(folder, name, value, shown):
    write_table(name, [{"text": value}])
    assert refusal(name) == f"{name}:1: column 'text' must hold text, not {shown}"


def test_csv_row_that_is_too_short(folder):
    write("t.csv", "id,text\n1,one\n2\n")
    assert refusal("t.csv") == "t.csv:3: column 'text' must hold text, not NoneType (None)"


def test_csv_row_that_is_too_long(folder):
    # Half of the text would be lost.
    write("t.csv", "id,text\n1,one, two\n")
    assert refusal("t.csv") == "t.csv:2 has more fields than the header, 'id', 'text'"


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_quote_that_is_never_closed(folder, name):
    write(name, 'text\none\n"two\nthree\n')
    assert refusal(name).startswith(f"{name}:3 does not parse as CSV (excel")


@pytest.mark.parametrize("line", ['{"text": "cut', "plain text", "[" * 100_000])
def test_json_line_that_does_not_parse(folder, line):
    write("t.jsonl", '{"text": "fine"}\n\n' + line + "\n")
    assert refusal("t.jsonl").startswith("t.jsonl:3 does not parse as JSON (one object a line): ")


@pytest.mark.parametrize("line", ['["text"]', '"text"', "null", "1"])
def test_json_line_that_is_no_object(folder, line):
    write("t.json", '{"text": "fine"}\n' + line)
    assert refusal("t.json").startswith("t.json:2 must be a JSON object, not ")


def test_text_that_is_not_unicode(folder):
    write("t.jsonl", r'{"text": "ab\ud800"}')
    assert refusal("t.jsonl") == "t.jsonl:1: character 2 is half a surrogate pair, which is no text"


def test_file_that_is_not_parquet(folder):
    assert refusal(write("t.parquet", "no")).startswith("'t.parquet' does not read as Parquet: ")


def test_parquet_text_that_is_not_utf8(folder):
    column = pa.array([b"fine", b"caf\xe9"]).view(pa.string())
    pa.parquet.write_table(pa.table({"text": column}), "t.parquet")
    assert refusal("t.parquet") == "t.parquet:2 is not UTF-8"


def test_folder_of_tables(folder):
    os.mkdir("tables")
    write_table("tables/b.parquet", RECORDS[:1])
    write_table("tables/a.jsonl.gz", RECORDS[1:2])
    assert texts_of("tables") == [RECORDS[1]["text"], RECORDS[0]["text"]]
    assert texts_of("tables/*.parquet") == [RECORDS[0]["text"]]


# Several columns

COLUMNS = [Column("b", "first"), Column("a", "second")]


@pytest.mark.parametrize("name", TABLES)
def test_columns_come_in_the_order_asked_for(folder, name):
    write_table(name, [{"a": f"a{i}", "c": "", "b": f"b{i}"} for i in range(3)])
    assert [texts for _, texts in read_table(name, COLUMNS)] == [(f"b{i}", f"a{i}") for i in range(3)]
    assert [texts for _, texts in read_table(name, COLUMNS[:1] * 2)] == [(f"b{i}", f"b{i}") for i in range(3)]


@pytest.mark.parametrize("name", TABLES)
def test_each_missing_column_is_told_by_its_argument(folder, name):
    write_table(name, [{"b": "b", "c": "c"}])
    message = "no column 'a'; `second` can be 'b', 'c'"
    with pytest.raises(ValueError, match=message):
        list(read_table(name, COLUMNS))
    with pytest.raises(ValueError, match="no column 'd'; it has 'b', 'c'"):
        list(read_table(name, [Column("d")]))


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_column_inside_another(folder, name):
    write_table(name, [{"id": i, "pair": {"de": f"de{i}", "en": f"en{i}"}} for i in range(3)])
    columns = [Column("pair.en", "first"), Column("pair.de", "second")]
    assert [texts for _, texts in read_table(name, columns)] == [(f"en{i}", f"de{i}") for i in range(3)]
    with pytest.raises(ValueError, match=r"no column 'pair\.fr'; `first` can be 'id', 'pair\.de', 'pair\.en'"):
        list(read_table(name, [Column("pair.fr", "first")]))
    with pytest.raises(ValueError, match="column 'pair' must hold text, not dict"):
        list(read_table(name, [Column("pair", "first")]))


@pytest.mark.parametrize("name", TABLES)
def test_column_whose_name_has_a_dot(folder, name):
    write_table(name, [{"pair.en": "whole name"}])
    assert [texts for _, texts in read_table(name, [Column("pair.en")])] == [("whole name",)]


@pytest.mark.parametrize("place", [5, 9, 105])
def test_a_damaged_parquet_file_is_named_in_one_line(folder, place):
    """Its reader has errors of many kinds, some of several lines, and none says which file it was."""
    pa.parquet.write_table(pa.Table.from_pylist([{"text": "A river runs"}]), "whole.parquet")
    data = bytearray(pathlib.Path("whole.parquet").read_bytes())
    data[place] = 255 if place == 105 else 0
    pathlib.Path("t.parquet").write_bytes(data)
    assert re.match("'t.parquet'(, rows 1 to 1,)? does not read as Parquet: ", refusal("t.parquet"))


def test_a_parquet_column_that_python_has_no_values_for(folder):
    pa.parquet.write_table(pa.table({"text": pa.array([2**62], pa.timestamp("us"))}), "t.parquet")
    assert refusal("t.parquet").startswith(
        "'t.parquet', rows 1 to 1, does not read as Parquet: date value out of range"
    )


def test_a_parquet_file_that_is_not_there_is_said_so(folder):
    with pytest.raises(FileNotFoundError, match=r"none\.parquet"):
        list(read_table("none.parquet", [Column("text")]))
