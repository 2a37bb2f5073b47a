"""Evaluating a trained model, on what its run held out or on other data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ...modeling.loading.load import load_part, model_path, naming_the_model
from ..loop.loop import make_accelerator
from ..loop.objective import evaluate
from ..reading.bad_records import skipped_records
from ..run.folder import SETTINGS_FILE
from ..run.settings import make_settings, require_source
from ..run.settings_file import read_yaml
from .base import add_tried
from .registry import TRAINABLE


def evaluate_model(
    model: str | Path, data: str | None = None, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Computes the figures that training ends with.

    Args:
        model: folder of a run or of a model, or a Hub id.
        data: what to evaluate on, a source like those of training, whole; None: what the run held out.
        settings: fields of the family's settings, by name, that go before those of the run.

    Returns:
        The `family`, the `metrics`, what there is to be told of the `data`, and what the model made of it. Baselines
        are those of the run's training data, or else of the data itself.

    Raises:
        ValueError: if there is no such model, it is of no family here, or there is no data.
    """
    if data is not None:
        require_source(data)
    folder, path = Path(model), model_path(model)
    is_run = (folder / SETTINGS_FILE).is_file()
    if is_run:
        values = read_yaml(folder / SETTINGS_FILE)
        kind = f"regard_{values.pop('family', None)}"
    else:
        with naming_the_model("model", model, path):
            config = load_part(AutoConfig, path, f"`model` ({model})")
        kind = config.model_type
    name = kind.removeprefix("regard_")
    if kind == name or name not in TRAINABLE:
        raise ValueError(f"`model` ({model}) is a {kind!r}, none of {', '.join(TRAINABLE)}")
    family = TRAINABLE[name]
    if not is_run:
        if data is None:
            raise ValueError(f"`model` ({model}) is no run, whose held-out data is known: name `data`")
        values = {"data": [data], **family.settings_of(config)}
    if data is not None:
        values["validation"] = data
    # Not prepared for training, a model is whole in each process.
    fixed = {"log_with": ["none"], "sharding": "none"}
    chosen = make_settings(family.settings_class, {**values, **(settings or {}), **fixed})
    processor = family.load_processor(path)
    accelerator = make_accelerator(chosen, folder)
    # Prepared, so that the precision is the run's.
    network = accelerator.prepare_model(family.load_model(chosen, path), evaluation_mode=True)
    rows, held_out = family.load_data(chosen)
    task, told = family.make_objective(chosen, processor, rows, held_out)
    if chosen.bad_records == "skip":
        told["skipped_records"] = skipped_records(rows, held_out)
    results = {"family": name, "metrics": evaluate(task, network, chosen, accelerator), "data": told}
    add_tried(results, family.try_out(chosen, network, processor, held_out))
    return results
