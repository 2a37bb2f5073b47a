"""What rows hold for each task: labels and their names, and what is wrong with them."""

import logging
import re

import pytest

from regard.tokenization.wordpiece import train_wordpiece
from regard.training.finetuning.finetune import TASKS
from regard.training.finetuning.labels import sort_names
from regard.training.finetuning.settings import FinetuneSettings
from regard.training.reading.typed_rows import Table


def test_names_of_numbers_are_in_the_order_of_the_numbers():
    assert sort_names(["10", "9", "-1", "9"]) == ["-1", "9", "10"]
    assert sort_names(["10", "9", "x"]) == ["10", "9", "x"]


@pytest.fixture(scope="module")
def tokenizer_32():
    return train_wordpiece(["a red cat sat on the mat in rome anna 0 1 2 3"] * 2, vocab_size=99, model_max_length=32)


def table(name, rows, label_names=None):
    return Table(rows, [f"{name}:{number}" for number in range(1, len(rows) + 1)], label_names or {})


@pytest.fixture
def prepare(tokenizer_32, caplog):
    """Prepares a task for rows, and gives it with what it encoded and what it warned of."""

    def run(name, rows, held_out=None, label_names=None, **settings):
        task = TASKS[name](FinetuneSettings(**{"stride": 4 if name == "question-answering" else None, **settings}))
        parts = [table(name, part, label_names) for name, part in (("a.csv", rows), ("b.csv", held_out or rows))]
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
        ([2**63, 1, 1], ["1", str(2**63)]),
        # As pandas writes whole numbers of a column in which some are missing.
        ([10.0, 9.0], ["9", "10"]),
    ],
)
def test_classes_are_named_by_the_training_rows(labels, names, prepare):
    task, (encoded, _), _ = prepare("classification", texts(*labels))
    fields = task.config_fields()
    assert fields["id2label"] == dict(enumerate(names))
    assert fields["label2id"] == {name: number for number, name in enumerate(names)}
    given = [str(int(label)) if isinstance(label, float) else str(label) for label in labels]
    assert [names[label] for label in encoded["labels"]] == given


def test_names_that_the_data_set_declares_keep_their_numbers(prepare):
    names = {"label": ["z", "a", "m"]}
    task, (encoded, _), _ = prepare("classification", texts(1, 0, 1), label_names=names)
    assert task.config_fields()["id2label"] == {0: "z", 1: "a", 2: "m"}
    assert encoded["labels"][:] == [1, 0, 1]
    with pytest.raises(ValueError, match=r"^a\.csv:2: the label -1 in column 'label' is none of 'z', 'a', 'm'"):
        prepare("classification", texts(1, -1), label_names=names)


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
        ("classification", texts(1.0, float("nan")), r"^a\.csv:2 has no label: column 'label' is empty there"),
        ("classification", texts("a", None), r"^a\.csv:2 has no label: column 'label' is empty"),
        ("classification", texts("a", "a"), r"column 'label' has one label only \('a'\)"),
        ("classification", texts(0.5, 1.5), r"must be text or a whole number, not float \(0\.5\); .*'regression'"),
        ("classification", [{"text": 7, "label": "a"}], r"^a\.csv:1: column 'text' must hold text, not int \(7\)"),
        ("regression", texts(2, 2.0), r"column 'label' holds one number only \(2\): there is nothing to learn"),
        ("regression", texts("high"), r"^a\.csv:1: column 'label' must hold a number, not 'high'"),
        ("regression", texts(1.0, float("nan")), r"^a\.csv:2: column 'label' must hold a number, not nan"),
        ("multi-label", texts([], []), r"column 'label' has no labels"),
        ("multi-label", texts([0, 1, 1], [1, 0, 0]), r"it seems to hold 0 or 1 for each of 3 labels"),
        ("multi-label", texts([True, False], [False, False]), r"it seems to hold 0 or 1 for each of 2 labels"),
        ("multi-label", texts(1), r"^a\.csv:1: column 'label' must hold a list, not int"),
        ("tokens", [{"tokens": ["a"], "tags": ["O"]}] * 2, r"column 'tags' has one tag only \('O'\)"),
        (
            "tokens",
            [{"tokens": ["a", "b"], "tags": ["O"]}],
            r"^a\.csv:1: 2 words in column 'tokens', but 1 tags in column",
        ),
        (
            "multiple-choice",
            [{"text": "a", "choices": ["b", "c"], "label": 2}],
            r"^a\.csv:1: column 'label' must hold the number of the right choice, from 0 to 1, its letter or its",
        ),
        (
            "multiple-choice",
            [{"text": "a", "choices": ["b"], "label": 0}],
            r"^a\.csv:1: there must be at least 2 choices",
        ),
        (
            "multiple-choice",
            [{"text": "a", "choices": ["b", "c"], "label": 0}, {"text": "a", "choices": ["b", "c", "d"], "label": 0}],
            r"^a\.csv:2: 3 choices in `choices_column`, but 2 in a\.csv:1: all rows must have the same",
        ),
        (
            "question-answering",
            [{"question": "a", "context": "b", "answers": "{cat"}],
            r"^a\.csv:1: column 'answers' does not parse as JSON",
        ),
        (
            "question-answering",
            [{"question": "a", "context": "b", "answers": "cat"}],
            r"^a\.csv:1: column 'answers' must hold .* \(both \[\] where there is no answer\), not 'cat'",
        ),
        (
            "question-answering",
            [{"question": "a", "context": "b", "answers": {"text": ["b"], "answer_start": [0, 1]}}],
            r'^a\.csv:1: column \'answers\' must hold \{"text": \[\.\.\.\], "answer_start": \[\.\.\.\]\}',
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
        ("tokens", [{"tokens": ["a", "b"], "tags": ["O", "X"]}], [{"tokens": ["a", "cat"], "tags": ["O", "new"]}]),
    ],
)
def test_labels_unseen_in_training_are_refused(task, rows, held_out, prepare):
    with pytest.raises(
        ValueError, match=r"^`validation` has labels in column '.*' that are unseen in training: 'new'"
    ):
        prepare(task, rows, held_out)


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("classification", {"stride": 3}, r"^`stride` \(3\) is no setting of the task 'classification', which has"),
        (
            "classification",
            {"tags_column": "x"},
            r"`tags_column` \('x'\) is no .* has label_column, second_text_column, text_column$",
        ),
        ("tokens", {"second_text_column": "x"}, r"is no setting of the task 'tokens', which has tags_column, tok"),
        ("regression", {"label_column": "text"}, r"^`text_column` and `label_column` must name two .* both 'text'$"),
        ("multiple-choice", {"choices_column": ["a", "b", "a"]}, r"must name two columns, not both 'a'$"),
    ],
)
def test_settings_that_mean_nothing_are_refused(task, settings, message):
    with pytest.raises(ValueError, match=message):
        TASKS[task](FinetuneSettings(**settings))


@pytest.mark.parametrize("row", [3, 17, 39])
@pytest.mark.parametrize("held_out", [False, True])
def test_errors_name_the_row_of_the_file(row, held_out, tokenizer_32):
    """Also where a share of the rows is drawn to be held out."""
    rows = texts(*"ab" * 20)
    task = TASKS["classification"](FinetuneSettings(validation="b.csv" if held_out else "0.5"))
    broken = table("a.csv", [*rows[: row - 1], {"text": "a", "label": ""}, *rows[row:]])
    given = (table("b.csv", rows), broken) if held_out else (broken, None)
    with pytest.raises(ValueError, match=rf"^a\.csv:{row} has no label"):
        task.prepare(tokenizer_32, 16, *given)


@pytest.mark.parametrize("seed", range(3))
def test_of_each_class_a_share_is_held_out(seed, tokenizer_32):
    rows = [*texts(*["a"] * 20, *["b"] * 10), {"text": " ", "label": "b"}]
    task = TASKS["classification"](FinetuneSettings(validation="0.2", seed=seed))
    encoded, held_out = task.prepare(tokenizer_32, 16, table("a.csv", rows), None)
    assert sorted(row["label"] for row in task.held_out) == ["a"] * 4 + ["b"] * 2
    assert (len(encoded), len(held_out)) == (24, 6)
    assert task.facts["labels"] == {"a": 16, "b": 8}
    assert task.facts["warnings"] == {"data": {"empty": 1}}
    # Each knows where it is from.
    for example in task.held_out:
        number = int(re.fullmatch(r"a\.csv:(\d+)", example["where"])[1])
        assert example["row"] == rows[number - 1]


@pytest.mark.parametrize("task", ["multi-label", "tokens"])
@pytest.mark.parametrize("seed", range(5))
def test_there_is_a_row_to_learn_each_label_from(task, seed, tokenizer_32):
    """A rare label of a row among several is never in what is held out of the rows alone."""
    labels = [["b"], ["a", "c"], *[["a", "b"]] * 6, ["d", "e"]]
    rows = [{"text": "a cat", "label": names, "tokens": ["a"] * len(names), "tags": names} for names in labels]
    made = TASKS[task](FinetuneSettings(validation="0.6", seed=seed))
    made.prepare(tokenizer_32, 16, table("a.csv", rows), None)
    assert made.names == ["a", "b", "c", "d", "e"]
    assert all(made.facts["labels"].values())
    assert 3 <= len(made.held_out) <= 5
    with pytest.raises(
        ValueError, match=r"2 usable rows: none can be held out .* all of whose labels are learnt from"
    ):
        TASKS[task](FinetuneSettings()).prepare(tokenizer_32, 16, table("a.csv", [rows[1], rows[-1]]), None)


# Warnings


def test_empty_and_long_texts_are_counted(prepare):
    rows = [*texts("a", "b"), {"text": " ", "label": "a"}, {"text": None, "label": "b"}]
    rows.append({"text": "cat " * 40, "label": "a"})
    task, (encoded, held_out), messages = prepare("classification", rows, texts("a", "b"))
    assert messages == [
        "2 of 5 rows of data have an empty text and are left out.",
        "1 of 3 rows of data are longer than 16 tokens (`max_length`) and were cut.",
    ]
    assert task.facts["warnings"] == {"data": {"empty": 2, "truncated": 1}}
    assert (len(encoded), len(held_out)) == (3, 2)
    assert max(map(len, encoded["input_ids"])) == 16


def test_pairs_are_cut_and_counted_too(prepare):
    rows = [{"text": "a cat", "second": "on the mat", "label": 0.5}, {"text": "a", "second": "cat " * 30, "label": 1}]
    task, (encoded, _), _ = prepare("regression", rows, second_text_column="second")
    assert task.facts["warnings"]["data"] == {"truncated": 1}
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
    assert task.facts["warnings"]["data"] == {"truncated": 1, "not_aligned": 1}
    assert "1 of 2 rows of data hold a word without a token, whose tag is not used." in messages


def test_lists_as_a_csv_file_holds_them(prepare):
    task, (encoded, _), _ = prepare("multi-label", texts("a|b", '["b", "c"]', ""))
    assert task.names == ["a", "b", "c"]
    assert encoded["labels"][:] == [[1, 1, 0], [0, 1, 1], [0, 0, 0]]
    # Short lists of 0 and 1 are labels of these names.
    assert prepare("multi-label", texts("0|1", "1", "0"))[0].names == ["0", "1"]
    assert prepare("multi-label", texts([0], [1], [0]))[0].names == ["0", "1"]
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
    assert task.facts["warnings"]["data"] == {"not_aligned": 1, "within_a_token": 1}
    assert (
        messages[0] == "1 of 5 rows of data have an answer that is not at its place in the context and are left out."
    )
    # The held-out row stays: its answer is compared as a text.
    assert len(task.held_out) == 5
    assert len(encoded) < len(held_out) == len(task.windows)
    assert task.facts["unanswerable"] == 1
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
    assert task.facts["warnings"]["data"] == {"truncated": 1, "not_in_a_window": 1}
    with pytest.raises(ValueError, match=r"`stride` \(12\) must be less than 12"):
        prepare("question-answering", rows, stride=12)
    # A third of 16 if nothing is said.
    task, _, _ = prepare("question-answering", rows, stride=None)
    first, second = ([span for span in window.spans if span] for window in task.windows[:2])
    assert first[-5:] == second[:5]
    assert first[-6] not in second


@pytest.mark.parametrize(
    ("task", "rows", "warning"),
    [
        ("regression", texts(5, -6.5, 7), None),
        ("regression", texts(2000.5, 2001.5), "column 'label' have the mean 2001 and the standard deviation 0.5."),
        ("regression", texts(-50, 50), "the mean 0 and the standard deviation 50"),
        ("multi-label", texts(["a"], []), None),
        (
            "multi-label",
            texts(["a"], None),
            "have no list of labels, which counts as an empty one.",
        ),
        ("classification", texts("a", "b", "b", "a", "c"), None),
        (
            "classification",
            texts("a", "b", "c", "c"),
            "2 of 3 labels have a single row, too few to learn them from.",
        ),
        (
            "classification",
            [*texts("a", "b"), {"text": "\u200b", "label": "b"}],
            "have a text that the tokenizer finds no token in.",
        ),
        ("tokens", [{"tokens": ["a", "b"], "tags": ["B-P", "O"]}], None),
        ("tokens", [{"tokens": ["a", "b"], "tags": ["NOUN", "O"]}], None),
        (
            "tokens",
            [{"tokens": ["a", "b"], "tags": ["I-P", "P"]}],
            "some tags do not begin with B-, I-, E- or S-: 'P'.",
        ),
    ],
)
def test_what_will_not_be_learnt_well_is_told(task, rows, warning, prepare):
    _, _, messages = prepare(task, rows)
    assert all(warning is not None and warning in message for message in messages)
    assert bool(messages) == (warning is not None)


def test_classes_that_are_not_measured_are_told(prepare):
    _, _, messages = prepare("classification", texts("a", "b", "b", "a"), texts("b", "b"))
    assert messages == ["1 of 2 labels have no held-out row, so the metrics do not cover them."]


@pytest.mark.parametrize(
    ("task", "rows", "held_out", "expected"),
    [
        ("classification", texts("a", "b", "b"), texts("b", "a", "a"), {"accuracy_baseline": 1 / 3}),
        ("regression", texts(1, 3), texts(3, 6), {"mse_baseline": 8.5}),
        (
            "tokens",
            [{"tokens": ["a", "b", "c"], "tags": ["O", "O", "B-P"]}],
            [{"tokens": ["a", "b", "c", "d"], "tags": ["O", "B-P", "O", "O"]}],
            {"accuracy_baseline": 0.75},
        ),
        (
            "multiple-choice",
            [{"text": "a", "choices": ["b", "c", "d", "e"], "label": 0}] * 2,
            None,
            {"accuracy_baseline": 0.25},
        ),
        ("multi-label", texts(["a"], []), None, {}),
    ],
)
def test_what_a_guess_without_the_text_comes_to(task, rows, held_out, expected, prepare):
    found, _, _ = prepare(task, rows, held_out)
    assert found.baselines() == pytest.approx(expected)
