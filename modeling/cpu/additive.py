"""The scores of additive alignment, computed with sigmoids that the backward pass recomputes instead of keeping.

Dimension letters: B batch, Q queries, K keys, A width of the alignment.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .kernel_choice import can_use_cpu_kernels
from .linear import is_unhooked


def _sigmoid_of_doubled_sums(query: Tensor, keys: Tensor) -> Tensor:
    return torch.add(2 * query.unsqueeze(2), keys.unsqueeze(1), alpha=2).sigmoid_()  # (B, Q, K, A)


class _AdditiveScores(torch.autograd.Function):
    """Computes v . tanh(query + key), with tanh(x) = 2 sigmoid(2 x) - 1.

    On CPUs, PyTorch's tanh takes several times as long as its sigmoid. The backward pass recomputes the sigmoids:
    those of all steps of a decoder would take more memory than everything else.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(query, keys, weight)
        return torch.matmul(_sigmoid_of_doubled_sums(query, keys), 2 * weight) - weight.sum()  # (B, Q, K)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, keys, weight = ctx.saved_tensors
        sigmoids = _sigmoid_of_doubled_sums(query, keys)
        weight_gradient = 2 * torch.mv(sigmoids.flatten(0, 2).t(), gradient.flatten()) - gradient.sum()
        sums_gradient = gradient.unsqueeze(-1) * (4 * weight)
        torch.ops.aten.sigmoid_backward.grad_input(sums_gradient, sigmoids, grad_input=sums_gradient)
        return (
            sums_gradient.sum(dim=2),
            sums_gradient.sum_to_size(keys.unsqueeze(1).shape).squeeze(1),
            weight_gradient,
        )


def additive_scores(query: Tensor, keys: Tensor, score: nn.Module) -> Tensor:
    """Computes `score(tanh(query + key))` for each query and key.

    Args:
        query: projected queries, (B, Q, A).
        keys: projected keys, (B, K, A).
        score: linear layer without a bias, from A to 1.

    Returns:
        Scores, (B, Q, K).
    """
    if is_unhooked(score) and _suits_sigmoid(query, keys, score.weight):
        return _AdditiveScores.apply(query, keys, score.weight.squeeze(0))
    matched = torch.tanh(query.unsqueeze(2) + keys.unsqueeze(1))  # (B, Q, K, A)
    return score(matched).squeeze(-1)


def _suits_sigmoid(query: Tensor, keys: Tensor, weight: Tensor) -> bool:
    tensors = (query, keys, weight)
    is_single = all(tensor.dtype == torch.float32 for tensor in tensors)
    return can_use_cpu_kernels(*tensors) and is_single and len(query) == len(keys)
