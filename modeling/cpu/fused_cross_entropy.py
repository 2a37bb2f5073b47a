"""The cross-entropy over a vocabulary, computed from hidden states without holding all scores in memory.

The scores of a batch, their logarithms and their gradients are by far the largest tensors of a language model's step.
Here the forward pass computes the gradients in the memory of the scores, for some positions at a time, as in Liger
Kernel (Hsu et al., 2024, https://arxiv.org/abs/2410.10989).

Dimension letters: P positions, E width of the model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from .kernel_choice import can_use_cpu_kernels
from .linear import is_unhooked, linear
from .padding import POSITION_MULTIPLE, missing_rows

# The largest number of scores in memory at once, and of rows of the weight's gradient that are updated at once.
_SCORES, _ROWS = 2**22, 2**12


def _loss_and_gradient(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of scores (P, V), and its gradient, which overwrites the scores."""
    wanted = labels.clamp(min=0).unsqueeze(1)
    counted = (labels != -100).to(scores.dtype).unsqueeze(1)
    largest = scores.amax(1, keepdim=True)
    right = scores.gather(1, wanted) - largest
    shares = scores.sub_(largest).exp_()
    sums = shares.sum(1, keepdim=True)
    loss = ((sums.log() - right) * counted).sum()
    return loss, shares.mul_(counted / sums).scatter_add_(1, wanted, -counted)


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        total = torch.zeros((), device=hidden_states.device)
        hidden_gradient, weight_gradient = torch.zeros_like(hidden_states), torch.zeros_like(weight)
        bias_gradient = None if bias is None else torch.zeros_like(bias)
        parts = max(1, -(-len(labels) * len(weight) // _SCORES))
        for hidden, part, wanted in zip(
            *(each.chunk(parts) for each in (hidden_states, hidden_gradient, labels)), strict=True
        ):
            loss, gradient = _loss_and_gradient(linear(hidden, weight, bias).float(), wanted)
            total += loss
            gradient = gradient.to(hidden.dtype)
            part.copy_(linear(gradient, weight.t()))
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0)
            for rows, columns in zip(weight_gradient.split(_ROWS), gradient.split(_ROWS, 1), strict=True):
                rows += linear(columns.t(), hidden.t())
        ctx.save_for_backward(hidden_gradient, weight_gradient, bias_gradient)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *(each if each is None else each.mul_(gradient) for each in ctx.saved_tensors), None


def summed_loss(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """The summed cross-entropy, in float32, of `hidden_states @ weight.T + bias` with the labels, for training.

    Args:
        hidden_states: (P, E).
        weight: weight of the output layer, (V, E).
        bias: bias of the output layer, (V,), if it has one.
        labels: labels of the positions, (P,); -100 for a position that does not count.
    """
    return _SummedLoss.apply(hidden_states, weight, bias, labels)


def _needs_no_scores(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return layer.training and is_unhooked(layer)


def vocabulary_loss(
    hidden_states: Tensor, layer: nn.Module, labels: Tensor, transform: Callable[[Tensor], Tensor] | None = None
) -> Tensor | None:
    """The summed cross-entropy of an output layer's scores in training, without holding all scores in memory.

    Args:
        hidden_states: hidden states of the positions to predict, (P, E).
        layer: the output layer, from E to V.
        labels: labels of the positions, (P,); -100 for a position that does not count.
        transform: function that turns the hidden states into the inputs of the layer.

    Returns:
        The sum, in float32. None if the scores have to be computed, because the layer is in evaluation mode, is not a
        plain linear layer, or has hooks.
    """
    if not _needs_no_scores(layer):
        return None
    transformed = hidden_states if transform is None else transform(hidden_states)
    return summed_loss(transformed, layer.weight, layer.bias, labels)


def pad_positions(layer: nn.Module, positions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Pads the positions to predict and their labels, both (P,), to a multiple of `POSITION_MULTIPLE`.

    Pads only on a CPU, and only where `vocabulary_loss` computes the loss, so that no scores of padding are returned.
    The added positions are those of the first token of the batch, with labels that do not count.
    """
    if not (_needs_no_scores(layer) and can_use_cpu_kernels(labels)):
        return positions, labels
    missing = missing_rows(len(labels), POSITION_MULTIPLE)
    return nn.functional.pad(positions, (0, missing)), nn.functional.pad(labels, (0, missing), value=-100)
