"""Model cards: what a model is, how it was trained, and the figures that were measured."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, FunctionLoader, StrictUndefined
from transformers import AutoConfig

from .. import model_cards


class Figure(NamedTuple):
    """A figure of an evaluation, as cards and summaries tell it.

    Attributes:
        metric: its name among the metrics of the results.
        label: what people read.
        form: how its value and that of its baseline are written.
        hub: its type and name in the card's metadata; None if it is left out there.
        baseline: the metric that it is to be compared with, and what that one guesses.
    """

    metric: str
    label: str
    form: str
    hub: tuple[str, str] | None = None
    baseline: tuple[str, str] | None = None


class Row(NamedTuple):
    """A figure, written: its label, its value, and that of its baseline, which is empty if it has none."""

    label: str
    value: str
    baseline: str
    baseline_label: str


class FamilyCard(NamedTuple):
    """What is told of a family's models.

    Attributes:
        title: of the card, if it is given no other.
        auto_class: of transformers, which loads the model.
        pipeline_tag: the Hub's name of the task.
        source: of training data, which is built in.
        held_out: what figures are measured on.
        figures: all that may be measured, in the order of importance.
        examples: which entry of the results holds examples, and what they are.
        columns: the parts of an example, by their headings.
        line: an example in a summary.
    """

    title: str
    auto_class: str
    pipeline_tag: str
    source: str
    held_out: str
    figures: tuple[Figure, ...]
    examples: tuple[str, str]
    columns: dict[str, str]
    line: str


_PERCENT, _LOSS, _PERPLEXITY, _SCORE = "{:.1%}", "{:.3f}", "{:,.2f}", "{:.1f}"
_MOST_FREQUENT, _FREQUENCIES = "the most frequent token", "token frequencies"

# Of targets, each token predicted from the true ones before it.
_TARGET_FIGURES = (
    Figure("token_accuracy", "tokens predicted right after true ones", _PERCENT, ("accuracy", "token accuracy")),
    Figure("perplexity", "perplexity per token", _PERPLEXITY, ("perplexity", "perplexity per token")),
    Figure("loss", "loss per token, nats", _LOSS, ("cross_entropy", "token cross-entropy")),
)
_PAIRS = FamilyCard(
    title="Encoder-decoder",
    auto_class="AutoModelForSeq2SeqLM",
    # The Hub has no task for texts made of texts. What such a model does is a translation only for some of its data.
    pipeline_tag="text-generation",
    source="dates",
    held_out="pairs",
    figures=(
        Figure("exact_match", "targets generated exactly", _PERCENT, ("exact_match", "exact match")),
        Figure("chrf", "chrF of generated targets, 0 to 100", _SCORE, ("chrf", "chrF")),
        Figure("bleu", "BLEU of generated targets, 0 to 100", _SCORE, ("bleu", "BLEU")),
        *_TARGET_FIGURES,
    ),
    examples=("generated", "Held-out sources, and what the model made of them"),
    columns={"source": "source", "target": "target", "prediction": "prediction"},
    line="  {source}\n    {prediction}  (should be: {target})",
)
FAMILY_CARDS = {
    "bert": FamilyCard(
        title="BERT",
        auto_class="AutoModelForMaskedLM",
        pipeline_tag="fill-mask",
        source="python-docs",
        held_out="documents",
        figures=(
            Figure(
                "masked_accuracy",
                "masked tokens predicted right",
                _PERCENT,
                ("accuracy", "masked token accuracy"),
                ("masked_accuracy_baseline", _MOST_FREQUENT),
            ),
            Figure(
                "masked_loss",
                "loss per masked token, nats",
                _LOSS,
                ("cross_entropy", "masked token cross-entropy"),
                ("masked_loss_unigram", _FREQUENCIES),
            ),
            Figure(
                "next_sentence_accuracy",
                "next sentences told from random ones",
                _PERCENT,
                baseline=("next_sentence_baseline", "the more frequent kind"),
            ),
        ),
        examples=("filled", "Held-out sentences with a word masked"),
        columns={"sentence": "text", "word": "word", "guesses": "guesses"},
        line="  {text}\n    {guesses}  (was: {word})",
    ),
    "decoder": FamilyCard(
        title="Decoder",
        auto_class="AutoModelForCausalLM",
        pipeline_tag="text-generation",
        source="python-docs",
        held_out="documents",
        figures=(
            Figure(
                "perplexity",
                "perplexity per token",
                _PERPLEXITY,
                ("perplexity", "perplexity per token"),
                ("perplexity_unigram", _FREQUENCIES),
            ),
            Figure(
                "token_accuracy",
                "next tokens predicted right",
                _PERCENT,
                ("accuracy", "next token accuracy"),
                ("token_accuracy_baseline", _MOST_FREQUENT),
            ),
            Figure("loss", "loss per token, nats", _LOSS, ("cross_entropy", "token cross-entropy")),
        ),
        examples=(
            "generated",
            "Beginnings of held-out documents, and how the model went on when its tokens were drawn",
        ),
        columns={"beginning": "prompt", "continuation": "continuation"},
        line="  {prompt}\n    {continuation}",
    ),
    "transformer": _PAIRS._replace(title="Encoder-decoder Transformer"),
    "recurrent": _PAIRS._replace(title="Recurrent encoder-decoder"),
    "captioner": FamilyCard(
        title="Image captioner",
        auto_class="AutoModelForImageTextToText",
        pipeline_tag="image-to-text",
        source="glyphs",
        held_out="images",
        figures=(
            Figure("exact_match", "captions generated exactly", _PERCENT, ("exact_match", "exact match")),
            Figure("base_letter", "letters right, whatever their marks", _PERCENT),
            Figure("token_f1", "F1 of the words of generated captions", _PERCENT, ("f1", "word F1")),
            *_TARGET_FIGURES,
        ),
        examples=("generated", "Captions of held-out images, and what the model generated"),
        columns={"caption": "target", "prediction": "prediction"},
        line="  {prediction}  (should be: {target})",
    ),
}

# The built-in sources: what they are, and the language of their texts.
_BUILT_IN = {
    "python-docs": ("the documentation in Python's standard library", "en"),
    "dates": ("dates in {locales}, written by Babel's CLDR", "multilingual"),
    "glyphs": ("characters drawn with the DejaVu fonts, captioned by their Unicode names", "en"),
}
# How many locales there are when none are named.
_DATE_LOCALES = 24

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def figure_rows(family: str, metrics: dict[str, float]) -> list[Row]:
    """Those of a family's figures that were measured, written for people."""
    rows = []
    for figure in FAMILY_CARDS[family].figures:
        if figure.metric in metrics:
            value, baseline, label = figure.form.format(metrics[figure.metric]), "", ""
            if figure.baseline is not None:
                name, label = figure.baseline
                baseline = figure.form.format(metrics[name])
            rows.append(Row(figure.label, value, baseline, label))
    return rows


def examples_of(results: dict[str, Any]) -> list[dict[str, str]]:
    """The examples among the results, each part of them text of one line."""
    card = FAMILY_CARDS[results["family"]]

    def text_of(part: str | list[str]) -> str:
        return ", ".join(" ".join(text.split()) for text in ([part] if isinstance(part, str) else part))

    examples = results.get(card.examples[0], ())
    return [{part: text_of(example[part]) for part in card.columns.values()} for example in examples]


def public_source(source: str, built_in: Collection[str] = tuple(_BUILT_IN)) -> str:
    """The name of a training source that means something to others: local files are not named.

    Args:
        source: as the setting `data` has it.
        built_in: sources that are built in for the family; for another such a name is that of files.
    """
    name, _, part = source.partition(":")
    if name in built_in:
        number = len({locale.strip() for locale in part.split(",")} - {""}) or _DATE_LOCALES
        locales = f"{number} locale{'s' if number > 1 else ''}"
        return f"{_BUILT_IN[name][0].format(locales=locales)} (`{source}`)"
    return f"the data set `{source}`" if _is_hub_id(name) else "local files"


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def _cell(text: str) -> str:
    """Text as a cell of a Markdown table, whatever it holds."""
    return re.sub(r"([\\`*_~$&|<>\[\]])", r"\\\1", " ".join(text.split()))


def _held_out_source(settings: dict[str, Any]) -> str | None:
    """The source that `validation` names; None if it is a share of the training data."""
    try:
        float(settings["validation"])
    except ValueError:
        return settings["validation"]
    return None


def _language(settings: dict[str, Any], card: FamilyCard) -> str | None:
    given = settings.get("language")
    built_in = any(source.partition(":")[0] == card.source for source in settings["data"])
    return given or (_BUILT_IN[card.source][1] if built_in else None)


def _metadata(results: dict[str, Any], config: Any, title: str, held_out: str) -> ModelCardData:
    card, metrics = FAMILY_CARDS[results["family"]], results["metrics"]
    names = dict.fromkeys(source.partition(":")[0] for source in results["settings"]["data"])
    return ModelCardData(
        language=_language(results["settings"], card),
        library_name="transformers",
        tags=["regard", config.model_type],
        datasets=[name for name in names if _is_hub_id(name)] or None,
        pipeline_tag=card.pipeline_tag,
        model_name=title,
        eval_results=[
            EvalResult(
                task_type=card.pipeline_tag,
                dataset_type="held-out",
                dataset_name=f"held-out {card.held_out} of {re.sub('`', '', held_out)}",
                metric_type=figure.hub[0],
                metric_name=figure.hub[1],
                metric_value=round(metrics[figure.metric], 4),
            )
            for figure in card.figures
            # What the Hub reads has no infinity.
            if figure.hub is not None and math.isfinite(metrics.get(figure.metric, math.nan))
        ],
    )


def model_card(results: dict[str, Any], config: Any, title: str | None = None) -> ModelCard:
    """Makes the card of a trained model.

    Args:
        results: what the run came to, see `training.family.train`.
        config: the model's configuration.
        title: of the card, and the model's name in its metadata; None: the name of its family.
    """
    card, settings = FAMILY_CARDS[results["family"]], results["settings"]
    title = title or card.title
    sources = ", ".join(dict.fromkeys(public_source(source, [card.source]) for source in settings["data"]))
    other = _held_out_source(settings)
    held_out_source = None if other is None else public_source(other, [card.source])
    names = [*settings["data"], *([] if other is None else [other])]
    examples = results.get(card.examples[0], ())
    prompt = examples[0][next(iter(card.columns.values()))] if examples else None
    environment = Environment(
        loader=FunctionLoader(lambda name: files(model_cards).joinpath(name).read_text(encoding="utf-8")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["grouped"] = "{:,}".format
    environment.filters["cell"] = _cell
    environment.filters["python"] = repr
    environment.tests["hub_id"] = _is_hub_id
    content = environment.get_template(f"{results['family']}.md").render(
        **results,
        card_data=_metadata(results, config, title, held_out_source or sources).to_yaml(),
        config=config,
        title=title,
        sources=sources,
        held_out=card.held_out,
        held_out_source=held_out_source,
        only_built_in=all(name.partition(":")[0] == card.source for name in names),
        figures=figure_rows(results["family"], results["metrics"]),
        caption=card.examples[1],
        columns=card.columns,
        examples=examples_of(results),
        prompt=prompt,
    )
    return ModelCard(content)


def write_card(folder: Path, results: dict[str, Any]) -> None:
    """Writes the card of a trained model beside it, as `README.md`."""
    model_card(results, AutoConfig.from_pretrained(folder)).save(folder / "README.md")
