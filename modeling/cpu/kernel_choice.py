"""The conditions under which a kernel may replace PyTorch's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .torch_private import in_function_transform


def can_use_cpu_kernels(*tensors: Tensor) -> bool:
    """Whether these are ordinary tensors on a CPU, and nothing records or transforms the operations on them."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not in_function_transform()
        # Sharded, quantized and nested tensors have operators of their own.
        and all(tensor.device.type == "cpu" and type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
    )


def readable_values(tensor: Tensor | None) -> Tensor | None:
    """The tensor, if a check can read its values at no cost.

    Returns:
        None if it has no values, or lies on an accelerator, which a check would wait for, or is being compiled, where
        a check would break the graph.
    """
    if tensor is None or tensor.device.type != "cpu" or tensor.numel() == 0 or torch.compiler.is_compiling():
        return None
    return tensor
