"""Steps whose loss or gradient is not finite: they change no weights, and are told of.

To look at a number the host must wait for the device, which at each step would cost speed. So the optimizer itself is
told, on the device, whether to take the step, and the host looks later, when it waits anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """A step, and the batch that it was of: the first and the last of its examples, by their places in the epoch."""

    step: int
    epoch: int
    first_example: int
    last_example: int

    def __str__(self) -> str:
        return f"step {self.step} (epoch {self.epoch}, examples {self.first_example} to {self.last_example})"


class StepWatch:
    """Notes of each step whether it was finite."""

    def __init__(self) -> None:
        self._noted: list[tuple[Place, Tensor]] = []

    def note(self, place: Place, skipped: Tensor) -> None:
        """Keeps whether a step was skipped, without waiting for it."""
        self._noted.append((place, skipped))

    def look(self) -> list[Place]:
        """The steps since the last look that were skipped."""
        if not self._noted:
            return []
        flags = torch.stack([flag for _, flag in self._noted]).tolist()
        found = [place for (place, _), flag in zip(self._noted, flags, strict=True) if flag]
        self._noted.clear()
        return found


def nonfinite_weights(model: torch.nn.Module) -> Tensor:
    """How many of a model's matrices and vectors hold what is not finite, of those that this process holds."""
    # Of a parameter that is shared out over processes, this one's part.
    own = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in model.parameters()]
    return torch.stack([~part.detach().isfinite().all() for part in own]).sum()
