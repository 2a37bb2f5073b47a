"""Low-rank adapters beside a frozen model (LoRA, Hu et al., 2022, https://arxiv.org/abs/2106.09685), with PEFT."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from torch import nn
from transformers import (
    PreTrainedModel,
)

from .settings import FinetuneSettings

# The modules that LoRA adapts by default in our BERT; PEFT has defaults for stock models.
LORA_TARGETS = {"regard_bert": ["query_key_value"]}


def add_adapter(settings: FinetuneSettings, model: PreTrainedModel, new: set[str]) -> nn.Module:
    """Freezes a model and adds LoRA's matrices to it.

    Args:
        settings: the settings of the run.
        model: the model to adapt.
        new: names of the modules that the checkpoint lacks; they are trained in full, like the modules of the head.

    Raises:
        ValueError: if `lora_targets` names a module that the model lacks, or none and PEFT has no default.
    """
    # An optional dependency, whose types are not installed either.
    peft: Any = importlib.import_module("peft")
    head = [
        name
        for name, module in model.named_children()
        if name != model.base_model_prefix and any(True for _ in module.parameters())
    ]
    kind = model.config.model_type
    matrices = [
        name
        for name, module in model.named_modules()
        if getattr(module, "weight", None) is not None
        and module.weight.ndim > 1
        and name.partition(".")[0] not in head
    ]
    allowed = ", ".join(sorted({name.rpartition(".")[2] for name in matrices}))
    for target in settings.lora_targets:
        if not any(f".{name}".endswith(f".{target}") for name in matrices):
            raise ValueError(f"`lora_targets` ({target!r}) is no module of the model, which has {allowed}")
    targets = settings.lora_targets or LORA_TARGETS.get(kind)
    if targets is None and kind not in peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
        raise ValueError(f"`lora_targets` must be given, as peft has no default for {kind!r}; it can name {allowed}")
    options = peft.LoraConfig(
        r=settings.lora,
        lora_alpha=2 * settings.lora,
        target_modules=targets,
        modules_to_save=sorted({*head, *(name for name in new if name.partition(".")[0] not in head)}),
    )
    with warnings.catch_warnings():
        # PEFT asks whether activations are checkpointed by a name that transformers deprecates.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        adapted: nn.Module = peft.get_peft_model(model, options)
    return adapted
