"""The linear layers and the dropout of every model: PyTorch's, but for CPUs in training.

PyTorch multiplies float32 matrices on CPUs with the BLAS that it was built with, which may not use the widest vector
instructions of every maker's processors; oneDNN, which PyTorch carries too, does. And for dropout (Srivastava et al.,
2014, https://jmlr.org/papers/v15/srivastava14a.html) it draws a random number for each element, and keeps it for the
backward pass; here one draw of the same generator decides four elements, each by 16 bits, and a byte is kept for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

_STEPS = 2**16
# Multiplications below which oneDNN has not begun when the BLAS has ended.
_WORTHWHILE = 2**19
_in_inference: ContextVar[bool] = ContextVar("_in_inference", default=False)


@contextmanager
def fast_inference() -> Iterator[None]:
    """Has linear layers use in evaluation the kernel that they train with, where there is enough to multiply.

    Without it they compute exactly what `nn.Linear` does, to the bit.
    """
    token = _in_inference.set(True)
    try:
        yield
    finally:
        _in_inference.reset(token)


def can_use_cpu_kernels(*tensors: Tensor) -> bool:
    """Whether these are ordinary tensors on a CPU, and nothing is recording what is done to them."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        # Sharded, quantised and nested tensors have ways of their own.
        and all(tensor.device.type == "cpu" and type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
    )


def _product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # oneDNN reads a bias as if it were contiguous.
    bias = None if bias is None else bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        product = _OneDNNLinear.apply  # so that gradients of gradients are there too
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            product(gradient, weight.t(), None) if of_input else None,
            product(rows.t(), input.reshape(-1, input.shape[-1]).t(), None) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _suits_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    tensors = (input, weight) if bias is None else (input, weight, bias)
    return (
        can_use_cpu_kernels(*tensors)
        and all(tensor.dtype == torch.float32 and tensor.numel() > 0 for tensor in tensors)
        # PyTorch refuses what doesn't fit together, and says why.
        and input.shape[-1:] == weight.shape[1:]
        and (bias is None or bias.shape == weight.shape[:1])
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of an input (..., K) and the transpose of a weight (N, K), plus the bias (N): (..., N).

    By oneDNN where that serves, in float32 on a CPU; else by PyTorch.
    """
    if _suits_onednn(input, weight, bias):
        return _OneDNNLinear.apply(input, weight, bias) if torch.is_grad_enabled() else _product(input, weight, bias)
    return nn.functional.linear(input, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear`, by `linear` above in training and within `fast_inference`."""

    def forward(self, input: Tensor) -> Tensor:
        """See `nn.Linear`."""
        if self.training or (
            not torch.compiler.is_compiling()
            and _in_inference.get()
            and input.numel() * self.out_features >= _WORTHWHILE
        ):
            return linear(input, self.weight, self.bias)
        return super().forward(input)


def is_unhooked(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a linear layer is no more than its weight and bias: no adapter, and no hook that a call would run."""
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return type(layer) in (Linear, nn.Linear) and not any(hooks)


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: nn.Module, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.activation = activation
        return linear(activation(input), weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        _, of_input, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        with torch.enable_grad():
            input = input.detach().requires_grad_()
            activated = ctx.activation(input)
        columns = activated.detach().reshape(-1, activated.shape[-1]).t()
        return (
            None,
            torch.autograd.grad(activated, input, linear(gradient, weight.t()))[0] if of_input else None,
            linear(rows.t(), columns) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def activated_linear(activation: nn.Module, input: Tensor, layer: nn.Module) -> Tensor:
    """layer(activation(input)); in training, what the activation gives is computed twice instead of kept.

    Not if the activation has parameters (PReLU, say), which need gradients too.
    """
    if (
        is_unhooked(layer)
        and layer.training
        and _suits_onednn(input, layer.weight, layer.bias)
        and next(activation.parameters(), None) is None
    ):
        return _ActivatedLinear.apply(activation, input, layer.weight, layer.bias)
    return layer(activation(input))


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


def dropout(input: Tensor, p: float, training: bool) -> Tensor:
    """Sets elements to zero with the probability `p`, and scales the others up, in training alone.

    On a CPU `p` is rounded to a multiple of 2**-16.
    """
    kept_steps = round((1 - p) * _STEPS)
    if training and 0 < kept_steps < _STEPS and can_use_cpu_kernels(input):
        return _BytewiseDropout.apply(input, kept_steps)
    return nn.functional.dropout(input, p, training)


class Dropout(nn.Dropout):
    """`nn.Dropout` with the function above."""

    def forward(self, input: Tensor) -> Tensor:
        """See `dropout`."""
        return dropout(input, self.p, True) if self.training else input
