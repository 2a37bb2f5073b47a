"""The length of a run, and its learning rate at each step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """The length of a run, in steps, passes over the data or time: one of them is not None.

    Args:
        steps: number of optimizer steps.
        epochs: number of passes over the data, which need not be whole.
        minutes: time spent in training, including that before the run was resumed.
    """

    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None

    def progress(self, step: int, epoch: float, seconds: float) -> float:
        """The share of the run that is done, 1 or more at its end."""
        if self.steps is not None:
            return step / self.steps
        if self.epochs is not None:
            return epoch / self.epochs
        if self.minutes is not None:
            return seconds / (60 * self.minutes)
        raise ValueError("a budget needs `steps`, `epochs` or `minutes`")


def learning_rate_factor(progress: float, warmup: float, schedule: str) -> float:
    """The learning rate, as a share of the highest one, when a share `progress` of the run is done.

    It rises linearly from 0 during the warm-up. Then it falls to 0 linearly ("linear") or along half a cosine
    ("cosine"), or stays ("constant").
    """
    if progress < warmup:
        return progress / warmup
    if schedule == "constant":
        return 1.0
    rest = min(1.0, (progress - warmup) / (1 - warmup)) if warmup < 1 else 1.0
    return 1 - rest if schedule == "linear" else (1 + math.cos(math.pi * rest)) / 2
