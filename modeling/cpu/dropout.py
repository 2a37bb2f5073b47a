"""Dropout like PyTorch's, but on CPUs with a quarter of the random numbers and an eighth of the memory.

For dropout (Srivastava et al., 2014, https://jmlr.org/papers/v15/srivastava14a.html) PyTorch draws a random number for
each element and keeps it for the backward pass. Here, one draw from the same generator decides four elements, by 16
bits each, and one byte is kept for each element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .kernel_choice import can_use_cpu_kernels

_STEPS = 2**16


class _BytewiseDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, kept_steps: int) -> Tensor:
        draws = torch.empty(-(-input.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        kept = (draws.view(torch.int16)[: input.numel()] < kept_steps - _STEPS // 2).view(input.shape)
        ctx.save_for_backward(kept)
        ctx.scale = _STEPS / kept_steps
        return (input * kept).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return gradient * kept * ctx.scale, None


def apply_dropout(input: Tensor, p: float, training: bool) -> Tensor:
    """In training, sets elements to zero with probability `p` and scales the others up to keep the expected sum.

    On CPUs, `p` is rounded to a multiple of 2**-16.
    """
    kept_steps = round((1 - p) * _STEPS)
    if training and 0 < kept_steps < _STEPS and can_use_cpu_kernels(input):
        return _BytewiseDropout.apply(input, kept_steps)
    return nn.functional.dropout(input, p, training)


class Dropout(nn.Dropout):
    """`nn.Dropout`, which uses `apply_dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        """Drops elements in training."""
        return apply_dropout(input, self.p, True) if self.training else input
