"""The name of a model's cache, which transformers 5.20, the last for Python 3.10, and later ones call differently.

Ours is `cache`, as it is in later ones; what goes to transformers, or comes from there, passes through here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.deprecation import deprecate_kwarg

# The cache's name among the arguments of transformers' functions, in `generate` and in the outputs of a model.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def named_cache(cache: Cache | None) -> dict[str, Any]:
    """The cache as the keyword argument that transformers knows it by."""
    return {CACHE: cache}


def _takes_cache_by_name(forward: Callable) -> Callable:
    @wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if CACHE in kwargs:
            kwargs["cache"] = kwargs.pop(CACHE)
        return forward(*args, **kwargs)

    return wrapper


# Decorator of a `forward` with an argument `cache`: takes `past_key_values` for it too, where that is on its way out
# with a warning.
takes_cache: Callable[[Callable], Callable] = (
    deprecate_kwarg("past_key_values", "5.40.0", new_name="cache") if CACHE == "cache" else _takes_cache_by_name
)


class CachingLayer(GradientCheckpointingLayer):
    """A layer that goes without a cache while its activations are recomputed, else it would write to it twice.

    transformers sees to it by the name that it knows the cache by.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if CACHE != "cache" and self.gradient_checkpointing and self.training:
            kwargs["cache"] = None
        return super().__call__(*args, **kwargs)
