"""Model cards: what a model is, how it was trained, and the figures that were measured."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoConfig

from .. import model_cards

_DATA_SET_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def public_source(source: str) -> str:
    """The name of a training source that means something to others: local files are not named."""
    if source.partition(":")[0] == "python-docs":
        return f"the documentation in Python's standard library (`{source}`)"
    name = source.partition(":")[0]
    if _DATA_SET_ID.fullmatch(name) and not Path(name).exists():
        return f"the data set `{source}`"
    return "local files"


def _cell(text: str) -> str:
    """Text as a cell of a Markdown table, whatever it holds."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))


def bert_card(results: dict[str, Any], config: Any, title: str = "BERT") -> ModelCard:
    """Makes the card of a pretrained BERT.

    Args:
        results: what the run came to, see `training.bert.pretrain_bert`.
        config: the model's configuration.
        title: of the card, and the model's name in its metadata.
    """
    settings, metrics = results["settings"], results["metrics"]
    sources = list(dict.fromkeys(map(public_source, settings["data"])))
    data_name = re.sub("`", "", ", ".join(sources))
    measured = {"accuracy": metrics["masked_accuracy"], "cross_entropy": metrics["masked_loss"]}
    metadata = ModelCardData(
        language=settings["language"],
        library_name="transformers",
        tags=["regard", config.model_type],
        pipeline_tag="fill-mask",
        model_name=title,
        eval_results=[
            EvalResult(
                task_type="fill-mask",
                dataset_type="held-out",
                dataset_name=f"held-out documents of {data_name}",
                metric_type=name,
                metric_name=f"masked token {name.replace('_', '-')}",
                metric_value=round(value, 4),
            )
            for name, value in measured.items()
        ],
    )
    filled = [
        {
            "text": _cell(example["text"]),
            "word": _cell(example["word"]),
            "guesses": ", ".join(map(_cell, example["guesses"])),
        }
        for example in results["filled"]
    ]
    prompt = results["filled"][0]["text"] if filled else "... [MASK] ..."
    template = files(model_cards).joinpath("bert.md").read_text(encoding="utf-8")
    values = {**results, "filled": filled, "config": config, "title": title, "sources": ", ".join(sources)}
    return ModelCard.from_template(metadata, template_str=template, prompt=repr(prompt), **values)


def write_card(folder: Path, results: dict[str, Any]) -> None:
    """Writes the card of a trained model beside it, as `README.md`."""
    bert_card(results, AutoConfig.from_pretrained(folder)).save(folder / "README.md")
