"""Model cards: descriptions of models, of their training, and of the figures that were measured."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from jinja2 import Environment, FunctionLoader, StrictUndefined
from transformers import AutoConfig

from .. import model_cards
from ..families.card import ANY_SIZE, LOSS, PERCENT, Card, Figure
from ..families.registry import FAMILIES, family_of_type


class Row(NamedTuple):
    """A figure as text: its label, its value, and the value and label of its baseline, empty without a baseline."""

    label: str
    value: str
    baseline: str
    baseline_label: str


_ACCURACY = Figure(
    "accuracy",
    "accuracy",
    PERCENT,
    ("accuracy", "accuracy"),
    ("accuracy_baseline", "the most frequent class"),
)
_TASK_LOSS = Figure("loss", "loss, nats", LOSS)
_CLASSIFIER = Card(
    title="Text classifier",
    template="finetuned",
    auto_class="AutoModelForSequenceClassification",
    pipeline_tag="text-classification",
    held_out="rows",
    figures=(
        _ACCURACY,
        Figure("f1", "F1, mean of the classes", PERCENT, ("f1", "macro F1")),
        Figure(
            "matthews_correlation",
            "Matthews correlation",
            LOSS,
            ("matthews_correlation", "Matthews correlation"),
        ),
        _TASK_LOSS,
    ),
)
# By default, the first of the figures that were measured chooses the best model.
TASK_CARDS = {
    "classification": _CLASSIFIER,
    "regression": _CLASSIFIER._replace(
        title="Text regression",
        figures=(
            # It is the loss too.
            Figure(
                "mse",
                "mean squared error",
                ANY_SIZE,
                ("mse", "mean squared error"),
                ("mse_baseline", "the mean of the labels"),
            ),
            Figure("pearson", "Pearson correlation", LOSS, ("pearsonr", "Pearson correlation")),
            Figure("spearman", "Spearman correlation", LOSS, ("spearmanr", "Spearman correlation")),
        ),
    ),
    "multi-label": _CLASSIFIER._replace(
        title="Multi-label text classifier",
        figures=(
            Figure("f1", "F1 of all labels together", PERCENT, ("f1", "micro F1")),
            Figure("f1_macro", "F1, mean of the labels", PERCENT, ("f1", "macro F1")),
            _ACCURACY._replace(label="rows with all labels right", baseline=None),
            _TASK_LOSS,
        ),
    ),
    "tokens": Card(
        title="Tagger",
        template="finetuned",
        auto_class="AutoModelForTokenClassification",
        pipeline_tag="token-classification",
        held_out="rows",
        figures=(
            Figure("f1", "F1 of spans", PERCENT, ("f1", "span F1")),
            Figure("precision", "predicted spans that are right", PERCENT, ("precision", "span precision")),
            Figure("recall", "spans that are found", PERCENT, ("recall", "span recall")),
            _ACCURACY._replace(label="words tagged right", baseline=("accuracy_baseline", "the most frequent tag")),
            _TASK_LOSS,
        ),
    ),
    "question-answering": Card(
        title="Question answering",
        template="finetuned",
        auto_class="AutoModelForQuestionAnswering",
        pipeline_tag="question-answering",
        held_out="rows",
        figures=(
            Figure("f1", "F1 of the words of answers", PERCENT, ("f1", "word F1")),
            Figure("exact_match", "answers found exactly", PERCENT, ("exact_match", "exact match")),
            _TASK_LOSS,
        ),
    ),
    "multiple-choice": Card(
        title="Multiple choice",
        template="finetuned",
        auto_class="AutoModelForMultipleChoice",
        pipeline_tag="multiple-choice",
        held_out="rows",
        figures=(_ACCURACY._replace(baseline=("accuracy_baseline", "chance")), _TASK_LOSS),
    ),
}

# A description of each built-in source, and the language of its texts.
_BUILT_IN = {
    "python-docs": ("the documentation in Python's standard library", "en"),
    "dates": ("dates in {locales}, written by Babel's CLDR", "multilingual"),
    "glyphs": ("characters drawn with the DejaVu fonts, captioned by their Unicode names", "en"),
}
# Number of locales if none are named.
_DATE_LOCALES = 24

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def card_of(results: dict[str, Any]) -> Card:
    """Returns what cards and summaries show of a model.

    Args:
        results: results of a run or an evaluation, which name the family, or the task of a fine-tuned model.
    """
    return TASK_CARDS[results["task"]] if "task" in results else FAMILIES[results["family"]].card


def figure_rows(card: Card, metrics: dict[str, float]) -> list[Row]:
    """Formats those figures of a card that were measured."""
    rows = []
    for figure in card.figures:
        if figure.metric in metrics:
            value, baseline, label = figure.form.format(metrics[figure.metric]), "", ""
            if figure.baseline is not None:
                name, label = figure.baseline
                baseline = figure.form.format(metrics[name])
            rows.append(Row(figure.label, value, baseline, label))
    return rows


def examples_of(results: dict[str, Any]) -> list[dict[str, str]]:
    """Returns the examples among the results, each part of them as one line of text."""
    card = card_of(results)

    def text_of(part: str | list[str]) -> str:
        return ", ".join(" ".join(text.split()) for text in ([part] if isinstance(part, str) else part))

    examples = results.get(card.examples[0], ())
    return [{part: text_of(example[part]) for part in card.columns.values()} for example in examples]


def public_source(source: str, built_in: Collection[str] = tuple(_BUILT_IN)) -> str:
    """Describes a training source to others. Names of local files, which mean nothing to them, are left out.

    Args:
        source: a source, as in the setting `data`.
        built_in: names of the built-in data that the family can train on; for other families such a name is a file's.
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
    """Escapes any text as a cell of a Markdown table."""
    return re.sub(r"([\\`*_~$&|<>\[\]])", r"\\\1", " ".join(text.split()))


def _held_out_source(settings: dict[str, Any]) -> str | None:
    """Returns the source that `validation` names; None if it is a share of the training data."""
    try:
        float(settings["validation"])
    except ValueError:
        return settings["validation"]
    return None


def _language(settings: dict[str, Any], card: Card) -> str | None:
    given = settings.get("language")
    if given or card.source is None:
        return given
    built_in = any(source.partition(":")[0] == card.source for source in settings["data"])
    return _BUILT_IN[card.source][1] if built_in else None


def _base_model(settings: dict[str, Any]) -> str | None:
    """Returns the Hub id of the model that was fine-tuned; None if it is not from the Hub."""
    name = settings.get("model", "")
    try:
        # The name of a folder may look like an id, even when the folder is gone. A model from the Hub is in the cache.
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return name if isinstance(cached, str) and not Path(name).exists() else None


def _data_sets(settings: dict[str, Any]) -> list[str]:
    """Returns the ids of the data sets of the Hub that were trained on."""
    names = dict.fromkeys(source.partition(":")[0] for source in settings["data"])
    return list(filter(_is_hub_id, names))


def _metadata(results: dict[str, Any], config: Any, title: str, held_out: str) -> ModelCardData:
    card, metrics = card_of(results), results["metrics"]
    return ModelCardData(
        language=_language(results["settings"], card),
        library_name="transformers",
        tags=["regard", config.model_type],
        base_model=_base_model(results["settings"]),
        datasets=_data_sets(results["settings"]) or None,
        pipeline_tag=card.pipeline_tag,
        model_name=title,
        eval_results=[
            EvalResult(
                task_type=card.pipeline_tag,
                dataset_type="held-out",
                dataset_name=f"held-out {card.held_out} of {re.sub('`', '', held_out)}",
                metric_type=figure.hub[0],
                metric_name=figure.hub[1],
                # An error may be too small for four digits.
                metric_value=round(metrics[figure.metric], 4) or metrics[figure.metric],
            )
            for figure in card.figures
            # The Hub reads no infinity.
            if figure.hub is not None and math.isfinite(metrics.get(figure.metric, math.nan))
        ],
    )


def model_card(results: dict[str, Any], config: Any, title: str | None = None) -> ModelCard:
    """Makes the card of a trained model.

    Args:
        results: results of the run, as training and fine-tuning return them.
        config: configuration of the model.
        title: title of the card, and the model's name in its metadata; None: the name of its family or task.
    """
    card, settings = card_of(results), results["settings"]
    title = title or card.title
    built_in = [] if card.source is None else [card.source]
    sources = ", ".join(dict.fromkeys(public_source(source, built_in) for source in settings["data"]))
    other = _held_out_source(settings)
    held_out_source = None if other is None else public_source(other, built_in)
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
    content = environment.get_template(f"{card.template}.md").render(
        **results,
        card_data=_metadata(results, config, title, held_out_source or sources).to_yaml(),
        config=config,
        title=title,
        sources=sources,
        held_out=card.held_out,
        held_out_source=held_out_source,
        only_built_in=all(name.partition(":")[0] == card.source for name in names),
        figures=figure_rows(card, results["metrics"]),
        base_model=_base_model(settings),
        data_sets=_data_sets(settings),
        ours=family_of_type(config.model_type) is not None,
        caption=card.examples[1],
        columns=card.columns,
        examples=examples_of(results),
        prompt=prompt,
    )
    return ModelCard(content)


def write_card(folder: Path, results: dict[str, Any]) -> None:
    """Writes the card of a trained model beside it, as `README.md`."""
    model_card(results, AutoConfig.from_pretrained(folder)).save(folder / "README.md")
