"""Running a model for a look at it, and leaving it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def _configurations(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _configurations(getattr(config, name))


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it a model is in evaluation mode and on the eager kernel, since the others return no attention weights.

    Afterwards, also after an error, each of its modules is in its mode and on its kernel again.
    """
    modes = [(module, module.training) for module in model.modules()]
    # Outer ones first: setting one's kernel sets those inside it. The layers of a model that was put into another one
    # may have a configuration of their own still, apart from that of either.
    owners = [
        module.config for module in model.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    configs = {id(config): config for owner in owners for config in _configurations(owner)}.values()
    kernels = [(config, config._attn_implementation) for config in configs]
    try:
        model.eval()
        if any(kernel != "eager" for _, kernel in kernels):
            model.set_attn_implementation("eager")
            for config in configs:
                config._attn_implementation = "eager"
        with torch.no_grad():
            yield
    finally:
        for config, kernel in kernels:
            config._attn_implementation = kernel
        for module, mode in modes:
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Sets a model to evaluation, and each of its modules back to what it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
