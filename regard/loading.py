"""Loading of a trained model with its tokenizer or processor, and checks of the names of output files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    TrOCRProcessor,
)

from .families.registry import FAMILIES, family_of_type
from .modeling.bert import RegardBertModel
from .modeling.loading.load import POOLER, load_model, load_part, model_path, naming_the_model

PICTURES = (".png", ".svg", ".pdf")
_GENERATING = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")


def load_network(model: str | Path, choose: Callable[[PreTrainedConfig], Any]) -> tuple[Any, Any]:
    """Loads a model in evaluation mode, and its tokenizer, its image processor, or a processor that holds both.

    Args:
        model: folder of a run or of a model, or a Hub id.
        choose: returns the class, or the Auto class, that loads the model of a configuration: one of the functions
            `for_...` of this module.

    Raises:
        ValueError: if there is no such model, or `choose` refuses it.
    """
    path, label = model_path(model), f"`model` ({model})"
    with naming_the_model("model", model, path):
        config = load_part(AutoConfig, path, label)
        try:
            model_class = choose(config)
        except ValueError as error:
            raise ValueError(f"{label} {error}") from None
        network = load_model(model_class, path, label, POOLER).eval()
        sees = network.main_input_name == "pixel_values"
        if not (hasattr(network, "get_text_features") or (sees and network.can_generate())):
            return network, load_part(AutoImageProcessor if sees else AutoTokenizer, path, label)
        processor = load_part(AutoProcessor, path, label)
        if not hasattr(processor, "image_processor"):
            # A stock captioner's tokenizer and image processor are often saved apart; this class joins any two.
            processor = TrOCRProcessor(
                load_part(AutoImageProcessor, path, label), load_part(AutoTokenizer, path, label)
            )
        return network, processor


def for_attention(config: PreTrainedConfig) -> Any:
    """Chooses the Auto class whose models return attention weights."""
    if not config.is_encoder_decoder:
        return transformers.AutoModel
    # Without a given target, the model has to generate one.
    captions = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if captions else transformers.AutoModelForSeq2SeqLM


def for_filling(config: PreTrainedConfig) -> Any:
    """Chooses the Auto class whose models predict masked tokens."""
    return transformers.AutoModelForMaskedLM


def for_prediction(config: PreTrainedConfig) -> Any:
    """Chooses the Auto class of models with the output layer that the model was trained with."""
    return getattr(transformers, predicting_class(config))


def predicting_class(config: PreTrainedConfig) -> str:
    """Returns the name of the Auto class that `for_prediction` chooses."""

    def ends(*endings: str) -> bool:
        return any(name.endswith(endings) for name in config.architectures or ())

    generator = _generating_class(config.model_type)
    if generator is not None:
        return generator
    if config.is_encoder_decoder:
        return "AutoModelForSeq2SeqLM"
    if ends("ForSequenceClassification"):
        return "AutoModelForSequenceClassification"
    return "AutoModelForMaskedLM" if ends("ForMaskedLM", "ForPreTraining", "BertModel") else "AutoModelForCausalLM"


def _generating_class(model_type: str) -> str | None:
    family = family_of_type(model_type)
    return None if family is None else next((name for name in _GENERATING if name in family.models), None)


def for_generation(config: PreTrainedConfig) -> Any:
    """Chooses the Auto class whose models generate.

    Raises:
        ValueError: if the model belongs to no family of regard that generates.
    """
    name = _generating_class(config.model_type)
    if name is None:
        types = (family.model_type for family in FAMILIES.values())
        generate = ", ".join(model_type for model_type in types if _generating_class(model_type))
        raise ValueError(f"is a {config.model_type!r}, but only {generate} generate")
    return getattr(transformers, name)


def for_steps(config: PreTrainedConfig) -> Any:
    """Chooses the class for inspecting the steps of the computation: regard's own class, also for a stock BERT.

    Raises:
        ValueError: if the model belongs to no family of regard and is not a BERT.
    """
    if config.model_type in ("bert", "regard_bert"):
        return RegardBertModel
    if _generating_class(config.model_type) is None:
        types = ", ".join(family.model_type for family in FAMILIES.values())
        raise ValueError(f"is a {config.model_type!r}: it must be one of {types}, or a BERT")
    return for_generation(config)


def require_file_name(output: str | Path) -> None:
    """Checks that a file can be written under a name, before the work for it begins.

    Raises:
        ValueError: if a folder has that name, or the file's folder does not exist.
    """
    if os.path.isdir(output):
        raise ValueError(f"`output` ({output}) must be a file: there is a folder of that name")
    parent = os.path.dirname(output)
    if not os.path.isdir(parent or os.curdir):
        raise ValueError(f"`output` ({output}) must be in a folder that exists: {parent} does not")


def require_ending(output: str | Path, endings: tuple[str, ...] = PICTURES) -> None:
    """Checks that a picture can be written under a name, before the work for it begins.

    Raises:
        ValueError: if the name has none of the endings, a folder has that name, or the file's folder does not exist.
    """
    if Path(output).suffix not in endings:
        raise ValueError(f"`output` ({output}) must end with {', '.join(endings[:-1])} or {endings[-1]}")
    require_file_name(output)
