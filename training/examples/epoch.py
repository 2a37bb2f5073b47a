"""One epoch of examples, of any kind, as a data set for PyTorch's data loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch

Example = TypeVar("Example")


class EpochDataset(torch.utils.data.Dataset, Generic[Example]):
    """The examples of one epoch, in the epoch's order. Each is built when it is read, and depends on no other.

    Args:
        order: for each example, the number of the row that it is built from.
        build: builds an example from the number of its row and its index in the epoch. It must be picklable, for the
            workers of a data loader.
    """

    def __init__(self, order: np.ndarray, build: Callable[[int, int], Example]) -> None:
        self.order, self._build = order, build

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Example:
        """Builds an example.

        Raises:
            IndexError: if the epoch has no such example.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"the epoch has {len(self)} examples and no example {index}")
        return self._build(int(self.order[index]), index)
