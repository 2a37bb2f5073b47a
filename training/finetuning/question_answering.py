"""Extractive question answering: long contexts are split into overlapping windows; answers are spans of characters.

Places in a context are counted in characters, as Python and SQuAD count them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from transformers import DataCollatorWithPadding, EvalPrediction, PreTrainedTokenizerFast

from ..reading.tables import Column
from ..reading.typed_rows import LabelNames, Row
from .labels import is_empty, parse_json, text_of
from .metrics import AnswerMetrics
from .task import FinetuneTask, compute_metrics

# The number of best spans of a question over which the probabilities of its answers sum to one.
BEST = 20


class Window(NamedTuple):
    """A question with a part of its context, encoded for the model.

    Attributes:
        row: number of the question.
        inputs: the model's inputs.
        spans: for each token its first character in the context and the one after its last; None for tokens outside
            the context.
    """

    row: int
    inputs: dict[str, list[int]]
    spans: list[tuple[int, int] | None]


class Answer(NamedTuple):
    """An answer: a part of a context, its place in it and its probability. The text is empty for "no answer"."""

    text: str
    start: int
    end: int
    probability: float


def shorten_questions(
    tokenizer: PreTrainedTokenizerFast, questions: Sequence[str], max_tokens: int
) -> tuple[list[str], int]:
    """Cuts questions after `max_tokens` tokens, to leave room for the context.

    Returns:
        The questions, and the number of those that were cut.
    """
    offsets = tokenizer(list(questions), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    cut = [
        question[: places[max_tokens - 1][1]] if len(places) > max_tokens else question
        for question, places in zip(questions, offsets["offset_mapping"], strict=True)
    ]
    return cut, sum(short != question for short, question in zip(cut, questions, strict=True))


def make_windows(
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[str],
    contexts: Sequence[str],
    max_length: int,
    stride: int,
) -> list[Window]:
    """Encodes questions with their contexts. A context that is too long for one window is split into several.

    Args:
        tokenizer: a fast tokenizer, which knows the place of each token in the text.
        questions: the questions; they must leave room for more than `stride` tokens of context.
        contexts: the context of each question.
        max_length: the length of a window, in tokens.
        stride: the number of tokens that a window shares with the one before it.
    """
    encoded = tokenizer(
        list(questions),
        list(contexts),
        max_length=max_length,
        stride=stride,
        truncation="only_second",
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    names = [name for name in tokenizer.model_input_names if name in encoded]
    windows = []
    for number, row in enumerate(encoded["overflow_to_sample_mapping"]):
        parts = encoded.sequence_ids(number)
        spans = [
            tuple(span) if part == 1 else None
            for span, part in zip(encoded["offset_mapping"][number], parts, strict=True)
        ]
        windows.append(Window(row, {name: encoded[name][number] for name in names}, spans))
    return windows


def trim(context: str, start: int, text: str) -> tuple[int, int] | None:
    """Returns the first character of an answer and the one after its last, without surrounding white space.

    Args:
        context: the text that contains the answer.
        start: the character at which the answer starts.
        text: the answer.

    Returns:
        None if the context does not hold the text at that place, or the text is nothing but white space.
    """
    if not text.strip() or start < 0 or context[start : start + len(text)] != text:
        return None
    return start + len(text) - len(text.lstrip()), start + len(text.rstrip())


def find_tokens(windows: Sequence[Window], places: Sequence[tuple[int, int] | None]) -> list[tuple[int, int] | None]:
    """Returns the first and the last token of the answer in each window; None if a window does not hold all of it.

    A token that overlaps the answer belongs to it. Characters without a token, such as white space, do not count.

    Args:
        windows: the windows of all questions.
        places: the first character of each question's answer and the one after its last; None for no answer.
    """
    held: list[list[int]] = []
    needed: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for window in windows:
        start, end = places[window.row] or (0, 0)
        shares = [span is not None and span[0] < end and span[1] > start for span in window.spans]
        held.append([token for token, inside in enumerate(shares) if inside])
        needed[window.row].update(span for token in held[-1] if (span := window.spans[token]) is not None)
    return [
        (tokens[0], tokens[-1]) if tokens and {window.spans[token] for token in tokens} == needed[window.row] else None
        for window, tokens in zip(windows, held, strict=True)
    ]


def no_answer_token(tokenizer: PreTrainedTokenizerFast, window: Window) -> int:
    """Returns the place of the token that means "no answer": [CLS], or the first token if there is no [CLS]."""
    ids = window.inputs["input_ids"]
    return ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0


def best_answers(
    windows: Sequence[Window],
    start_scores: Sequence[np.ndarray],
    end_scores: Sequence[np.ndarray],
    contexts: Sequence[str],
    no_answers: Sequence[int] | None,
    max_tokens: int,
) -> list[Answer]:
    """Chooses the best span over all windows of each question.

    The score of a span is the start score of its first token plus the end score of its last token. Devlin et al.
    (2019), https://arxiv.org/abs/1810.04805, sections 4.2 and 4.3.

    Args:
        windows: the windows of all questions.
        start_scores: for each window, the score of each token as the first of the answer.
        end_scores: for each window, the score of each token as the last of the answer.
        contexts: the context of each question.
        no_answers: for each window, the place of the token that means "no answer"; None if each question has an
            answer.
        max_tokens: the longest answer, in tokens.

    Returns:
        An answer for each question. Its probability is the softmax over the scores of the best spans.
    """
    found: list[list[tuple[float, int, int]]] = [[] for _ in contexts]
    none = [np.inf for _ in contexts]
    for number, window in enumerate(windows):
        inside = np.array([place for place, span in enumerate(window.spans) if span is not None and span[0] < span[1]])
        if no_answers is not None:
            token = no_answers[number]
            # As in the published model: the window with the lowest score for no answer decides.
            none[window.row] = min(none[window.row], float(start_scores[number][token] + end_scores[number][token]))
        if not len(inside):
            continue
        starts, ends = (np.asarray(scores[number], dtype=np.float64)[inside] for scores in (start_scores, end_scores))
        length = len(inside)
        allowed = np.triu(np.ones((length, length), dtype=bool)) & ~np.triu(
            np.ones((length, length), dtype=bool), max_tokens
        )
        scores = np.where(allowed, starts[:, None] + ends[None, :], -np.inf).reshape(-1)
        best = np.argpartition(-scores, BEST)[:BEST] if len(scores) > BEST else np.arange(len(scores))
        for place in best[np.isfinite(scores[best])].tolist():
            first, last = window.spans[inside[place // length]], window.spans[inside[place % length]]
            assert first is not None
            assert last is not None
            found[window.row].append((float(scores[place]), first[0], last[1]))
    may_be_none = no_answers is not None
    return [_choose(*parts, may_be_none) for parts in zip(contexts, found, none, strict=True)]


def _choose(context: str, found: list[tuple[float, int, int]], none: float, may_be_none: bool) -> Answer:
    # Neighbouring windows find the same span.
    scores: dict[tuple[int, int], float] = {}
    for score, start, end in found:
        scores[start, end] = max(score, scores.get((start, end), -np.inf))
    if not scores or may_be_none:
        scores[0, 0] = none if may_be_none else 0.0
    ranked = sorted(scores.items(), key=lambda item: -item[1])[:BEST]
    (start, end), top = ranked[0]
    total = sum(np.exp(score - top) for _, score in ranked)
    # Some tokenizers count the space before a word as part of it.
    start, end = trim(context, start, context[start:end]) or (start, end)
    return Answer(context[start:end], start, end, float(1 / total))


class QuestionAnswering(FinetuneTask):
    """Predicts the part of a text that answers a question, or that there is no answer in it."""

    name = "question-answering"
    auto_class = "AutoModelForQuestionAnswering"
    best_by = "f1"
    measured = ("f1", "exact_match")
    label_inputs = ("start_positions", "end_positions")
    longest = 0

    def columns(self) -> list[Column]:
        return [Column(getattr(self.settings, name), name) for name in self.own_settings if name.endswith("_column")]

    def parse(self, row: Row, where: str, label_names: LabelNames) -> Row | None:
        chosen = self.settings
        question, context = (text_of(row, column, where) for column in (chosen.question_column, chosen.context_column))
        texts, starts = self._answers(row[chosen.answers_column], where)
        # No answer means that the context does not answer the question.
        place = trim(context, starts[0], texts[0]) if texts else None
        if is_empty(question) or is_empty(context):
            return None
        return {"question": question, "context": context, "answers": texts, "place": place}

    def _answers(self, value: Any, where: str) -> tuple[list[str], list[int]]:
        column = self.settings.answers_column
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = parse_json(value, column, where)
        parts = (value.get("text"), value.get("answer_start")) if isinstance(value, dict) else (None, None)
        texts: Any
        starts: Any
        texts, starts = ([part] if isinstance(part, (str, int)) else part for part in parts)
        if (
            not isinstance(texts, list)
            or not isinstance(starts, list)
            or len(texts) != len(starts)
            or not all(isinstance(text, str) for text in texts)
            or not all(isinstance(start, int) for start in starts)
        ):
            raise ValueError(
                f'{where}: column {column!r} must hold {{"text": [...], "answer_start": [...]}} '
                f"of the same length (both [] where there is no answer), not {repr(value)[:60]}"
            )
        return texts, starts

    def learn_labels(self, examples: Sequence[Row], label_names: LabelNames) -> None:
        self.may_be_none = any(not row["answers"] for row in examples)
        self.facts["unanswerable"] = sum(not row["answers"] for row in examples)

    def encode(self, examples: Sequence[Row], part: str) -> Dataset:
        is_training = part == "data"
        strayed = [bool(row["answers"]) and row["place"] is None for row in examples]
        problem = "have an answer that is not at its place in the context"
        self.warn_and_count(
            "not_aligned", sum(strayed), len(examples), part, f"{problem}{' and are left out' * is_training}"
        )
        if is_training:
            # Held-out answers are compared by their texts.
            examples = [row for row, stray in zip(examples, strayed, strict=True) if not stray]
        if not examples:
            raise ValueError(
                f"no row of {part} has an answer at its place in `context_column`: look at `answer_start`"
            )
        room = self.max_length - self.tokenizer.num_special_tokens_to_add(pair=True)
        stride = self.settings.stride
        if stride is None:
            # As published: 128 of 384.
            stride = min(self.max_length // 3, room - 2)
        if stride >= room - 1:
            raise ValueError(
                f"`stride` ({stride}) must be less than {room - 1}, the tokens in a window of `max_length`"
            )
        # Half of the window, or less where the stride takes more.
        longest = min(room // 2, room - stride - 1)
        questions, cut = shorten_questions(self.tokenizer, [row["question"] for row in examples], longest)
        self.warn_and_count(
            "truncated", cut, len(examples), part, f"have a question of more than {longest} tokens, which is cut"
        )
        contexts = [row["context"] for row in examples]
        windows = make_windows(self.tokenizer, questions, contexts, self.max_length, stride)
        tokens = find_tokens(windows, [row["place"] for row in examples])
        none = [no_answer_token(self.tokenizer, window) for window in windows]
        self._count_ends(windows, tokens, examples, part)
        if not is_training:
            self.windows, self.none = windows, none
        self.facts.setdefault("windows", {})[part] = len(windows)
        labels = [(token, token) if span is None else span for span, token in zip(tokens, none, strict=True)]
        rows = [
            {**window.inputs, "start_positions": span[0], "end_positions": span[1]}
            for window, span in zip(windows, labels, strict=True)
        ]
        self.longest = max(self.longest, *(len(window.spans) for window in windows))
        return self.in_batches(rows, lambda part: {name: [row[name] for row in part] for name in part[0]})

    def collator(self) -> Any:
        # All batches are padded to one length. Padding can be chosen as an answer and so is part of the loss, which
        # would otherwise depend on the other rows of the batch.
        return DataCollatorWithPadding(self.tokenizer, padding="max_length", max_length=self.longest)

    def _count_ends(
        self, windows: Sequence[Window], tokens: Sequence[Any], examples: Sequence[Row], part: str
    ) -> None:
        held, inexact = set(), set()
        for window, span in zip(windows, tokens, strict=True):
            if span is None:
                continue
            held.add(window.row)
            first, last = window.spans[span[0]], window.spans[span[1]]
            assert first is not None
            assert last is not None
            start, end = examples[window.row]["place"]
            if first[0] < start or last[1] > end:
                inexact.add(window.row)
        lost = sum(row["place"] is not None for row in examples) - len(held)
        self.warn_and_count("not_in_a_window", lost, len(examples), part, "have an answer that no window holds all of")
        problem = "have an answer that begins or ends within a token, which is taken whole"
        self.warn_and_count("within_a_token", len(inexact), len(examples), part, problem)

    def _answer(self, logits: Any) -> list[Answer]:
        lengths = [len(window.spans) for window in self.windows]
        starts, ends = (
            [row[:length] for row, length in zip(scores, lengths, strict=True)] for scores in (logits[0], logits[1])
        )
        contexts = [row["context"] for row in self.held_out]
        none = self.none if self.may_be_none else None
        return best_answers(self.windows, starts, ends, contexts, none, self.settings.max_answer_length)

    def metrics(self, outcome: EvalPrediction) -> dict[str, float]:
        found = [answer.text for answer in self._answer(outcome.predictions)]
        return compute_metrics((AnswerMetrics,), found, [row["answers"] or [""] for row in self.held_out])

    def predictions(self, logits: Any) -> list[dict[str, Any]]:
        return [
            {"prediction": answer.text, "start": answer.start, "end": answer.end, "probability": answer.probability}
            for answer in self._answer(logits)
        ]
