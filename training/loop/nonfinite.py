"""Detection of steps whose loss or gradient is not finite: they change no weights, and are reported.

Reading a number from the device makes the host wait, which would slow down every step. So the flag by which the
optimizer skips a step stays on the device, and the host reads the flags later, when it has to wait anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """A step and its batch, given by the indices in the epoch of its first and last example."""

    step: int
    epoch: int
    first_example: int
    last_example: int

    def __str__(self) -> str:
        return f"step {self.step} (epoch {self.epoch}, examples {self.first_example} to {self.last_example})"


class StepWatch:
    """Records the steps that were skipped."""

    def __init__(self) -> None:
        self._noted: list[tuple[Place, Tensor]] = []

    def note(self, place: Place, skipped: Tensor) -> None:
        """Records the flag of a step, which stays on the device unread.

        Args:
            place: the step.
            skipped: whether the step was skipped, a tensor on the device.
        """
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
    """The number of parameters, each one a tensor, that have values that are not finite.

    Of a parameter that is sharded over processes, only the part of this process counts.
    """
    own = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in model.parameters()]
    return torch.stack([~part.detach().isfinite().all() for part in own]).sum()
