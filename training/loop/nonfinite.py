"""Steps whose loss or gradient is not finite: they change no weights, and are reported.

To read a number the host must wait for the device, which would slow down every step. So the optimizer reads on the
device whether to skip a step, and the host reads it later, when it waits for the device anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """A step, and its batch: the indices in the epoch of its first and last example."""

    step: int
    epoch: int
    first_example: int
    last_example: int

    def __str__(self) -> str:
        return f"step {self.step} (epoch {self.epoch}, examples {self.first_example} to {self.last_example})"


class StepWatch:
    """Remembers which steps were skipped."""

    def __init__(self) -> None:
        self._noted: list[tuple[Place, Tensor]] = []

    def note(self, place: Place, skipped: Tensor) -> None:
        """Remembers whether a step was skipped, a flag on the device, without reading it."""
        self._noted.append((place, skipped))

    def skipped_steps(self) -> list[Place]:
        """The steps that were skipped since the last call."""
        if not self._noted:
            return []
        flags = torch.stack([flag for _, flag in self._noted]).tolist()
        found = [place for (place, _), flag in zip(self._noted, flags, strict=True) if flag]
        self._noted.clear()
        return found


def nonfinite_weights(model: torch.nn.Module) -> Tensor:
    """The number of a model's parameters with values that are not finite.

    Of parameters that are sharded over processes, this one's parts count.
    """
    own = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in model.parameters()]
    return torch.stack([~part.detach().isfinite().all() for part in own]).sum()
