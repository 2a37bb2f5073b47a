"""How much memory tensors take in the course of a training step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def _parts(tensor: Any) -> tuple[Tensor, ...]:
    # A nested tensor has no memory of its own.
    return (tensor.values(), tensor.offsets()) if tensor.is_nested else (tensor,)


class MemoryTracker(TorchDispatchMode):
    """While active, follows the memory of all tensors that are made, and when they go.

    What kernels and libraries take for themselves, and give back before they return, is not seen.

    Attributes:
        bytes: of the tensors alive.
        saved: bytes of those among them that were saved for the backward pass.
        peaks: the most bytes alive in each section of what was run.

    Args:
        device: whose memory is meant.
        without: tensors whose memory is not counted.
    """

    def __init__(self, device: torch.device, without: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._type = device.type
        self._without = {tensor.untyped_storage()._cdata for tensor in without}
        self._alive: dict[int, int] = {}
        self._saved: set[int] = set()
        self.bytes, self._peak = 0, 0
        self.peaks: list[int] = []
        self._sum: tuple[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts what it gives."""
        self._settle()
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._count(value)
        if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            self._sum = args[0].untyped_storage()._cdata, self.bytes
        else:
            self._peak = max(self._peak, self.bytes)
        return result

    def _settle(self) -> None:
        # Autograd adds up the gradients of what was used twice in place, but not while it is followed. A sum whose
        # first term goes at once would have taken no memory of its own.
        if self._sum is not None and self._sum[0] in self._alive:
            self._peak = max(self._peak, self._sum[1])
        self._sum = None

    def add(self, tensor: Tensor) -> None:
        """Counts a tensor that was there before."""
        self._count(tensor)
        self._peak = max(self._peak, self.bytes)

    def _count(self, tensor: Tensor) -> None:
        for part in _parts(tensor):
            storage = part.untyped_storage()
            key = storage._cdata
            if part.device.type != self._type or key in self._alive or key in self._without:
                continue
            self._alive[key] = storage.nbytes()
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.bytes -= self._alive.pop(key)
        self._saved.discard(key)

    @property
    def saved(self) -> int:
        """See the class."""
        return sum(self._alive[key] for key in self._saved)

    def end_section(self) -> None:
        """Ends a section of `peaks`; the next one begins."""
        self._settle()
        self.peaks.append(self._peak)
        self._peak = self.bytes

    def save(self, tensor: Tensor) -> Tensor:
        """Pack hook of `torch.autograd.graph.saved_tensors_hooks`: marks a tensor as saved, and ends a section."""
        self.end_section()
        tensor = tensor.detach()
        for part in _parts(tensor):
            if part.untyped_storage()._cdata in self._alive:
                self._saved.add(part.untyped_storage()._cdata)
        return tensor

    def load(self, tensor: Tensor) -> Tensor:
        """Unpack hook, which belongs to `save`: ends a section."""
        self.end_section()
        return tensor
