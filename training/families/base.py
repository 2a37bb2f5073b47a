"""Training a model of any family: what a family has to say for itself, and the function that runs it."""

from __future__ import annotations

import logging
import shutil
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from socket import gethostname
from typing import Any, ClassVar, Generic, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ...modeling.loading.load import MODEL, load_part
from ...tokenization.generative import save_tokenizer
from ..loop.distributed import drain, gather, rank_ordered
from ..loop.loop import CHECKPOINTS, Loop, Outcome, make_accelerator, steps_per_epoch
from ..loop.objective import Objective
from ..loop.schedule import Budget
from ..reading.bad_records import skipped_records
from ..run.checkpoints import latest_step
from ..run.files import PARTIAL, delete_leftovers, rename_in
from ..run.fingerprint import changes, describe_origin, load_origin, package_versions, save_origin, version_changes
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
from .tokenizers import require_special_tokens

logger = logging.getLogger("regard.training")

Settings = TypeVar("Settings", bound=TrainingSettings)

# So many of the generated texts are kept with the results.
SHOWN = 5


class Recipe(ABC, Generic[Settings]):
    """What the training of one family differs in from another's.

    Attributes:
        name: of the family, as the command line has it.
        settings_class: the settings of its runs.
        default_steps: how long a run lasts if nothing is said.
        special_tokens: that its tokenizers must have.
        processor_class: the Auto class that loads what prepares its inputs.
        planned: names of its own settings that change what a run takes in memory or time.
    """

    name: ClassVar[str]
    planned: ClassVar[tuple[str, ...]] = ()
    special_tokens: ClassVar[tuple[str, ...]] = ()
    processor_class: ClassVar[Any] = AutoTokenizer
    settings_class: type[Settings]
    default_steps: int

    @abstractmethod
    def make_model(self, settings: Settings, processor: Any = None) -> PreTrainedModel:
        """Builds the model, for the tokenizer or processor if it is there yet.

        Raises:
            ValueError: if sizes do not fit together.
        """

    @abstractmethod
    def load_model(self, settings: Settings, path: str) -> PreTrainedModel:
        """Loads a trained model of the family, from a folder or the Hub."""

    def settings_of(self, config: PreTrainedConfig) -> dict[str, Any]:
        """The settings, by name, that a trained model asks for by itself."""
        return {}

    @abstractmethod
    def load_data(self, settings: Settings) -> tuple[Dataset, Dataset]:
        """The training rows and the held-out ones."""

    @abstractmethod
    def make_processor(self, settings: Settings, rows: Dataset) -> Any:
        """The tokenizer or processor that the settings name, or one made from the training rows."""

    def load_processor(self, path: str | Path) -> Any:
        """Loads a tokenizer or processor, from a folder or the Hub.

        Raises:
            ValueError: if it can't be loaded, or lacks a special token that is needed.
        """
        label = f"`model` ({path})"
        processor = load_part(self.processor_class, path, label)
        require_special_tokens(getattr(processor, "tokenizer", processor), self.special_tokens, label)
        return processor

    @abstractmethod
    def make_objective(
        self, settings: Settings, processor: Any, rows: Dataset, held_out: Dataset
    ) -> tuple[Objective, dict[str, Any]]:
        """What `Loop` trains on, and what is to be told of the data."""

    @abstractmethod
    def try_out(self, settings: Settings, model: PreTrainedModel, processor: Any, held_out: Dataset) -> dict[str, Any]:
        """Lets the trained model do its work on held-out rows.

        Returns:
            Entries of the results. `metrics` among them are added to those of the last evaluation; `generated` are
            what it made of all rows that it was tried on.
        """

    @abstractmethod
    def synthetic_batch(self, settings: Settings, config: Any, rows: int) -> tuple[dict[str, Any], int]:
        """Makes a batch of random tokens and images, in which every example is as long as the settings allow.

        Args:
            settings: settings of the run, with the seed of the batch.
            config: configuration of the model.
            rows: number of examples.

        Returns:
            The arguments of the model, and the number of tokens as training counts them.

        Raises:
            ValueError: if the examples are too short to predict anything.
        """


def train(
    family: Recipe[Settings],
    output: str | Path,
    settings: dict[str, Any] | None = None,
    *,
    resume: bool = False,
    accept_changes: bool = False,
) -> dict[str, Any]:
    """Trains a model on Accelerate, in as many processes as it is launched in.

    Args:
        family: of the model.
        output: folder of the run, see `run`.
        settings: fields of the family's settings by name.
        resume: go on with the run in `output`, or start it if there is none.
        accept_changes: go on though settings, data, tokenizer or model are not those that the run began with.

    Returns:
        What the run came to, as it is written to `results.json`.

    Raises:
        ValueError: for settings, data or a folder that won't do. Nothing is written before all are known to do.
        FloatingPointError: if the training comes to numbers that are not finite.
        OSError: if something can't be written.
        SystemExit: after SIGINT or SIGTERM, with 128 and the signal's number, once a checkpoint is saved.
    """
    folder = Path(output)
    chosen = open_run(folder, family.settings_class, family.name, settings or {}, resume, accept_changes)
    finished = load_results(folder)
    if finished is not None:
        if setting_changes(load_settings(folder, family.settings_class), chosen):
            raise ValueError(
                f"the run in {folder} has already ended, and can't go on with other settings: without its "
                f"{RESULTS_FILE} it goes on from its last checkpoint"
            )
        logger.info("The run in %s has already ended.", folder)
        return finished
    # On the meta device a model costs nothing, and sizes that don't fit are refused before the data is read.
    with torch.device("meta"):
        family.make_model(chosen)
    accelerator = make_accelerator(chosen, folder)
    with rank_ordered(accelerator):
        if not (accelerator.is_main_process or (folder / TOKENIZER).exists()):
            raise ValueError(
                f"`output` ({folder}) must be on a disk that all machines share: {gethostname()} lacks it"
            )
        rows, held_out = family.load_data(chosen)
        task, processor, data = _prepare(family, folder, chosen, rows, held_out, accept_changes)
    set_seed(chosen.seed)
    model = family.make_model(chosen, processor)
    budget = Budget(chosen.steps, chosen.epochs, chosen.minutes)
    if budget == Budget():
        budget = Budget(steps=family.default_steps)
    if budget.minutes is not None:
        logger.info("The learning rate follows the clock, so this run can't be repeated to the bit.")
    try:
        loop = Loop(task, model, chosen, budget, folder, accelerator)
        outcome = loop.run(resume)
        model = gather(loop.model, accelerator).eval()
        results = _results(family.name, chosen, model, data, outcome, accelerator)
        accepted = (load_origin(folder) or {}).get("accepted")
        if accepted:
            results["accepted_changes"] = accepted
        with rank_ordered(accelerator):
            if accelerator.is_main_process:
                add_tried(results, family.try_out(chosen, model, processor, held_out))
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


def add_tried(results: dict[str, Any], tried: dict[str, Any]) -> None:
    """Adds to results what `Recipe.try_out` gave."""
    metrics = results["metrics"] | tried.pop("metrics", {})
    results |= tried
    results["metrics"] = metrics


def _prepare(
    family: Recipe[Settings],
    folder: Path,
    settings: Settings,
    rows: Dataset,
    held_out: Dataset,
    accept_changes: bool,
) -> tuple[Objective, Any, dict[str, Any]]:
    """Makes the task. In a new run, writes settings and processor once everything is known to do.

    Raises:
        ValueError: if the run began with something else.
    """
    begun = (folder / TOKENIZER).exists()
    processor = family.load_processor(folder / TOKENIZER) if begun else family.make_processor(settings, rows)
    task, data = family.make_objective(settings, processor, rows, held_out)
    if settings.bad_records == "skip":
        data["skipped_records"] = skipped_records(rows, held_out)
    steps_per_epoch(task.epoch(0), settings.batch_size)
    with torch.device("meta"):
        config = family.make_model(settings, processor).config
    if begun:
        origin = describe_origin(rows, held_out, folder / TOKENIZER, config)
        _require_the_same(family, folder, settings, origin, accept_changes)
    else:
        with writing("the beginning of the run", folder):
            save_settings(folder, family.name, settings)
            # Renamed in, and last: a run whose tokenizer is there has begun.
            partial = folder / f"{PARTIAL}{TOKENIZER}"
            delete_leftovers(folder, PARTIAL, TOKENIZER)
            save_tokenizer(processor, partial)
            save_origin(folder, describe_origin(rows, held_out, partial, config))
            rename_in(partial, folder / TOKENIZER)
    return task, processor, data


def _require_the_same(
    family: Recipe[Settings], folder: Path, settings: Settings, origin: dict[str, Any], accept_changes: bool
) -> None:
    """Checks that a run goes on with what it began with; what is accepted instead is recorded."""
    begun = load_origin(folder)
    if begun is None:
        # Of a version that did not write it.
        begun = origin
    versions = version_changes(begun, origin)
    if versions:
        logger.warning("The run began with other versions, and may not go on to the bit: %s.", "; ".join(versions))
    found = changes(begun, origin)
    if found and not accept_changes:
        raise ValueError(
            f"the run in {folder} can't go on with something else than it began with (`accept_changes` lets it): "
            + "; ".join(found)
        )
    found = setting_changes(load_settings(folder, family.settings_class), settings) + found
    accepted = begun.get("accepted", [])
    if found:
        step = latest_step(folder / CHECKPOINTS)
        logger.warning("The run goes on from step %d with what it did not begin with: %s.", step, "; ".join(found))
        accepted = [*accepted, {"step": step, "changes": found}]
    if found or load_origin(folder) is None:
        with writing("what the run goes on with", folder):
            # The record first: without it the settings would seem to have been so from the beginning.
            save_origin(folder, {**origin, "versions": begun["versions"], "accepted": accepted})
            save_settings(folder, family.name, settings)


def _results(
    name: str,
    settings: TrainingSettings,
    model: PreTrainedModel,
    data: dict[str, Any],
    outcome: Outcome,
    accelerator: Accelerator,
) -> dict[str, Any]:
    return {
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


def _save(accelerator: Accelerator, folder: Path, model: PreTrainedModel, results: dict[str, Any]) -> None:
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        partial = folder / f"{PARTIAL}{MODEL}"
        with writing("the trained model", folder):
            delete_leftovers(folder, PARTIAL)
            model.save_pretrained(partial)
            # As it was when the run began: using it has left its last padding and truncation in it.
            shutil.copytree(folder / TOKENIZER, partial, dirs_exist_ok=True)
            rename_in(partial, folder / MODEL)
        with writing("the results", folder):
            save_results(folder, results)
    accelerator.wait_for_everyone()
