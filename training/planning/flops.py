"""Counting floating point operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ...modeling.cpu.torch_private import ONEDNN_LINEAR


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * query[..., 0].numel() * key.shape[2] * (query.shape[3] + value.shape[3])


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    # The scores are computed again, and each factor of the two products gets a gradient by a product.
    return 2 * query[..., 0].numel() * key.shape[2] * (3 * query.shape[3] + 2 * value.shape[3])


def _linear(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * input.numel() * weight.shape[0]


def _recurrent(input: Tensor, of_input: Tensor, of_state: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * input[..., 0].numel() * (of_input.numel() + of_state.numel())


def _recurrent_backward(*args: Any, **kwargs: Any) -> int:
    return 2 * _recurrent(*args, **kwargs)


def _cudnn_recurrent(input: Tensor, weights: list[Tensor], *args: Any, **kwargs: Any) -> int:
    return 2 * input[..., 0].numel() * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _cudnn_recurrent_backward(*args: Any, **kwargs: Any) -> int:
    return 2 * _cudnn_recurrent(*args, **kwargs)


# Operations that PyTorch's own counter does not know.
_FORMULAS: dict[Any, Any] = {
    ONEDNN_LINEAR: _linear,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
    torch.ops.aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    torch.ops.aten._cudnn_rnn: _cudnn_recurrent,
    torch.ops.aten._cudnn_rnn_backward: _cudnn_recurrent_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class FlopCount(TorchDispatchMode):
    """While active, counts the operations of matrix products, convolutions, attention and recurrent layers.

    A multiplication and an addition are two operations. The formulas are those of PyTorch's `FlopCounterMode`, and
    further ones for operations that it leaves out. That class itself can't be used: it refuses a backward pass within
    a backward pass, which `activated_linear` has.

    Attributes:
        flops: number of operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts its floating point operations."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = _FORMULAS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result
