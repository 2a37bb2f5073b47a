"""Training a model and describing it: what `regard train` does.

`train_bert`, `train_decoder` and so on are `train_model` for the family of that name:
`train_bert("runs/mine", {"steps": 100})` is `train_model("bert", "runs/mine", {"steps": 100})`.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState

from ..modeling.loading.load import MODEL
from ..sharing.cards import card_of, examples_of, figure_rows, write_card
from ..training.families.registry import TRAINABLE
from ..training.families.train import train

logger = logging.getLogger(__name__)


def train_model(
    family: str,
    output: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    *,
    resume: bool = False,
    accept_changes: bool = False,
) -> dict[str, Any]:
    """Trains a model, writes its model card and logs what came out.

    The other arguments, the result and the errors are those of `training.family.train`.

    Args:
        family: name of the model's family.
        output: folder of the run; `runs/` and the family's name if None.
        settings: fields of the family's settings by name.
        resume: go on with the run in `output`, or start it if there is none.
        accept_changes: go on though settings, data, tokenizer or model are not those that the run began with.

    Raises:
        ValueError: if there is no such family.
    """
    if family not in TRAINABLE:
        raise ValueError(f"`family` ({family!r}) must be one of {', '.join(TRAINABLE)}")
    folder = Path("runs", family) if output is None else Path(output)
    results = train(TRAINABLE[family], folder, settings, resume=resume, accept_changes=accept_changes)
    describe(results, folder / MODEL)
    return results


train_bert = partial(train_model, "bert")
train_decoder = partial(train_model, "decoder")
train_transformer = partial(train_model, "transformer")
train_recurrent = partial(train_model, "recurrent")
train_captioner = partial(train_model, "captioner")
for _function in (train_bert, train_decoder, train_transformer, train_recurrent, train_captioner):
    _function.__doc__ = f"Trains a model of the family {_function.args[0]!r}: see `train_model` for the arguments."


def describe(results: dict[str, Any], model: Path) -> None:
    """Writes the card of a model that was trained or fine-tuned, and logs what came out; the first process alone does.

    Args:
        results: of the run.
        model: folder of the model.
    """
    if PartialState().is_main_process:
        # The card of a run that had ended before may have been edited since.
        if not (model / "README.md").exists():
            write_card(model, results)
        logger.info("%s", summary(results, model))


def summary(results: dict[str, Any], model: Path) -> str:
    """What a run came to, for people: time, figures and examples, and the line that loads the model."""
    if "task" in results:
        epochs = f"{results['epoch']:g} epoch{'' if results['epoch'] == 1 else 's'}"
        done = f"Fine-tuned for {results['step']:,} steps, {epochs},"
    else:
        done = f"Trained for {results['step']:,} steps, {results['tokens']:,} tokens,"
    imports = "regard, transformers" if results["architecture"].startswith("Regard") else "transformers"
    auto_class = card_of(results).auto_class
    lines = [
        "",
        f"{done} in {results['seconds']:,.0f} seconds.",
        "",
        *figure_lines(results),
        "",
        "To load it, in Python:",
        f"  import {imports}; model = transformers.{auto_class}.from_pretrained({str(model)!r})",
    ]
    return "\n".join(lines)


def figure_lines(results: dict[str, Any]) -> list[str]:
    """The figures of a run or an evaluation beside their baselines, and the examples, for people.

    Args:
        results: what `training.family.train`, `training.finetune.finetune` or `training.evaluation.evaluate_model`
            gave.
    """
    card = card_of(results)
    rows = figure_rows(card, results["metrics"])
    width = max(len(row.label) for row in rows)
    baseline = "   baseline" if any(row.baseline for row in rows) else ""
    lines = [f"{f'On held-out {card.held_out}':{width + 2}}       model{baseline}"]
    for row in rows:
        lines.append(f"  {row.label:{width}}  {row.value:>10} {row.baseline:>10}  {row.baseline_label}".rstrip())
    examples = examples_of(results)
    if examples:
        lines += ["", f"{card.examples[1]}:"]
        lines += [line for example in examples for line in card.line.format(**example).splitlines()]
    return lines
