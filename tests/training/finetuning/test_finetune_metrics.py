"""Metrics of fine-tuned models: as others compute them, as worked out by hand, and with no network."""

import math

import numpy as np
import pytest

from regard.training.finetuning.metrics import (
    Accuracy,
    AnswerMetrics,
    MacroF1,
    Matthews,
    MultiLabelF1,
    Pearson,
    Spans,
    Spearman,
    SquaredError,
    TagAccuracy,
    find_spans,
    marks_spans,
    normalize_answer,
)


def figures(metric, predictions, references):
    return metric().compute(predictions=predictions, references=references)


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_classes_as_in_scikit_learn(classes, noise):
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(classes)
    references = rng.integers(classes, size=99)
    predictions = np.where(rng.random(99) < noise, rng.integers(classes, size=99), references)
    assert figures(Accuracy, predictions, references)["accuracy"] == sklearn.accuracy_score(references, predictions)
    assert figures(MacroF1, predictions, references)["f1"] == pytest.approx(
        sklearn.f1_score(references, predictions, average="macro")
    )
    assert figures(Matthews, predictions, references)["matthews_correlation"] == pytest.approx(
        sklearn.matthews_corrcoef(references, predictions)
    )


def test_a_class_that_is_never_right_counts_in_the_mean():
    # F1 of class 0: precision 2/3, recall 1; of class 1, never predicted, and of class 5, never wanted: 0.
    assert figures(MacroF1, [0, 0, 0, 5], [0, 0, 1, 1])["f1"] == pytest.approx(0.8 / 3)


def test_several_labels_as_in_scikit_learn():
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    references, predictions = (
        (rng.random((37, 5)) < [0.1, 0.3, 0.5, 0.7, 0.0]).astype(int),
        rng.integers(2, size=(37, 5)),
    )
    found = figures(MultiLabelF1, predictions, references)
    for average, name in (("micro", "f1"), ("macro", "f1_macro")):
        expected = sklearn.f1_score(references, predictions, average=average, zero_division=0)
        assert found[name] == pytest.approx(expected)
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(references, predictions)) != 0


def test_correlations_as_in_scipy():
    scipy = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    # Rounded, so that many share a rank.
    references = rng.normal(size=99).round(1)
    predictions = (np.exp(references) + rng.normal(size=99)).round(1)
    assert len(np.unique(references)) < 60
    assert figures(Pearson, predictions, references)["pearson"] == pytest.approx(
        scipy.pearsonr(predictions, references).statistic
    )
    assert figures(Spearman, predictions, references)["spearman"] == pytest.approx(
        scipy.spearmanr(predictions, references).statistic
    )
    assert figures(SquaredError, predictions, references)["mse"] == pytest.approx(
        ((predictions - references) ** 2).mean()
    )


def test_what_never_varies_has_a_correlation_of_zero():
    """Not NaN, which no later epoch is better than."""
    assert figures(Pearson, [1.5, 1.5, 1.5], [1.0, 2.0, 3.0]) == {"pearson": 0.0}
    assert figures(Spearman, [1.5, 1.5, 1.5], [1.0, 2.0, 3.0]) == {"spearman": 0.0}
    assert figures(Matthews, [1, 1, 1], [0, 1, 2]) == {"matthews_correlation": 0.0}


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("B-X I-X O B-X", {("X", 0, 2), ("X", 3, 4)}),
        ("B-X B-X I-X", {("X", 0, 1), ("X", 1, 3)}),
        ("B-X I-Y I-Y", {("X", 0, 1), ("Y", 1, 3)}),
        ("I-X I-X O I-Y", {("X", 0, 2), ("Y", 3, 4)}),  # as of the first scheme, without B
        ("O O O", set()),
        ("B-a-b I-a-b I-a", {("a-b", 0, 2), ("a", 2, 3)}),
        ("S-X B-X I-X E-X S-Y E-X", {("X", 0, 1), ("X", 1, 4), ("Y", 4, 5), ("X", 5, 6)}),
    ],
)
def test_the_spans_that_tags_mark(tags, spans):
    assert find_spans(tags.split()) == spans


def test_spans_worked_out_by_hand():
    wanted = ["B-PER I-PER O B-LOC O", "B-LOC I-LOC O", "O B-PER"]
    # Right: the first name. One end of the place is wrong; a name that is a place; one is missed; one made up.
    found = ["B-PER I-PER O O O", "B-LOC O O", "B-PER B-LOC"]
    assert figures(Spans, [tags.split() for tags in found], [tags.split() for tags in wanted]) == {
        "precision": 1 / 4,
        "recall": 1 / 4,
        "f1": 1 / 4,
        "f1_LOC": 0.0,
        "f1_PER": 2 * 1 / (2 + 2),
    }
    assert figures(TagAccuracy, [["O", "B-X"], ["O"]], [["O", "O"], ["O"]]) == {"accuracy": 2 / 3}


def test_without_a_span_nothing_is_right():
    assert figures(Spans, [["O", "O"]], [["O", "O"]]) == {"precision": 0.0, "recall": 0.0, "f1": 0.0}


def test_tags_of_words_are_none_of_spans():
    assert marks_spans(["O", "B-X", "I-X"])
    assert not marks_spans(["NOUN", "VERB", "O"])
    assert not marks_spans(["B-X", "NOUN"])
    assert not marks_spans(["O"])


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat's, hat!", "cats hat"),
        ("an ant and a theater", "ant and theater"),
        ("  A ", ""),
        ("Straße „x“", "straße „x“"),  # the script leaves out ASCII punctuation alone
    ],
)
def test_answers_are_compared_as_in_squad(text, normal):
    assert normalize_answer(text) == normal


def test_answers_worked_out_by_hand():
    predictions = ["the Red cat", "red cat sat", "", "dog", "a"]
    references = [["a red cat!", "x"], ["cat"], [""], [""], ["the", "b"]]
    # The second has 1 word of 3 right and all of 1: F1 1/2; the last is compared with "b" alone.
    found = figures(AnswerMetrics, predictions, references)
    assert found == {"exact_match": pytest.approx(2 / 5), "f1": pytest.approx((1 + 0.5 + 1 + 0 + 0) / 5)}


def test_the_best_of_several_answers_counts():
    assert figures(AnswerMetrics, ["big cat"], [["dog", "big cat here", "big"]])["f1"] == pytest.approx(0.8)


def test_they_are_modules_of_evaluate():
    evaluate = pytest.importorskip("evaluate")
    both = evaluate.combine([Accuracy(), MacroF1()])
    for ours, theirs in ((0, 0), (1, 0), (1, 1)):
        both.add(predictions=ours, references=theirs)
    assert both.compute() == {"accuracy": pytest.approx(2 / 3), "f1": pytest.approx(2 / 3)}
    assert not math.isnan(Accuracy().compute(predictions=[1], references=[1])["accuracy"])
