"""The base of the model classes: initial weights, saving, generation, and the names of caches."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from transformers import Cache, GenerationMixin, PreTrainedModel, initialization
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.deprecation import deprecate_kwarg

from .cpu import fast_inference
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
            # Buffers that are not saved have no content after loading; this method is also called then.
            initialization.copy_(module.table, module.compute_table())
        elif isinstance(module, LearnedPositions):
            initialization.copy_(module.weight, module.compute_start(self.config.initializer_range))

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Saves the model as `PreTrainedModel.save_pretrained` does, without an `auto_map` whose code is not saved.

        The configuration's `auto_map` names code that lies beside a checkpoint. Only a class that was loaded from
        there saves the code again; the package's own classes do not, so they must not promise it.
        """
        if self._auto_class is None and hasattr(self.config, "auto_map"):
            del self.config.auto_map
        super().save_pretrained(save_directory, *args, **kwargs)


class FastGenerationMixin(GenerationMixin):
    """`GenerationMixin` with faster linear layers: its scores are those of `forward` up to float32's rounding."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates as `GenerationMixin.generate` does, within `fast_inference`."""
        with fast_inference():
            return super().generate(*args, **kwargs)


def eager_for_output_attentions(forward: Callable) -> Callable:
    """Decorator of a base model's `forward`: runs it with eager attention if `output_attentions` is requested.

    The other implementations return no weights, and transformers would then return empty tuples.
    """

    @wraps(forward)
    def wrapper(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        implementation = self.config._attn_implementation
        if implementation == "eager" or not kwargs.get("output_attentions", self.config.output_attentions):
            return forward(self, *args, **kwargs)
        self.config._attn_implementation = "eager"
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.config._attn_implementation = implementation

    return wrapper


# The rest of this module exists for transformers 5.20, the last release for Python 3.10, which calls a cache
# `past_key_values`; later releases call it `cache`, as this package does. It goes when support for Python 3.10 is
# dropped: `CACHE` is "cache" then, `named_cache(cache)` is `cache=cache`, and `CachingLayer` is its base class. Only
# `takes_cache` stays as long as transformers itself accepts the old name, before 5.40.

# The cache's name among the arguments of transformers' functions, in `generate` and in the outputs of a model.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def named_cache(cache: Cache | None) -> dict[str, Any]:
    """The cache as the keyword argument that the installed transformers expects."""
    return {CACHE: cache}


def _takes_cache_by_name(forward: Callable) -> Callable:
    @wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if CACHE in kwargs:
            kwargs["cache"] = kwargs.pop(CACHE)
        return forward(*args, **kwargs)

    return wrapper


# Decorator of a `forward` with an argument `cache`: accepts `past_key_values` in its place, with a warning where
# transformers deprecates that name.
takes_cache: Callable[[Callable], Callable] = (
    deprecate_kwarg("past_key_values", "5.40.0", new_name="cache") if CACHE == "cache" else _takes_cache_by_name
)


class CachingLayer(GradientCheckpointingLayer):
    """A layer that gets no cache while its activations are recomputed, since it would write to the cache twice.

    transformers removes the cache from the arguments by its own name for it; here it is removed by ours.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if CACHE != "cache" and self.gradient_checkpointing and self.training:
            kwargs["cache"] = None
        return super().__call__(*args, **kwargs)
