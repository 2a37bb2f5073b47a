"""The private names of torch that the kernels use. No other module of the models uses them.

If a release of torch renames or changes one of them, `tests/modeling/cpu/test_torch_private.py` fails, and says which
kernel needs it and what to do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# oneDNN's linear layer as an operator; None in a build of torch without oneDNN.
ONEDNN_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def onednn_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of an input (..., K) and the transpose of a weight (N, K), plus the bias (N), computed by oneDNN."""
    return ONEDNN_LINEAR(input, weight, bias, "none", [], "")


def in_function_transform() -> bool:
    """Returns whether a transform of `torch.func`, such as `vmap` or `grad`, is active."""
    return torch._C._are_functorch_transforms_active()


def backward_pass_id() -> int:
    """The id of the backward pass that is running, different for each pass."""
    return torch._C._current_graph_task_id()


def has_forward_pre_hooks(module: nn.Module) -> bool:
    """Returns whether a call of the module first runs a hook, which may change the weights."""
    return bool(module._forward_pre_hooks)


def has_hooks(module: nn.Module) -> bool:
    """Returns whether a call of the module or its backward pass runs a hook."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hooks)
