"""Tables of every kind whose columns hold values of any type."""

import csv
import json

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from regard.training.reading import sources
from regard.training.reading.tables import Column
from regard.training.reading.typed_rows import load_table

TEXT, LABEL = Column("text", "text_column"), Column("label", "label_column")
ROWS = [
    {"text": "a red cat", "label": "x"},
    {"text": "NA", "label": "007"},
    {"text": "ünï, “quoted”\nline", "label": ""},
]


def values_of(name, columns):
    """The values of each column."""
    rows = load_table([str(name)], columns, "train").rows
    return {column.name: [row[column.name] for row in rows] for column in columns}


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
    assert values_of(file, [TEXT, LABEL]) == {name: [row[name] for row in ROWS] for name in ("text", "label")}


@pytest.mark.parametrize("as_list", [False, True])
def test_json_by_the_line_or_as_a_list(as_list, tmp_path):
    rows = [{"text": "2020-01-02", "label": 1}, {"label": 2.5, "text": "b", "more": [{}]}]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "rows.json").write_text(f"[{', '.join(lines)}]" if as_list else "\n".join(lines))
    # A date stays a text.
    assert values_of(tmp_path / "rows.json", [TEXT, LABEL]) == {
        "text": ["2020-01-02", "b"],
        "label": [1, 2.5],
    }


def test_numbers_and_lists_keep_their_types(tmp_path):
    file = write_table(tmp_path / "rows.jsonl", [{"text": "a", "label": [1, 2]}, {"text": "b", "label": []}])
    assert values_of(file, [LABEL])["label"] == [[1, 2], []]


def test_several_files_are_joined_in_order(tmp_path):
    for number in range(3):
        write_table(tmp_path / f"{number}.csv", [{"text": f"text {number}", "label": number}])
    (tmp_path / "notes.txt").write_text("no table")
    for name in (tmp_path, tmp_path / "*.csv"):
        assert values_of(name, [TEXT])["text"] == ["text 0", "text 1", "text 2"]
    both = load_table([str(tmp_path / "2.csv"), str(tmp_path / "0.csv")], [TEXT, LABEL], "train")
    assert both.rows == [{"text": "text 2", "label": "2"}, {"text": "text 0", "label": "0"}]
    assert both.places == [f"{tmp_path}/2.csv:2", f"{tmp_path}/0.csv:2"]


def test_data_sets_of_the_hub_declare_names_of_labels(monkeypatch):
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["x", "y"])}
        return datasets.Dataset.from_list([{"text": split, "label": 1}], datasets.Features(features))

    monkeypatch.setattr(sources, "load_dataset", load_dataset)
    table = load_table(["a/b:c", "d/e"], [TEXT, LABEL], "test")
    assert asked == [("a/b", "c", "test"), ("d/e", None, "test")]
    assert table == ([{"text": "test", "label": 1}] * 2, ["a/b:c:1", "d/e:1"], {"label": ["x", "y"]})
    with pytest.raises(ValueError, match=r"^a/b has no column 'kind'; it has 'text', 'label'$"):
        load_table(["a/b"], [Column("kind")], "test")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", "text,kind\na,b\n", r"rows\.csv:2 has no column 'label'; `label_column` can be 'text', 'kind'"),
        ("rows.jsonl", '{"text": "a"}\n', r"rows\.jsonl:1 has no column 'label'; `label_column` can be 'text'$"),
        (
            "rows.jsonl",
            '{"text": "a", "label": 1}\n{"text" "b"}\n',
            r"rows\.jsonl:2 does not parse as JSON \(one object a line\)",
        ),
        ("rows.jsonl", "", r"^`data` \('.*rows\.jsonl'\) has no rows$"),
        ("rows.json", '[{"text": "a", "label": 1}, 7]', r"rows\.json:1 must be a JSON object, not int \(7\)"),
        (
            "rows.jsonl",
            '{"text": "a", "label": 1}\n{"text": "b", "label": "x"}',
            r"^column 'label' must hold values of one kind, not a number \(.*rows\.jsonl:1\), text \(.*:2\)$",
        ),
        (
            "rows.jsonl",
            '{"text": "a", "label": ["x"]}\n{"text": "b", "label": [null, 2]}',
            r"'label' must hold values of one kind, not a list with text \(.*:1\), a list with a number \(.*:2\)$",
        ),
        (
            "rows.jsonl",
            '{"text": "a", "label": 1}\n{"text": "b\\ud800", "label": 2}',
            r"rows\.jsonl:2: character 1 is half a surrogate pair",
        ),
        ("rows.csv", "text,label,label\na,b,c\n", r"rows\.csv has 2 columns 'label': rename or remove one"),
        ("rows.csv", "text,label\n", r"rows\.csv'\) has no rows"),
        ("rows.csv", "text,label\na,b,c\n", "has more fields than the header"),
        ("rows.parquet", "nothing", r"rows\.parquet' does not read as Parquet: "),
        ("rows.txt", "text", r"rows\.txt' is not a table: its name must end in '\.jsonl', '\.json', '\.csv'"),
    ],
)
def test_a_bad_table_is_told_in_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_table([str(tmp_path / name)], [TEXT, LABEL], "train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([], pa.string()), r"rows\.parquet'\) has no rows$"),
        (pa.array([None], pa.map_(pa.string(), pa.int64())), r"rows\.parquet' does not read as Parquet: .*map<"),
    ],
    ids=["empty", "mapping"],
)
def test_a_bad_parquet_table_is_told_in_one_line(column, message, tmp_path):
    pa.parquet.write_table(pa.table({"text": column, "label": column}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=message) as error:
        load_table([str(tmp_path / "rows.parquet")], [TEXT, LABEL], "train")
    assert "\n" not in str(error.value)


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^`validation` \('nothing/\*\.csv'\) is a glob that matches no file$"):
        load_table(["nothing/*.csv"], [TEXT], "train", "validation")
    with pytest.raises(ValueError, match=r"^`data` \('rows\.csv'\) is not a file, a folder, a glob or a data set id"):
        load_table(["rows.csv"], [TEXT], "train")
    with pytest.raises(ValueError, match=r"^folder '.*' holds no file that ends in '\.jsonl', '\.json', '\.csv', "):
        load_table([str(tmp_path)], [TEXT], "train")
    with pytest.raises(ValueError, match=r"^`data` names no source"):
        load_table([], [TEXT], "train")


def test_files_of_different_types_are_refused(tmp_path):
    write_table(tmp_path / "0.jsonl", [{"text": "a", "label": [1]}])
    write_table(tmp_path / "1.jsonl", [{"text": "a", "label": "x"}])
    message = r"^column 'label' must hold values of one kind, not a list with a number \(.*/0\.jsonl:1\), text \("
    with pytest.raises(ValueError, match=message):
        load_table([str(tmp_path)], [TEXT, LABEL], "train")


@pytest.mark.parametrize("names", [["b", "a"], None])
def test_files_of_other_names_for_labels_are_refused(names, tmp_path):
    """The number 0 would be one label in the first file and another in the second."""
    for number, given in enumerate((["a", "b"], names)):
        label = datasets.ClassLabel(names=given) if given else datasets.Value("int64")
        features = datasets.Features({"text": datasets.Value("string"), "label": label})
        rows = datasets.Dataset.from_list([{"text": "a", "label": 0}], features)
        rows.to_parquet(tmp_path / f"{number}.parquet")
    assert load_table([str(tmp_path / "0.parquet")], [TEXT, LABEL], "train").label_names == {"label": ["a", "b"]}
    with pytest.raises(ValueError, match=r"^the labels in .*1\.parquet:1 have other names than those in .*0\.par"):
        load_table([str(tmp_path)], [TEXT, LABEL], "train")


def test_an_empty_file_among_others_is_none_too_many(tmp_path):
    (tmp_path / "0.csv").write_text("text,label\n")
    (tmp_path / "1.jsonl").write_text("")
    write_table(tmp_path / "2.jsonl", [{"text": "a", "label": 1}])
    assert values_of(tmp_path, [TEXT, LABEL]) == {"text": ["a"], "label": [1]}


def test_a_file_that_is_found_twice_is_read_once(tmp_path):
    file = write_table(tmp_path / "rows.csv", [{"text": "a", "label": "b"}])
    (tmp_path / "other.csv").symlink_to(file)
    assert len(load_table([file, str(tmp_path)], [TEXT, LABEL], "train").rows) == 1


def test_a_value_that_some_objects_lack_is_none(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"label": 1, "text": null}\n')
    assert values_of(tmp_path / "rows.jsonl", [TEXT, LABEL]) == {"text": ["a", None], "label": [None, 1]}


def test_columns_inside_others_are_read(tmp_path):
    label = {"names": datasets.ClassLabel(names=["x", "y"])}
    features = datasets.Features({"pair": {"en": datasets.Value("string"), "label": label["names"]}})
    rows = datasets.Dataset.from_list([{"pair": {"en": "a", "label": 1}}], features)
    rows.to_parquet(tmp_path / "rows.parquet")
    table = load_table([str(tmp_path / "rows.parquet")], [Column("pair.en"), Column("pair.label")], "train")
    assert table.rows == [{"pair.en": "a", "pair.label": 1}]
    assert table.label_names == {"pair.label": ["x", "y"]}
