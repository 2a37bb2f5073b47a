"""Training a model and describing the results: what `regard train` does.

`train_bert`, `train_decoder` and so on are `train_model` for the family of that name:
`train_bert("runs/mine", {"steps": 100})` is `train_model("bert", "runs/mine", {"steps": 100})`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from accelerate import PartialState

from ..families.registry import FAMILIES
from ..modeling.loading.load import MODEL
from ..sharing.cards import card_of, examples_of, figure_rows, write_card
from ..training.families.recipes import recipe_of
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
    """Trains a model, writes its model card and logs the results.

    Args:
        family: name of the model's family.
        output: folder of the run; `runs/` and the family's name if None.
        settings: fields of the family's settings by name.
        resume: continue the run in `output`, or start it if the folder has none.
        accept_changes: continue although settings, data, tokenizer or model differ from those that the run began
            with.

    Returns:
        The results of the run, as `results.json` holds them.

    Raises:
        ValueError: if there is no such family, or its settings, data or folder can't be used.
        FloatingPointError: if losses or gradients are not finite.
        OSError: if a file can't be written.
        SystemExit: after SIGINT or SIGTERM, once a checkpoint is saved.
    """
    recipe = recipe_of(family)
    folder = Path("runs", family) if output is None else Path(output)
    results = train(recipe, folder, settings, resume=resume, accept_changes=accept_changes)
    describe(results, folder / MODEL)
    return results


@cache
def _train_function(family: str) -> Callable[..., dict[str, Any]]:
    function = partial(train_model, family)
    function.__doc__ = f"Trains a model of the family {family!r}. Its other arguments are those of `train_model`."
    return function


def __getattr__(name: str) -> Any:
    family = name.removeprefix("train_")
    if family == name or family not in FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _train_function(family)


def describe(results: dict[str, Any], model: Path) -> None:
    """Writes the card of a model that was trained or fine-tuned, and logs the results, in the first process alone.

    Args:
        results: results of the run.
        model: folder of the model.
    """
    if PartialState().is_main_process:
        # If the run had ended before, its card may have been edited since.
        if not (model / "README.md").exists():
            write_card(model, results)
        logger.info("%s", summary(results, model))


def summary(results: dict[str, Any], model: Path) -> str:
    """Describes the results of a run: time, figures and examples, and the line that loads the model."""
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
    """Describes the figures of a run or an evaluation beside their baselines, and the examples.

    Args:
        results: returned by training, fine-tuning or evaluation.
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
