"""Running a model for inspection: in evaluation mode, and on the eager kernel where attention weights are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Runs a block with a model in evaluation mode and without gradients, and then restores each module's mode.

    A block that needs gradients can enter `torch.enable_grad()`.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Runs a block as `evaluation_mode` does, and on the eager attention kernel, and then restores the kernel.

    The other kernels return no attention weights.
    """
    # A layer that was moved here from another model may still have a configuration of its own.
    owners = [
        module.config for module in model.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    configs = {id(config): config for owner in owners for config in _configurations(owner)}.values()
    # Outer configurations come first: setting the kernel of one also sets it in its sub-configurations.
    kernels = [(config, config._attn_implementation) for config in configs]
    try:
        if any(kernel != "eager" for _, kernel in kernels):
            model.set_attn_implementation("eager")
            for config in configs:
                config._attn_implementation = "eager"
        with evaluation_mode(model):
            yield
    finally:
        for config, kernel in kernels:
            config._attn_implementation = kernel


def _configurations(config: Any) -> Iterator[Any]:
    """Yields a configuration and, recursively, its sub-configurations."""
    yield config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _configurations(getattr(config, name))
