"""The contents of model cards and summaries that depend on the family: figures, examples, how a model is loaded."""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """A figure of an evaluation, as cards and summaries show it.

    Attributes:
        metric: its name among the metrics of the results.
        label: the text that people read.
        form: the format of its value and of its baseline.
        hub: its type and name in the card's metadata; None leaves it out there.
        baseline: the metric to compare it with, and a description of what that baseline guesses.
    """

    metric: str
    label: str
    form: str
    hub: tuple[str, str] | None = None
    baseline: tuple[str, str] | None = None


class Card(NamedTuple):
    """The contents of cards and summaries of a family's models, or of models that were fine-tuned for a task.

    Attributes:
        title: the card's title, if it is given no other.
        auto_class: the Auto class of transformers that loads the model.
        pipeline_tag: the Hub's name of the task.
        held_out: what the figures are measured on, in the plural: "documents".
        figures: all figures that may be measured, the most important first.
        template: name of the file in `model_cards`, without its ending.
        source: name of the built-in data that the family trains on by default; None if there is no such data.
        examples: the entry of the results that holds examples, and its caption; empty if there are no examples.
        columns: the parts of an example by their headings.
        line: the format of an example in a summary.
    """

    title: str
    auto_class: str
    pipeline_tag: str
    held_out: str
    figures: tuple[Figure, ...]
    template: str
    source: str | None = None
    examples: tuple[str, str] = ("", "")
    columns: dict[str, str] = {}
    line: str = ""


PERCENT, LOSS, PERPLEXITY, SCORE, ANY_SIZE = "{:.1%}", "{:.3f}", "{:,.2f}", "{:.1f}", "{:.4g}"
MOST_FREQUENT, FREQUENCIES = "the most frequent token", "token frequencies"

# Each target token is predicted from the true tokens before it.
TARGET_FIGURES = (
    Figure("token_accuracy", "tokens predicted right after true ones", PERCENT, ("accuracy", "token accuracy")),
    Figure("perplexity", "perplexity per token", PERPLEXITY, ("perplexity", "perplexity per token")),
    Figure("loss", "loss per token, nats", LOSS, ("cross_entropy", "token cross-entropy")),
)
# Of models that turn one text into another.
PAIRS = Card(
    title="Encoder-decoder",
    auto_class="AutoModelForSeq2SeqLM",
    # The Hub has no task for text to text. What such a model does is a translation only for some data.
    pipeline_tag="text-generation",
    template="pairs",
    source="dates",
    held_out="pairs",
    figures=(
        Figure("exact_match", "targets generated exactly", PERCENT, ("exact_match", "exact match")),
        Figure("chrf", "chrF of generated targets, 0 to 100", SCORE, ("chrf", "chrF")),
        Figure("bleu", "BLEU of generated targets, 0 to 100", SCORE, ("bleu", "BLEU")),
        *TARGET_FIGURES,
    ),
    examples=("generated", "Held-out sources, and what the model made of them"),
    columns={"source": "source", "target": "target", "prediction": "prediction"},
    line="  {source}\n    {prediction}  (should be: {target})",
)
