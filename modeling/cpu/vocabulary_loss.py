"""The cross-entropy over a vocabulary straight from hidden states, a part of the scores at a time.

The scores of a batch, their logarithms and their gradients are by far the largest tensors of a language model's step.
Here the gradients are formed in the forward pass, in the memory of the scores, and only for some positions at once; as
in Liger Kernel (Hsu et al., 2024, https://arxiv.org/abs/2410.10989).

Dimension letters: P positions, E width of the model, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .linear import linear

# Scores that are in memory at once, and rows of the weight whose gradients are.
_SCORES, _ROWS = 2**22, 2**12


def _loss_and_gradient(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of scores (P, V), and its gradient, in the memory of the scores."""
    wanted = labels.clamp(min=0).unsqueeze(1)
    counted = (labels != -100).to(scores.dtype).unsqueeze(1)
    largest = scores.amax(1, keepdim=True)
    right = scores.gather(1, wanted) - largest
    shares = scores.sub_(largest).exp_()
    sums = shares.sum(1, keepdim=True)
    loss = ((sums.log() - right) * counted).sum()
    return loss, shares.mul_(counted / sums).scatter_add_(1, wanted, -counted)


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        total = torch.zeros((), device=hidden_states.device)
        of_hidden, of_weight = torch.zeros_like(hidden_states), torch.zeros_like(weight)
        of_bias = None if bias is None else torch.zeros_like(bias)
        parts = max(1, -(-len(labels) * len(weight) // _SCORES))
        for hidden, part, wanted in zip(
            *(each.chunk(parts) for each in (hidden_states, of_hidden, labels)), strict=True
        ):
            loss, gradient = _loss_and_gradient(linear(hidden, weight, bias).float(), wanted)
            total += loss
            gradient = gradient.to(hidden.dtype)
            part.copy_(linear(gradient, weight.t()))
            if of_bias is not None:
                of_bias += gradient.sum(0)
            for rows, columns in zip(of_weight.split(_ROWS), gradient.split(_ROWS, 1), strict=True):
                rows += linear(columns.t(), hidden.t())
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *(each if each is None else each.mul_(gradient) for each in ctx.saved_tensors), None


def vocabulary_loss(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """The summed cross-entropy, in float32, of `hidden_states @ weight.T + bias` with the labels, in training.

    Args:
        hidden_states: (P, E).
        weight: of the output layer, (V, E).
        bias: of the output layer, (V), if it has one.
        labels: (P,), -100 for a position that does not count.
    """
    return _VocabularyLoss.apply(hidden_states, weight, bias, labels)
