"""Batch normalisation over all processes, with the statistics of the whole batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _AllReduceSum(torch.autograd.Function):
    """The sum over all processes; its gradient is the sum of the gradients over all processes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _AllReduceSum.apply(gradient)


class SharedBatchNorm(_BatchNorm):
    """Batch normalisation (Ioffe & Szegedy, 2015, https://arxiv.org/abs/1502.03167) over all processes.

    `nn.SyncBatchNorm` does the same, but only on GPUs.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"`input` has {input.dim()} dimensions, but needs at least 2")

    def forward(self, input: Tensor) -> Tensor:
        """Normalises each channel of (B, C, ...); in training, with the statistics of the inputs of all processes."""
        if not self.training or not (dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        self._check_input_dim(input)
        others = [0, *range(2, input.dim())]
        values = input.float()
        number = torch.full((1,), input.numel() / input.shape[1], device=input.device)
        sums = _AllReduceSum.apply(torch.cat([values.sum(others), number]))
        count = sums[-1].detach()
        centred = values - self._broadcast(sums[:-1] / count, input)
        variance = _AllReduceSum.apply(centred.square().sum(others)) / count
        if self.track_running_stats:
            self._update_running_stats((sums[:-1] / count).detach(), (variance * count / (count - 1)).detach())
        normalised = centred * self._broadcast(torch.rsqrt(variance + self.eps), input)
        if self.affine:
            normalised = normalised * self._broadcast(self.weight, input) + self._broadcast(self.bias, input)
        return normalised.to(input.dtype)

    def _broadcast(self, channels: Tensor, input: Tensor) -> Tensor:
        return channels.view(1, -1, *[1] * (input.dim() - 2))

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def share_batch_norms(model: nn.Module) -> None:
    """Replaces the batch normalisations of a model by ones over all processes, with the same weights and names."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, (SharedBatchNorm, nn.SyncBatchNorm)):
                setattr(module, name, _shared(child))


def _shared(norm: _BatchNorm) -> SharedBatchNorm:
    shared = SharedBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    shared._parameters, shared._buffers = norm._parameters, norm._buffers
    return shared.train(norm.training)
