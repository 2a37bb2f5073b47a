"""Loading a trained model with what prepares its inputs, and the names of the files that are drawn."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer, TrOCRProcessor

from .modeling.loading.load import POOLER, load_model, load_part, model_path, naming_the_model

PICTURES = (".png", ".svg", ".pdf")


def load_network(model: str | Path, choose: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Loads a model for evaluation, and its tokenizer, its image processor, or both in one.

    Args:
        model: folder of a run or of a model, or a Hub id.
        choose: gives for a configuration the class, or Auto class, that the model is loaded with.

    Raises:
        ValueError: if there is no such model, or `choose` will not have it.
    """
    path, label = model_path(model), f"`model` ({model})"
    with naming_the_model("model", model, path):
        network = load_model(choose(load_part(AutoConfig, path, label)), path, label, POOLER).eval()
        sees = network.main_input_name == "pixel_values"
        if not (hasattr(network, "get_text_features") or (sees and network.can_generate())):
            return network, load_part(AutoImageProcessor if sees else AutoTokenizer, path, label)
        processor = load_part(AutoProcessor, path, label)
        if not hasattr(processor, "image_processor"):
            # Of a stock captioner the two are often saved apart. This one takes any.
            processor = TrOCRProcessor(
                load_part(AutoImageProcessor, path, label), load_part(AutoTokenizer, path, label)
            )
        return network, processor


def require_file_name(output: str | Path) -> None:
    """Refuses the name of a file that can't be written, before there is any work.

    Raises:
        ValueError: if it is that of a folder, or the folder that it is to be in is not there.
    """
    if os.path.isdir(output):
        raise ValueError(f"`output` ({output}) must be a file: there is a folder of that name")
    parent = os.path.dirname(output)
    if not os.path.isdir(parent or os.curdir):
        raise ValueError(f"`output` ({output}) must be in a folder that is there: {parent} is none")


def require_ending(output: str | Path, endings: tuple[str, ...] = PICTURES) -> None:
    """Refuses the name of a picture that can't be written, before there is any work.

    Raises:
        ValueError: if it has none of the endings; see also `require_file_name`.
    """
    if Path(output).suffix not in endings:
        raise ValueError(f"`output` ({output}) must end with {', '.join(endings[:-1])} or {endings[-1]}")
    require_file_name(output)
