"""Training a model of any family: one run, from its settings to its results."""

from __future__ import annotations

import logging
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from datasets import Dataset
from transformers import PreTrainedModel

from ...modeling.loading.load import MODEL
from ...tokenization.generative import save_tokenizer
from ..loop.launch import drain, make_accelerator, rank_ordered
from ..loop.loop import Loop, Outcome, steps_per_epoch
from ..loop.objective import Objective
from ..loop.run_keeper import CHECKPOINTS
from ..loop.schedule import Budget
from ..loop.sharding import gather_model
from ..reading.bad_records import skipped_records
from ..run.checkpoints import latest_step
from ..run.files import PARTIAL, delete_leftovers, rename_in
from ..run.fingerprint import RunFingerprint, package_versions
from ..run.folder import (
    RESULTS_FILE,
    TOKENIZER,
    load_results,
    load_settings,
    open_run,
    save_results,
    save_settings,
    setting_changes,
    writing,
)
from ..run.settings import TrainingSettings, to_dict
from .base import Recipe, Settings

logger = logging.getLogger("regard.training")

# The results keep this many of the generated texts.
SHOWN = 5


def train(
    recipe: Recipe[Settings],
    output: str | Path,
    settings: dict[str, Any] | None = None,
    *,
    resume: bool = False,
    accept_changes: bool = False,
) -> dict[str, Any]:
    """Trains a model on Accelerate, in as many processes as are launched.

    Args:
        recipe: recipe of the model's family.
        output: folder of the run; `training.run.folder` describes its content.
        settings: fields of the recipe's settings, by name.
        resume: whether to go on with the run in `output`, or start it if there is none.
        accept_changes: whether to go on even if settings, data, tokenizer or model differ from those that the run
            began with.

    Returns:
        The results of the run, as they are written to `results.json`.

    Raises:
        ValueError: for invalid settings, data or folder. Nothing is written before all of them are known to be valid.
        FloatingPointError: if losses, gradients or weights are not finite.
        OSError: if something can't be written.
        SystemExit: after SIGINT or SIGTERM, with 128 plus the signal's number, once a checkpoint is saved.
    """
    folder = Path(output)
    chosen = open_run(folder, recipe.settings_class, recipe.name, settings or {}, resume, accept_changes)
    finished = _finished_results(recipe, folder, chosen)
    if finished is not None:
        return finished
    # On the meta device a model costs nothing, and sizes that don't fit are refused before the data is read.
    with torch.device("meta"):
        recipe.make_model(chosen)
    accelerator = make_accelerator(chosen, folder)
    with rank_ordered(accelerator):
        if not (accelerator.is_main_process or (folder / TOKENIZER).exists()):
            raise ValueError(
                f"`output` ({folder}) must be on a disk that all machines share: {gethostname()} lacks it"
            )
        rows, held_out = recipe.load_data(chosen)
        objective, processor, data = _prepare(recipe, folder, chosen, rows, held_out, accept_changes)
    set_seed(chosen.seed)
    model = recipe.make_model(chosen, processor)
    try:
        loop = Loop(objective, model, chosen, _budget(recipe, chosen), folder, accelerator)
        outcome = loop.run(resume)
        model = gather_model(loop.model, accelerator).eval()
        results = _results(recipe.name, folder, chosen, model, data, outcome, accelerator)
        with rank_ordered(accelerator):
            if accelerator.is_main_process:
                outputs = recipe.sample_outputs(chosen, model, processor, held_out)
                results["metrics"] |= outputs.pop("metrics", {})
                results |= outputs
                if "generated" in results:
                    results["generated"] = results["generated"][:SHOWN]
        results = broadcast_object_list([results])[0]
        _save(accelerator, folder, model, results)
        return results
    finally:
        if accelerator.num_processes > 1:
            drain()
        # Closes the trackers, and with them the process group.
        accelerator.end_training()


def _finished_results(recipe: Recipe[Settings], folder: Path, settings: Settings) -> dict[str, Any] | None:
    """The results of a run that has ended; None if it has not."""
    finished = load_results(folder)
    if finished is None:
        return None
    if setting_changes(load_settings(folder, recipe.settings_class), settings):
        raise ValueError(
            f"the run in {folder} has already ended, and can't go on with other settings: without its "
            f"{RESULTS_FILE} it goes on from its last checkpoint"
        )
    logger.info("The run in %s has already ended.", folder)
    return finished


def _budget(recipe: Recipe[Settings], settings: Settings) -> Budget:
    budget = Budget(settings.steps, settings.epochs, settings.minutes)
    if budget == Budget():
        return Budget(steps=recipe.default_steps)
    if budget.minutes is not None:
        logger.info("The learning rate follows the clock, so this run can't be repeated to the bit.")
    return budget


def _prepare(
    recipe: Recipe[Settings],
    folder: Path,
    settings: Settings,
    rows: Dataset,
    held_out: Dataset,
    accept_changes: bool,
) -> tuple[Objective, Any, dict[str, Any]]:
    """Makes the objective, and begins the run in its folder, or compares it with the run that has begun there.

    Returns:
        The objective, the tokenizer or processor, and the facts about the data that go into the results.

    Raises:
        ValueError: if the data is too small, or differs from that of the run.
    """
    # The tokenizer is written last when a run begins.
    has_begun = (folder / TOKENIZER).exists()
    processor = recipe.load_processor(folder / TOKENIZER) if has_begun else recipe.make_processor(settings, rows)
    objective, data = recipe.make_objective(settings, processor, rows, held_out)
    if settings.bad_records == "skip":
        data["skipped_records"] = skipped_records(rows, held_out)
    steps_per_epoch(objective.epoch(0), settings.batch_size)
    with torch.device("meta"):
        config = recipe.make_model(settings, processor).config
    if has_begun:
        now = RunFingerprint.take(rows, held_out, folder / TOKENIZER, config)
        _require_same_run(recipe, folder, settings, now, accept_changes)
    else:
        with writing("the beginning of the run", folder):
            save_settings(folder, recipe.name, settings)
            partial = folder / f"{PARTIAL}{TOKENIZER}"
            delete_leftovers(folder, PARTIAL, TOKENIZER)
            save_tokenizer(processor, partial)
            RunFingerprint.take(rows, held_out, partial, config).save(folder)
            rename_in(partial, folder / TOKENIZER)
    return objective, processor, data


def _require_same_run(
    recipe: Recipe[Settings], folder: Path, settings: Settings, now: RunFingerprint, accept_changes: bool
) -> None:
    """Compares a run with its beginning. Changes are refused, or recorded if they are accepted."""
    saved = RunFingerprint.load(folder)
    # Early versions did not save a fingerprint.
    begun = saved or now
    versions = begun.version_changes(now)
    if versions:
        logger.warning("The run began with other versions, and may not go on to the bit: %s.", "; ".join(versions))
    found = begun.changes(now)
    if found and not accept_changes:
        raise ValueError(
            f"the run in {folder} can't go on after these changes (`accept_changes` allows it): " + "; ".join(found)
        )
    found = setting_changes(load_settings(folder, recipe.settings_class), settings) + found
    accepted = begun.accepted or []
    if found:
        step = latest_step(folder / CHECKPOINTS)
        logger.warning("The run goes on from step %d with what it did not begin with: %s.", step, "; ".join(found))
        accepted = [*accepted, {"step": step, "changes": found}]
    if found or saved is None:
        with writing("the changes to the run", folder):
            # The record first: without it the run would seem to have begun with these settings.
            replace(now, versions=begun.versions, accepted=accepted).save(folder)
            save_settings(folder, recipe.name, settings)


def _results(
    name: str,
    folder: Path,
    settings: TrainingSettings,
    model: PreTrainedModel,
    data: dict[str, Any],
    outcome: Outcome,
    accelerator: Accelerator,
) -> dict[str, Any]:
    results = {
        "family": name,
        "architecture": type(model).__name__,
        "parameters": model.num_parameters(),
        "metrics": dict(outcome.metrics),
        **asdict(outcome.progress),
        "processes": outcome.processes,
        "device": accelerator.device.type,
        "data": data,
        "settings": to_dict(settings),
        "versions": package_versions(),
    }
    fingerprint = RunFingerprint.load(folder)
    if fingerprint and fingerprint.accepted:
        results["accepted_changes"] = fingerprint.accepted
    return results


def _save(accelerator: Accelerator, folder: Path, model: PreTrainedModel, results: dict[str, Any]) -> None:
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        partial = folder / f"{PARTIAL}{MODEL}"
        with writing("the trained model", folder):
            delete_leftovers(folder, PARTIAL)
            model.save_pretrained(partial)
            # As it was when the run began: in use, a tokenizer keeps its last padding and truncation.
            shutil.copytree(folder / TOKENIZER, partial, dirs_exist_ok=True)
            rename_in(partial, folder / MODEL)
        with writing("the results", folder):
            save_results(folder, results)
    accelerator.wait_for_everyone()
