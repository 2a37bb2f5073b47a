"""Values that all processes of a run agree on, so that all of them take the same way and none waits for another."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor


def all_reduce_sum(numbers: list[int], accelerator: Accelerator) -> Tensor:
    """The sum over all processes of each number. Every process must call this."""
    totals = torch.tensor(numbers)
    return totals if accelerator.num_processes == 1 else accelerator.reduce(totals.to(accelerator.device))


def same_on_all_ranks(value: float, accelerator: Accelerator) -> float:
    """The value of the first process, in float32. Every process must call this."""
    if accelerator.num_processes == 1:
        return value
    return float(broadcast(torch.tensor([value], device=accelerator.device))[0])
