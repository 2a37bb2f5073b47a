"""What the families' model classes share: initial weights, checks of the input, losses."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel, initialization

from .cpu.linear import fast_inference
from .positions import LearnedPositions, SinusoidalPositions


class RegardPreTrainedModel(PreTrainedModel):
    """Base of every model class of the package."""

    supports_gradient_checkpointing = True
    _no_split_modules = ["TransformerBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SinusoidalPositions):
            # Buffers that are not saved have no content after loading; this is also called then.
            initialization.copy_(module.table, module.compute_table())
        elif isinstance(module, LearnedPositions):
            initialization.copy_(module.weight, module.compute_start(self.config.initializer_range))

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """See `PreTrainedModel.save_pretrained`.

        A checkpoint may have its code beside it, named by the configuration's `auto_map`. Only a class that was
        loaded from there takes the code along; saved by the package's own, it must not be promised either.
        """
        if self._auto_class is None and hasattr(self.config, "auto_map"):
            del self.config.auto_map
        super().save_pretrained(save_directory, *args, **kwargs)


class FastGenerationMixin(GenerationMixin):
    """`GenerationMixin`, by faster linear layers: scores are those of `forward` to float32's rounding."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See `GenerationMixin.generate`."""
        with fast_inference():
            return super().generate(*args, **kwargs)


def show_weights(forward: Callable) -> Callable:
    """Decorator of a base model's `forward`: runs it on the eager kernel when it is asked for attention weights.

    The others return none, and transformers would then give back empty tuples.
    """

    @wraps(forward)
    def wrapper(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        kernel = self.config._attn_implementation
        if kernel == "eager" or not kwargs.get("output_attentions", self.config.output_attentions):
            return forward(self, *args, **kwargs)
        self.config._attn_implementation = "eager"
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.config._attn_implementation = kernel

    return wrapper
