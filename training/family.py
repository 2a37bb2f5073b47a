"""Training a model of any family: what a family has to say for itself, and the function that runs it."""

from __future__ import annotations

import logging
import os
import shutil
from abc import ABC, abstractmethod
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ..tokenization.generative import save_tokenizer
from .bad_records import skipped_records
from .loop import Loop, Outcome, Task, make_accelerator, steps_per_epoch
from .run import MODEL, TOKENIZER, load_results, open_run, save_results, save_settings
from .schedule import Budget
from .settings import TrainingSettings, to_dict

logger = logging.getLogger("regard.training")

Settings = TypeVar("Settings", bound=TrainingSettings)

# So many of the generated texts are kept with the results.
SHOWN = 5


class Family(ABC, Generic[Settings]):
    """What the training of one family differs in from another's.

    Attributes:
        name: of the family, as the command line has it.
        settings_class: the settings of its runs.
        default_steps: how long a run lasts if nothing is said.
    """

    name: ClassVar[str]
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
        """Loads a tokenizer or processor, from a folder or the Hub."""
        return AutoTokenizer.from_pretrained(path)

    @abstractmethod
    def make_task(
        self, settings: Settings, processor: Any, rows: Dataset, held_out: Dataset
    ) -> tuple[Task, dict[str, Any]]:
        """What `Loop` trains on, and what is to be told of the data."""

    @abstractmethod
    def try_out(self, settings: Settings, model: PreTrainedModel, processor: Any, held_out: Dataset) -> dict[str, Any]:
        """Lets the trained model do its work on held-out rows.

        Returns:
            Entries of the results. `metrics` among them are added to those of the last evaluation; `generated` are
            what it made of all rows that it was tried on.
        """


def train(
    family: Family[Settings], output: str | Path, settings: dict[str, Any] | None = None, *, resume: bool = False
) -> dict[str, Any]:
    """Trains a model on Accelerate, in as many processes as it is launched in.

    Args:
        family: of the model.
        output: folder of the run, see `run`.
        settings: fields of the family's settings by name.
        resume: go on with the run in `output`, or start it if there is none.

    Returns:
        What the run came to, as it is written to `results.json`.

    Raises:
        ValueError: for settings, data or a folder that won't do. Nothing is written before all are known to do.
    """
    folder = Path(output)
    chosen = open_run(folder, family.settings_class, family.name, settings or {}, resume)
    finished = load_results(folder)
    if finished is not None:
        logger.info("The run in %s has already ended.", folder)
        return finished
    # On the meta device a model costs nothing, and sizes that don't fit are refused before the data is read.
    with torch.device("meta"):
        family.make_model(chosen)
    accelerator = make_accelerator(chosen, folder)
    with accelerator.main_process_first():
        rows, held_out = family.load_data(chosen)
        task, processor, data = _prepare(family, folder, chosen, rows, held_out)
    set_seed(chosen.seed)
    model = family.make_model(chosen, processor)
    budget = Budget(chosen.steps, chosen.epochs, chosen.minutes)
    if budget == Budget():
        budget = Budget(steps=family.default_steps)
    if budget.minutes is not None:
        logger.info("The learning rate follows the clock, so this run can't be repeated to the bit.")
    try:
        outcome = Loop(task, model, chosen, budget, folder, accelerator).run(resume)
        model = accelerator.unwrap_model(model).eval()
        results = _results(family.name, chosen, model, data, outcome, accelerator)
        add_tried(results, family.try_out(chosen, model, processor, held_out))
        if "generated" in results:
            results["generated"] = results["generated"][:SHOWN]
        _save(accelerator, folder, model, results)
        return results
    finally:
        # Closes the trackers, and with them the process group.
        accelerator.end_training()


def add_tried(results: dict[str, Any], tried: dict[str, Any]) -> None:
    """Adds to results what `Family.try_out` gave."""
    metrics = results["metrics"] | tried.pop("metrics", {})
    results |= tried
    results["metrics"] = metrics


def _prepare(
    family: Family[Settings], folder: Path, settings: Settings, rows: Dataset, held_out: Dataset
) -> tuple[Task, Any, dict[str, Any]]:
    """Makes the task. In a new run, writes settings and processor once everything is known to do."""
    begun = (folder / TOKENIZER).exists()
    processor = family.load_processor(folder / TOKENIZER) if begun else family.make_processor(settings, rows)
    task, data = family.make_task(settings, processor, rows, held_out)
    if settings.bad_records == "skip":
        data["skipped_records"] = skipped_records(rows, held_out)
    steps_per_epoch(task.epoch(0), settings.batch_size)
    if not begun:
        save_settings(folder, family.name, settings)
        # Renamed in: a resumed run takes a tokenizer that is there to be whole.
        save_tokenizer(processor, folder / f"partial-{TOKENIZER}")
        os.replace(folder / f"partial-{TOKENIZER}", folder / TOKENIZER)
    return task, processor, data


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
        "versions": {
            name: version(name) for name in ("torch", "transformers", "accelerate", "datasets", "tokenizers")
        },
    }


def _save(accelerator: Accelerator, folder: Path, model: PreTrainedModel, results: dict[str, Any]) -> None:
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        model.save_pretrained(folder / MODEL)
        # As it was when the run began: using it has left its last padding and truncation in it.
        shutil.copytree(folder / TOKENIZER, folder / MODEL, dirs_exist_ok=True)
        save_results(folder, results)
    accelerator.wait_for_everyone()
