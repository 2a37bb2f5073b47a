"""What is fine-tuned on: tables of every kind, labels and their names, and what is wrong with them."""

import csv
import json
import logging
from collections import Counter

import datasets
import pytest

from regard.tokenization.wordpiece import train_wordpiece
from regard.training.finetune import TASKS, FinetuneSettings
from regard.training.finetune_data import draw, load_splits, read_rows, sort_names
from regard.training.tables import Column

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
    assert read_rows(file, [TEXT, LABEL], "train")[:] == {
        name: [row[name] for row in ROWS] for name in ("text", "label")
    }


@pytest.mark.parametrize("as_list", [False, True])
def test_json_by_the_line_or_as_a_list(as_list, tmp_path):
    rows = [{"text": "2020-01-02", "label": 1}, {"label": 2.5, "text": "b", "more": [{}]}]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "rows.json").write_text(f"[{', '.join(lines)}]" if as_list else "\n".join(lines))
    # A date stays a text.
    assert read_rows(str(tmp_path / "rows.json"), [TEXT, LABEL], "train")[:] == {
        "text": ["2020-01-02", "b"],
        "label": [1, 2.5],
    }


def test_numbers_and_lists_keep_their_types(tmp_path):
    file = write_table(tmp_path / "rows.jsonl", [{"text": "a", "label": [1, 2]}, {"text": "b", "label": []}])
    assert read_rows(file, [LABEL], "train")["label"][:] == [[1, 2], []]


def test_several_files_are_joined_in_order(tmp_path):
    for number in range(3):
        write_table(tmp_path / f"{number}.csv", [{"text": f"text {number}", "label": number}])
    (tmp_path / "notes.txt").write_text("no table")
    for name in (tmp_path, tmp_path / "*.csv"):
        assert read_rows(str(name), [TEXT], "train")["text"][:] == ["text 0", "text 1", "text 2"]
    both, held_out = load_splits(
        [str(tmp_path / "2.csv"), str(tmp_path / "0.csv")],
        str(tmp_path / "1.csv"),
        [TEXT, LABEL],
        split="train",
        validation_split="validation",
        seed=0,
    )
    assert (both["text"][:], held_out["text"][:]) == (["text 2", "text 0"], ["text 1"])


def test_data_sets_of_the_hub_have_a_split_for_each_part(monkeypatch):
    asked = []

    def open_hub_data_set(name, split, argument):
        asked.append((name, split, argument))
        return datasets.Dataset.from_list([{"text": split, "label": 0, "more": 1}]), None

    monkeypatch.setattr("regard.training.finetune_data.open_hub_data_set", open_hub_data_set)
    rows, held_out = load_splits(["a/b"], "a/b:c", [TEXT, LABEL], split="train", validation_split="test", seed=0)
    assert asked == [("a/b", "train", "data"), ("a/b:c", "test", "validation")]
    assert (rows[:], held_out[:]) == ({"text": ["train"], "label": [0]}, {"text": ["test"], "label": [0]})


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
            r"rows\.jsonl' does not read as jsonl",
        ),
        ("rows.csv", "text,label\n", r"rows\.csv' has no rows"),
        ("rows.csv", "text,label\na,b,c\n", "has more fields than the header"),
        ("rows.parquet", "nothing", r"rows\.parquet' does not read as parquet: "),
        ("rows.txt", "text", r"`data` \('.*rows\.txt'\) must be a table: \.jsonl, \.json, \.csv"),
    ],
)
def test_a_bad_table_is_told_in_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        read_rows(str(tmp_path / name), [TEXT, LABEL], "train")
    assert "\n" not in str(error.value)


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`validation` \('nothing/\*\.csv'\) is no table, folder of tables, glob or"):
        read_rows("nothing/*.csv", [TEXT], "train", "validation")
    with pytest.raises(ValueError, match=r"^`data` names no source"):
        load_splits([], "0.5", [TEXT], split="train", validation_split="validation", seed=0)


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


def test_too_few_rows_to_hold_any_out(tmp_path):
    file = write_table(tmp_path / "rows.csv", [{"text": "a", "label": "x"}])
    with pytest.raises(ValueError, match=r"has too few rows \(1\) to hold out a share of 0\.5"):
        load_splits([file], "0.5", [TEXT, LABEL], split="train", validation_split="validation", seed=0)


# Labels


def test_names_of_numbers_are_in_the_order_of_the_numbers():
    assert sort_names(["10", "9", "-1", "9"]) == ["-1", "9", "10"]
    assert sort_names(["10", "9", "x"]) == ["10", "9", "x"]


@pytest.fixture(scope="module")
def tokenizer_32():
    return train_wordpiece(["a red cat sat on the mat in rome anna 0 1 2 3"] * 2, vocab_size=99, model_max_length=32)


@pytest.fixture
def prepare(tokenizer_32, caplog):
    """Prepares a task for rows, and gives it with what it encoded and what it warned of."""

    def run(name, rows, held_out=None, features=None, **settings):
        task = TASKS[name](FinetuneSettings(**{"stride": 4, **settings}))
        parts = [datasets.Dataset.from_list(part, features) for part in (rows, held_out or rows)]
        parts = [part.select_columns([column.name for column in task.columns()]) for part in parts]
        with caplog.at_level(logging.WARNING, "regard.training"):
            encoded = task.prepare(tokenizer_32, 16, *parts)
        return task, encoded, caplog.messages

    return run


def texts(*labels):
    return [{"text": f"a cat {number}", "label": label} for number, label in enumerate(labels)]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["b", "a", "b"], ["a", "b"]),
        ([10, 9, 10], ["9", "10"]),
        (["10", "9", "9"], ["9", "10"]),
        ([True, False], ["False", "True"]),
    ],
)
def test_classes_are_named_by_the_training_rows(labels, names, prepare):
    task, (encoded, _), _ = prepare("classification", texts(*labels))
    fields = task.config_fields()
    assert fields["id2label"] == dict(enumerate(names))
    assert fields["label2id"] == {name: number for number, name in enumerate(names)}
    assert [names[label] for label in encoded["labels"]] == list(map(str, labels))


def test_names_that_the_data_set_declares_keep_their_numbers(prepare):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["z", "a", "m"])}
    )
    task, (encoded, _), _ = prepare("classification", texts(1, 0, 1), features=features)
    assert task.config_fields()["id2label"] == {0: "z", 1: "a", 2: "m"}
    assert encoded["labels"][:] == [1, 0, 1]
    with pytest.raises(ValueError, match=r"row 2: the label -1 in column 'label' is none of 'z', 'a', 'm'"):
        prepare("classification", texts(1, -1), features=features)


def test_imbalance_is_told(prepare):
    _, _, messages = prepare("classification", texts(*["a"] * 21, "b", "b"))
    assert messages == [
        "The labels are imbalanced: 'a' occurs 21 times, 'b' 2. Accuracy says little then; look at `f1`."
    ]
    _, _, messages = prepare("classification", texts(*["a"] * 20, "b", "b"))
    assert len(messages) == 1  # that of before


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("classification", texts("a", None), r"data, row 2 has no label: column 'label' is empty"),
        ("classification", texts("a", "a"), r"column 'label' has one label only \('a'\)"),
        ("classification", texts(0.5, 1.5), r"must be text or a whole number, not float \(0\.5\); .*'regression'"),
        ("classification", [{"text": 7, "label": "a"}], r"row 1: column 'text' must hold text, not int \(7\)"),
        ("regression", texts("high"), r"row 1: column 'label' must hold a number, not 'high'"),
        ("regression", texts(1.0, float("nan")), r"row 2: column 'label' must hold a number, not nan"),
        ("multi-label", texts([], []), r"column 'label' has no labels"),
        ("multi-label", texts(1), r"row 1: column 'label' must hold a list, not int"),
        (
            "tokens",
            [{"tokens": ["a", "b"], "tags": ["O"]}],
            r"row 1: 2 words in column 'tokens', but 1 tags in column",
        ),
        (
            "multiple-choice",
            [{"text": "a", "choices": ["b", "c"], "label": 2}],
            r"row 1: column 'label' must hold the number of the right choice, from 0 to 1, its letter or its text",
        ),
        ("multiple-choice", [{"text": "a", "choices": ["b"], "label": 0}], r"row 1: there must be at least 2 choices"),
        (
            "multiple-choice",
            [{"text": "a", "choices": ["b", "c"], "label": 0}, {"text": "a", "choices": ["b", "c", "d"], "label": 0}],
            r"the rows have 2 or 3 choices",
        ),
        (
            "question-answering",
            [{"question": "a", "context": "b", "answers": "cat"}],
            r"row 1: column 'answers' does not parse as JSON",
        ),
        (
            "question-answering",
            [{"question": "a", "context": "b", "answers": {"text": ["b"], "answer_start": [0, 1]}}],
            r'row 1: column \'answers\' must hold \{"text": \[\.\.\.\], "answer_start": \[\.\.\.\]\}',
        ),
        (
            "question-answering",
            [{"question": "a", "context": "a cat", "answers": {"text": ["cat"], "answer_start": [1]}}],
            r"no row of data has an answer at its place in `context_column`",
        ),
        ("classification", [{"text": " ", "label": "a"}], r"no row of data is left to use"),
    ],
)
def test_bad_rows_are_refused_in_one_line(task, rows, message, prepare):
    with pytest.raises(ValueError, match=message) as error:
        prepare(task, rows)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("task", "rows", "held_out"),
    [
        ("classification", texts("a", "b"), texts("a", "new")),
        ("multi-label", texts(["a"], ["b"]), texts(["a", "new"])),
        ("tokens", [{"tokens": ["a"], "tags": ["O"]}], [{"tokens": ["a", "cat"], "tags": ["O", "new"]}]),
    ],
)
def test_labels_unseen_in_training_are_refused(task, rows, held_out, prepare):
    with pytest.raises(
        ValueError, match=r"^`validation` has labels in column '.*' that are unseen in training: 'new'"
    ):
        prepare(task, rows, held_out)


# Warnings


def test_empty_and_long_texts_are_counted(prepare):
    rows = [*texts("a", "b"), {"text": " ", "label": "a"}, {"text": None, "label": "b"}]
    rows.append({"text": "cat " * 40, "label": "a"})
    task, (encoded, held_out), messages = prepare("classification", rows, texts("a", "b"))
    assert messages == [
        "2 of 5 rows of data have an empty text and are left out.",
        "1 of 3 rows of data are longer than 16 tokens (`max_length`) and were cut.",
    ]
    assert task.told["warnings"] == {"data": {"empty": 2, "truncated": 1}}
    assert (len(encoded), len(held_out)) == (3, 2)
    assert max(map(len, encoded["input_ids"])) == 16


def test_pairs_are_cut_and_counted_too(prepare):
    rows = [{"text": "a cat", "second": "on the mat", "label": 0.5}, {"text": "a", "second": "cat " * 30, "label": 1}]
    task, (encoded, _), _ = prepare("regression", rows, second_text_column="second")
    assert task.told["warnings"]["data"] == {"truncated": 1}
    assert set(encoded["token_type_ids"][0]) == {0, 1}
    assert encoded["labels"][:] == [0.5, 1.0]


def test_a_words_first_piece_has_its_tag(prepare, tokenizer_32):
    rows = [{"tokens": ["anna", "catred", "\u0000", "rome"], "tags": ["B-P", "O", "O", "B-L"]}]
    rows.append({"tokens": ["cat"] * 20, "tags": ["O"] * 20})
    task, (encoded, _), messages = prepare("tokens", rows)
    names, marked = task.names, encoded["labels"][0]
    pieces = tokenizer_32.convert_ids_to_tokens(encoded["input_ids"][0])
    assert pieces[:4] == ["[CLS]", "anna", "cat", "##r"] or len(pieces) > 6
    found = [(pieces[place], names[label]) for place, label in enumerate(marked) if label != -100]
    assert [tag for _, tag in found] == ["B-P", "O", "B-L"]
    assert not any(piece.startswith("##") for piece, _ in found)
    assert task.told["warnings"]["data"] == {"truncated": 1, "not_aligned": 1}
    assert "1 of 2 rows of data hold a word that makes no token, so its tag is not used." in messages


def test_lists_as_a_csv_file_holds_them(prepare):
    task, (encoded, _), _ = prepare("multi-label", texts("a|b", '["b", "c"]', ""))
    assert task.names == ["a", "b", "c"]
    assert encoded["labels"][:] == [[1, 1, 0], [0, 1, 1], [0, 0, 0]]
    task, _, _ = prepare("tokens", [{"tokens": "anna sat", "tags": "B-P O"}])
    assert task.held_out[0]["words"] == ["anna", "sat"]
    answers = '{"text": ["cat"], "answer_start": [2]}'
    task, _, _ = prepare("question-answering", [{"question": "who", "context": "a cat sat", "answers": answers}])
    assert task.held_out[0]["place"] == (2, 5)


@pytest.mark.parametrize("label", [1, "1", "B", "b", "on a mat"])
def test_the_right_choice_by_number_letter_or_text(label, prepare):
    rows = [{"text": "a cat", "0": "in rome", "1": "on a mat", "label": label}]
    task, (encoded, _), _ = prepare("multiple-choice", rows, choices_column=["0", "1"])
    assert encoded["labels"][:] == [1]
    assert task.held_out[0]["choices"] == ["in rome", "on a mat"]


def test_answers_that_do_not_align_are_counted(prepare):
    context = "a red cat sat on the mat in rome"
    answers = [(["cat"], [6]), (["cat"], [5]), (["ed c"], [3]), ([" cat "], [5]), ([], [])]
    rows = [{"question": "who", "context": context, "answers": {"text": t, "answer_start": s}} for t, s in answers]
    task, (encoded, held_out), messages = prepare("question-answering", rows)
    assert task.told["warnings"]["data"] == {"not_aligned": 1, "within_a_token": 1}
    assert (
        messages[0] == "1 of 5 rows of data have an answer that is not at its place in the context and are left out."
    )
    # The held-out row stays: its answer is compared as a text.
    assert len(task.held_out) == 5
    assert len(encoded) < len(held_out) == len(task.windows)
    assert task.told["unanswerable"] == 1
    starts = [
        (window.row, window.spans[start], window.spans[end])
        for window, start, end in zip(
            task.windows, held_out["start_positions"], held_out["end_positions"], strict=True
        )
        if start
    ]
    assert starts[0] == (0, (6, 9), (6, 9))
    assert {row for row, *_ in starts} == {0, 2, 3}


def test_an_answer_longer_than_a_window_and_a_long_question_are_counted(prepare):
    context = "cat mat " * 20
    rows = [{"question": "who " * 30, "context": context, "answers": {"text": [context[:99]], "answer_start": [0]}}]
    task, _, _ = prepare("question-answering", rows)
    assert task.told["warnings"]["data"] == {"truncated": 1, "not_in_a_window": 1}
    with pytest.raises(ValueError, match=r"`stride` \(12\) must be less than 12"):
        prepare("question-answering", rows, stride=12)
    # A third of 16 if nothing is said.
    task, _, _ = prepare("question-answering", rows, stride=None)
    first, second = ([span for span in window.spans if span] for window in task.windows[:2])
    assert first[-5:] == second[:5]
    assert first[-6] not in second
