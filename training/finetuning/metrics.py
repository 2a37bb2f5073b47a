"""Metrics of fine-tuned models: `evaluate` modules that come with the package, so that nothing is downloaded.

They work like the modules that `evaluate.load` returns: `Accuracy().compute(predictions=[0, 1], references=[0, 0])`
returns `{"accuracy": 0.5}`. Values are between 0 and 1, except for correlations (-1 to 1) and errors.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np

from ..generation.text_metrics import exact_match, token_f1

_CLASSES = datasets.Value("int64")
_NUMBERS = datasets.Value("float64")
_TAGS = datasets.List(datasets.Value("string"))


def _ratio(part: float, whole: float) -> float:
    """Returns part / whole; 0 if the whole is 0."""
    return float(part / whole) if whole else 0.0


def f1_score(right: int, predicted: int, wanted: int) -> float:
    """Returns F1, the harmonic mean of precision and recall.

    Args:
        right: the number of right predictions.
        predicted: the number of predictions.
        wanted: the number of references. F1 is 0 if this and `predicted` are.
    """
    return _ratio(2 * right, predicted + wanted)


class _Metric(evaluate.Metric):
    """A metric that keeps predictions and references in memory.

    Attributes:
        description: what the metric measures.
        citation: its source.
        predicted: the type of one prediction.
        wanted: the type of one reference; None if it is that of a prediction.
    """

    description: str
    citation = ""
    predicted: Any = _CLASSES
    wanted: Any = None

    def __init__(self, **options: Any) -> None:
        # By default, `evaluate` writes them to files in the user's cache.
        super().__init__(keep_in_memory=True, **options)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.description,
            citation=self.citation,
            inputs_description=self.description,
            features=datasets.Features(
                {"predictions": self.predicted, "references": self.predicted if self.wanted is None else self.wanted}
            ),
        )


class Accuracy(_Metric):
    """The share of predictions that are right."""

    description = "The share of predictions that are right."

    def _compute(self, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
        return {
            "accuracy": float(np.mean([ours == theirs for ours, theirs in zip(predictions, references, strict=True)]))
        }


class MacroF1(_Metric):
    """The mean of the F1 of all classes, whose weights do not depend on their frequency.

    The classes are those that occur among predictions or references, as in scikit-learn.
    """

    description = "The mean of the classes' F1."

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        ours, theirs = Counter(predictions), Counter(references)
        right = Counter(one for one, other in zip(predictions, references, strict=True) if one == other)
        return {"f1": float(np.mean([f1_score(right[each], ours[each], theirs[each]) for each in ours | theirs]))}


class Matthews(_Metric):
    """Matthews' correlation of predictions and references, for any number of classes; 0 if either is constant.

    Gorodkin (2004), "Comparing two K-category assignments by a K-category correlation coefficient".
    """

    description = "Matthews correlation coefficient."
    citation = "Gorodkin (2004), Computational Biology and Chemistry 28"

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        ours, theirs = np.asarray(predictions), np.asarray(references)
        classes = np.union1d(ours, theirs)
        counted = np.array([[(ours == each).sum(), (theirs == each).sum()] for each in classes], dtype=float)
        number = len(ours)
        covariance = number * (ours == theirs).sum() - (counted[:, 0] * counted[:, 1]).sum()
        variances = number**2 - (counted**2).sum(axis=0)
        return {"matthews_correlation": _ratio(covariance, np.sqrt(variances.prod()))}


def _correlation(ours: np.ndarray, theirs: np.ndarray) -> float:
    ours, theirs = ours - ours.mean(), theirs - theirs.mean()
    return _ratio((ours * theirs).sum(), np.sqrt((ours**2).sum() * (theirs**2).sum()))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Returns the rank of each value; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


class Pearson(_Metric):
    """Pearson's correlation of predictions and references; 0 if either is constant."""

    description = "Pearson correlation coefficient."
    predicted = _NUMBERS

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        return {"pearson": _correlation(np.asarray(predictions, dtype=float), np.asarray(references, dtype=float))}


class Spearman(_Metric):
    """Spearman's rank correlation of predictions and references; 0 if either is constant."""

    description = "Spearman rank correlation coefficient."
    predicted = _NUMBERS

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        ours, theirs = (_ranks(np.asarray(values, dtype=float)) for values in (predictions, references))
        return {"spearman": _correlation(ours, theirs)}


class SquaredError(_Metric):
    """The mean squared error."""

    description = "Mean squared error."
    predicted = _NUMBERS

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        return {"mse": float(np.mean((np.asarray(predictions) - np.asarray(references)) ** 2))}


class MultiLabelF1(_Metric):
    """Metrics of multi-label predictions, which are lists with 0 or 1 for each label.

    `f1` is over all labels together (micro), `f1_macro` is the mean of the labels' F1, and `accuracy` is the share of
    rows in which every label is right.
    """

    description = "F1 over all labels together (micro), the mean of the labels' F1 (macro), and accuracy of rows."
    predicted = datasets.List(_CLASSES)

    def _compute(self, predictions: Sequence[list[int]], references: Sequence[list[int]]) -> dict[str, float]:
        ours, theirs = np.asarray(predictions), np.asarray(references)
        counts = np.stack([(ours * theirs).sum(axis=0), ours.sum(axis=0), theirs.sum(axis=0)])
        return {
            "f1": f1_score(*counts.sum(axis=1)),
            "f1_macro": float(np.mean([f1_score(*label) for label in counts.T])),
            "accuracy": float((ours == theirs).all(axis=1).mean()),
        }


def find_spans(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Returns the spans that the tags of words mark: the type of each, its first word and the one after its last.

    Tags begin with `B-` (first word of a span), `I-` (inside), `E-` (last) or `S-` (the only word), or are `O`
    (outside). As in CoNLL's script and seqeval, an `I-` that does not follow a word of its type begins a span.
    Ramshaw and Marcus (1995), https://aclanthology.org/W95-0107
    """
    spans: set[tuple[str, int, int]] = set()
    start, kind, previous = 0, "", "O"
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        goes_on = previous in ("B", "I") and prefix in ("I", "E") and name == kind
        if not goes_on:
            if previous != "O":
                spans.add((kind, start, place))
            start, kind = place, name
        previous = prefix
    return spans


def marks_spans(tags: Sequence[str]) -> bool:
    """Returns whether tags mark spans, and not, for example, parts of speech."""
    marked = [re.fullmatch("[BIES]-.+", tag) is not None for tag in tags if tag != "O"]
    return bool(marked) and all(marked)


class Spans(_Metric):
    """Precision, recall and F1 of spans, as in seqeval: a span is right if its type and both of its ends are.

    Tjong Kim Sang and De Meulder (2003), https://aclanthology.org/W03-0419
    """

    description = "Precision, recall and F1 of spans, over all types together; F1 of each type by itself."
    citation = "https://aclanthology.org/W03-0419"
    predicted = _TAGS

    def _compute(self, predictions: Sequence[list[str]], references: Sequence[list[str]]) -> dict[str, float]:
        right: Counter[str] = Counter()
        ours: Counter[str] = Counter()
        theirs: Counter[str] = Counter()
        for predicted, wanted in zip(map(find_spans, predictions), map(find_spans, references), strict=True):
            for counter, spans in ((right, predicted & wanted), (ours, predicted), (theirs, wanted)):
                counter.update(kind for kind, _, _ in spans)
        return {
            "precision": _ratio(right.total(), ours.total()),
            "recall": _ratio(right.total(), theirs.total()),
            "f1": f1_score(right.total(), ours.total(), theirs.total()),
            **{f"f1_{kind}": f1_score(right[kind], ours[kind], theirs[kind]) for kind in sorted(ours | theirs)},
        }


class TagAccuracy(_Metric):
    """The share of words that have the right tag."""

    description = "The share of words that have the right tag."
    predicted = _TAGS

    def _compute(self, predictions: Sequence[list[str]], references: Sequence[list[str]]) -> dict[str, float]:
        words = [
            ours == theirs
            for predicted, wanted in zip(predictions, references, strict=True)
            for ours, theirs in zip(predicted, wanted, strict=True)
        ]
        return {"accuracy": float(np.mean(words))}


def normalize_answer(text: str) -> str:
    """Returns an answer in lower case, without ASCII punctuation, English articles and extra space.

    As `normalize_answer` of the official script, https://rajpurkar.github.io/SQuAD-explorer/ (evaluate-v2.0.py).
    """
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


class AnswerMetrics(_Metric):
    """Exact match and F1 of answers, from 0 to 1; each is the highest over the right answers of the question.

    Rajpurkar et al. (2018), https://arxiv.org/abs/1806.03822. A question without an answer has the right answer "".
    """

    description = "Exact match and F1 of words, of normalized answers."
    citation = "https://arxiv.org/abs/1806.03822"
    predicted = datasets.Value("string")
    wanted = datasets.List(datasets.Value("string"))

    def _compute(self, predictions: Sequence[str], references: Sequence[list[str]]) -> dict[str, float]:
        exact, overlap = [], []
        for prediction, answers in zip(predictions, references, strict=True):
            ours = [normalize_answer(prediction)]
            # Like the official script, this leaves out answers of nothing but articles, if others remain.
            theirs = [text for text in map(normalize_answer, answers) if text] or [""]
            exact.append(max(exact_match(ours, [text]) for text in theirs))
            overlap.append(max(token_f1(ours, [text]) for text in theirs))
        return {"exact_match": float(np.mean(exact)), "f1": float(np.mean(overlap))}
