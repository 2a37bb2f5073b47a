"""Linear layers like PyTorch's, but on CPUs they train with the matrix products of oneDNN.

On CPUs, PyTorch multiplies float32 matrices with the BLAS that it was built with, which may not use the widest vector
instructions of the processors of every vendor. oneDNN, which is also part of PyTorch, does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from .kernel_choice import can_use_cpu_kernels
from .torch_private import has_hooks, onednn_linear

# With fewer multiplications than this, the BLAS is faster because of the overhead of oneDNN.
_WORTHWHILE = 2**19
_in_inference: ContextVar[bool] = ContextVar("_in_inference", default=False)


@contextmanager
def fast_inference() -> Iterator[None]:
    """A context in which linear layers in evaluation mode use the same kernel as in training, for large products.

    Outside it, their results are bit-equal to those of `nn.Linear`.
    """
    token = _in_inference.set(True)
    try:
        yield
    finally:
        _in_inference.reset(token)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # oneDNN reads a bias as if it were contiguous.
    return onednn_linear(input, weight, None if bias is None else bias.contiguous())


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        product = _OneDNNLinear.apply  # so that gradients of gradients can be computed
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            product(gradient, weight.t(), None) if needs_input else None,
            product(rows.t(), input.reshape(-1, input.shape[-1]).t(), None) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _suits_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    tensors = (input, weight) if bias is None else (input, weight, bias)
    return (
        can_use_cpu_kernels(*tensors)
        and all(tensor.dtype == torch.float32 and tensor.numel() > 0 for tensor in tensors)
        # PyTorch's own kernel raises the error for shapes that do not fit together.
        and input.shape[-1:] == weight.shape[1:]
        and (bias is None or bias.shape == weight.shape[:1])
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of an input (..., K) and the transpose of a weight (N, K), plus the bias (N): (..., N).

    On a CPU, oneDNN computes it for float32; otherwise PyTorch's own operator does.
    """
    if _suits_onednn(input, weight, bias):
        return _OneDNNLinear.apply(input, weight, bias) if torch.is_grad_enabled() else _product(input, weight, bias)
    return nn.functional.linear(input, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear` that uses `linear` in training and within `fast_inference`."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., input size) to (..., output size)."""
        if self.training or (
            not torch.compiler.is_compiling()
            and _in_inference.get()
            and input.numel() * self.out_features >= _WORTHWHILE
        ):
            return linear(input, self.weight, self.bias)
        return super().forward(input)


def is_unhooked(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Returns whether a layer is a plain linear layer, without an adapter around it and without hooks."""
    return type(layer) in (Linear, nn.Linear) and not has_hooks(layer)


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
        _, needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        with torch.enable_grad():
            input = input.detach().requires_grad_()
            activated = ctx.activation(input)
        columns = activated.detach().reshape(-1, activated.shape[-1]).t()
        return (
            None,
            torch.autograd.grad(activated, input, linear(gradient, weight.t()))[0] if needs_input else None,
            linear(rows.t(), columns) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def activated_linear(activation: nn.Module, input: Tensor, layer: nn.Module) -> Tensor:
    """Computes `layer(activation(input))`; in training, the backward pass recomputes the activation.

    The result of an activation with parameters, such as PReLU, is kept, since its parameters need gradients too.
    """
    if (
        is_unhooked(layer)
        and layer.training
        and _suits_onednn(input, layer.weight, layer.bias)
        and next(activation.parameters(), None) is None
    ):
        return _ActivatedLinear.apply(activation, input, layer.weight, layer.bias)
    return layer(activation(input))
