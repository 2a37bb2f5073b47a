"""The conditions under which a kernel may replace PyTorch's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .torch_private import in_function_transform


def can_use_cpu_kernels(*tensors: Tensor) -> bool:
    """Returns whether all are ordinary CPU tensors, and no compiler, tracer or `torch.func` transform is active."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not in_function_transform()
        # Sharded, quantized and nested tensors have operators of their own.
        and all(tensor.device.type == "cpu" and type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
    )


def readable_values(tensor: Tensor | None) -> Tensor | None:
    """Returns the tensor if a check can read its values at no cost, otherwise None.

    Reading has a cost on an accelerator, for which the host would have to wait, and during compilation, where it would
    break the graph. An empty tensor has no values to read.
    """
    if tensor is None or tensor.device.type != "cpu" or tensor.numel() == 0 or torch.compiler.is_compiling():
        return None
    return tensor
