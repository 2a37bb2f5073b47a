"""Evaluating a trained model, on its run's held-out data or on other data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ...modeling.loading.load import load_part, model_path, naming_the_model
from ..loop.launch import make_accelerator
from ..loop.objective import evaluate
from ..reading.bad_records import skipped_records
from ..run.folder import SETTINGS_FILE
from ..run.settings import make_settings, require_source
from ..run.settings_file import read_yaml
from .recipes import TRAINABLE


def evaluate_model(
    model: str | Path, data: str | None = None, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Computes the metrics of a trained model, as at the end of training.

    Args:
        model: folder of a run or of a model, or a Hub id.
        data: source to evaluate on as a whole, such as training reads; None: the run's held-out data.
        settings: fields of the family's settings, by name, which override those of the run.

    Returns:
        The `family`, the `metrics`, facts about the `data`, and outputs of the model. Baselines come from the run's
        training data or, if the model has no run, from the data itself.

    Raises:
        ValueError: if the model can't be loaded or is of another family, or there is no data.
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
    recipe = TRAINABLE[name]
    if not is_run:
        if data is None:
            raise ValueError(f"`model` ({model}) is not a run, so it has no held-out data: name `data`")
        values = {"data": [data], **recipe.settings_of(config)}
    if data is not None:
        values["validation"] = data
    # The model is not sharded, as it is not prepared for training.
    fixed = {"log_with": ["none"], "sharding": "none"}
    chosen = make_settings(recipe.settings_class, {**values, **(settings or {}), **fixed})
    processor = recipe.load_processor(path)
    accelerator = make_accelerator(chosen, folder)
    # Prepared, so that it computes in the run's precision.
    network = accelerator.prepare_model(recipe.load_model(chosen, path), evaluation_mode=True)
    rows, held_out = recipe.load_data(chosen)
    objective, facts = recipe.make_objective(chosen, processor, rows, held_out)
    if chosen.bad_records == "skip":
        facts["skipped_records"] = skipped_records(rows, held_out)
    metrics = evaluate(objective, network, chosen, accelerator)
    outputs = recipe.sample_outputs(chosen, network, processor, held_out)
    metrics |= outputs.pop("metrics", {})
    return {"family": name, "metrics": metrics, "data": facts, **outputs}
