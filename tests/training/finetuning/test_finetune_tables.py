"""Tables to fine-tune on, of every kind, and what is held out of them."""

import csv
import json
from collections import Counter

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from regard.training.finetuning.labels import draw, load_tables, read_rows
from regard.training.finetuning.settings import FinetuneSettings
from regard.training.reading.tables import Column

TEXT, LABEL = Column("text", "text_column"), Column("label", "label_column")
ROWS = [
    {"text": "a red cat", "label": "x"},
    {"text": "NA", "label": "007"},
    {"text": "ünï, “quoted”\nline", "label": ""},
]


def write_table(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0], dialect="excel-tab" if path.suffix == ".tsv" else "excel")
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


# Reading


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_each_kind_of_table_gives_the_same_texts(suffix, tmp_path):
    """Labels that look like numbers or like nothing are none of them."""
    file = write_table(tmp_path / f"rows.{suffix}", [{**row, "more": 1} for row in ROWS])
    assert read_rows(file, [TEXT, LABEL], "train").rows[:] == {
        name: [row[name] for row in ROWS] for name in ("text", "label")
    }


@pytest.mark.parametrize("as_list", [False, True])
def test_json_by_the_line_or_as_a_list(as_list, tmp_path):
    rows = [{"text": "2020-01-02", "label": 1}, {"label": 2.5, "text": "b", "more": [{}]}]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "rows.json").write_text(f"[{', '.join(lines)}]" if as_list else "\n".join(lines))
    # A date stays a text.
    assert read_rows(str(tmp_path / "rows.json"), [TEXT, LABEL], "train").rows[:] == {
        "text": ["2020-01-02", "b"],
        "label": [1, 2.5],
    }


def test_numbers_and_lists_keep_their_types(tmp_path):
    file = write_table(tmp_path / "rows.jsonl", [{"text": "a", "label": [1, 2]}, {"text": "b", "label": []}])
    assert read_rows(file, [LABEL], "train").rows["label"][:] == [[1, 2], []]


def test_several_files_are_joined_in_order(tmp_path):
    for number in range(3):
        write_table(tmp_path / f"{number}.csv", [{"text": f"text {number}", "label": number}])
    (tmp_path / "notes.txt").write_text("no table")
    for name in (tmp_path, tmp_path / "*.csv"):
        assert read_rows(str(name), [TEXT], "train").rows["text"][:] == ["text 0", "text 1", "text 2"]
    both, held_out = load_tables(
        [str(tmp_path / "2.csv"), str(tmp_path / "0.csv")],
        str(tmp_path / "1.csv"),
        [TEXT, LABEL],
        split="train",
        validation_split="validation",
    )
    assert (both.rows["text"][:], held_out.rows["text"][:]) == (["text 2", "text 0"], ["text 1"])
    # Each is known by its own file.
    assert list(both.places()) == [f"{tmp_path}/2.csv, row 1", f"{tmp_path}/0.csv, row 1"]


def test_data_sets_of_the_hub_have_a_split_for_each_part(monkeypatch):
    asked = []

    def open_hub_data_set(name, split, argument):
        asked.append((name, split, argument))
        return datasets.Dataset.from_list([{"text": split, "label": 0, "more": 1}]), None

    monkeypatch.setattr("regard.training.finetuning.labels.open_hub_data_set", open_hub_data_set)
    rows, held_out = load_tables(["a/b"], "a/b:c", [TEXT, LABEL], split="train", validation_split="test")
    assert asked == [("a/b", "train", "data"), ("a/b:c", "test", "validation")]
    assert rows.rows[:] == {"text": ["train"], "label": [0]}
    assert held_out.rows[:] == {"text": ["test"], "label": [0]}
    assert list(held_out.places()) == ["a/b:c, row 1"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", "text,kind\na,b\n", r"rows\.csv:2 has no column 'label'; `label_column` can be 'text', 'kind'"),
        ("rows.jsonl", '{"text": "a"}\n', r"has no column 'label'; `label_column` can be 'text'$"),
        (
            "rows.jsonl",
            '{"text": "a", "label": 1}\n{"text" "b"}\n',
            r"rows\.jsonl:2 does not parse as JSON \(one object a line\)",
        ),
        ("rows.jsonl", "", r"rows\.jsonl' has no rows"),
        ("rows.json", '[{"text": "a", "label": 1}, 7]', r"rows\.json': row 2 must be a JSON object, not 7"),
        (
            "rows.jsonl",
            '{"text": "a", "label": 1}\n{"text": "b", "label": "x"}',
            r"rows\.jsonl': column 'label' must hold values of one kind, not a number \(row 1\), text \(row 2\)",
        ),
        (
            "rows.jsonl",
            '{"text": "a", "label": ["x"]}\n{"text": "b", "label": [null, 2]}',
            r"'label' must hold values of one kind, not a list with text \(row 1\), a list with a number \(row 2\)",
        ),
        (
            "rows.jsonl",
            '{"text": "a", "label": 1}\n{"text": "b\\ud800", "label": 2}',
            r"rows\.jsonl', row 2, column 'text': character 1 is half a surrogate pair",
        ),
        (
            "rows.jsonl",
            f'{{"text": "a", "label": {2**63}}}',
            r"rows\.jsonl' holds what a table can't: .* too large",
        ),
        ("rows.csv", "text,label,label\na,b,c\n", r"rows\.csv has 2 columns 'label': rename or remove one"),
        ("rows.csv", "text,label\n", r"rows\.csv' has no rows"),
        ("rows.csv", "text,label\na,b,c\n", "has more fields than the header"),
        ("rows.parquet", "nothing", r"rows\.parquet' does not read as Parquet: "),
        ("rows.txt", "text", r"`data` \('.*rows\.txt'\) must be a table: \.jsonl, \.json, \.csv"),
    ],
)
def test_a_bad_table_is_told_in_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        read_rows(str(tmp_path / name), [TEXT, LABEL], "train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([], pa.string()), r"rows\.parquet' has no rows$"),
        (pa.array([None], pa.map_(pa.string(), pa.int64())), r"rows\.parquet' does not read as Parquet: .*map<"),
    ],
    ids=["empty", "mapping"],
)
def test_a_bad_parquet_table_is_told_in_one_line(column, message, tmp_path):
    pa.parquet.write_table(pa.table({"text": column, "label": column}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=message) as error:
        read_rows(str(tmp_path / "rows.parquet"), [TEXT, LABEL], "train")
    assert "\n" not in str(error.value)


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`validation` \('nothing/\*\.csv'\) is no table, folder of tables, glob or"):
        read_rows("nothing/*.csv", [TEXT], "train", "validation")
    with pytest.raises(ValueError, match=r"^`data` names no source"):
        load_tables([], None, [TEXT], split="train", validation_split="validation")


def test_files_of_different_types_are_refused(tmp_path):
    write_table(tmp_path / "0.jsonl", [{"text": "a", "label": [1]}])
    write_table(tmp_path / "1.jsonl", [{"text": "a", "label": "x"}])
    with pytest.raises(ValueError, match="the files hold different types of columns") as error:
        read_rows(str(tmp_path), [TEXT, LABEL], "train")
    assert "\n" not in str(error.value)


# Holding out


def test_each_class_gives_its_share():
    groups = ["a"] * 70 + ["b"] * 20 + ["c"] * 10 + ["d"]
    held_out = draw(groups, 0.2, seed=3)
    assert Counter(groups[place] for place in held_out) == {"a": 14, "b": 4, "c": 2}
    assert held_out == draw(groups, 0.2, seed=3) == sorted(set(held_out))
    assert held_out != draw(groups, 0.2, seed=4)
    # However large the share is, there is one of each to learn from.
    assert set(range(len(groups))) - set(draw(groups, 0.99, seed=3)) >= {100}
    assert len(draw(["a"] * 7, 0.01, seed=0)) == 1


@pytest.mark.parametrize("share", ["0", "1", "1.5", "-0.1", "nan"])
def test_a_share_is_between_0_and_1(share):
    with pytest.raises(ValueError, match=r"^`validation` \(.*\) must be a share between 0 and 1, or a source"):
        FinetuneSettings(validation=share)


def test_too_few_rows_to_hold_any_out():
    with pytest.raises(
        ValueError, match=r"^`data` has 1 usable row, too few to hold one out \(`validation` is 0\.5\)"
    ):
        draw(["a"], 0.5, seed=0)
    with pytest.raises(ValueError, match=r"^`data` has 3 usable rows, each with another label: none can be held out"):
        draw(["a", "b", "c"], 0.5, seed=0)
