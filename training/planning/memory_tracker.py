"""Measuring the memory that tensors take in the course of a training step."""

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
    """While active, tracks the memory of all tensors that are made, until they are freed.

    It does not see memory that kernels and libraries take for themselves and free before they return.

    Attributes:
        bytes: bytes of the tensors alive.
        saved: bytes of those among them that were saved for the backward pass.
        peaks: largest number of bytes alive in each section of what was run.

    Args:
        device: the device whose memory is tracked.
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
        """Runs an operation, and counts the tensors that it returns."""
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
        # Autograd adds up the gradients of a tensor that was used twice. It does so in place, but not while a dispatch
        # mode is active: then the sum is a new tensor. So a sum whose first term is freed right afterwards does not
        # count as a peak, since without this mode it would have been written over that term.
        if self._sum is not None and self._sum[0] in self._alive:
            self._peak = max(self._peak, self._sum[1])
        self._sum = None

    def add(self, tensor: Tensor) -> None:
        """Counts a tensor that was made before."""
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
        """Bytes of the tensors alive that were saved for the backward pass."""
        return sum(self._alive[key] for key in self._saved)

    def end_section(self) -> None:
        """Ends a section of `peaks` and begins the next one."""
        self._settle()
        self.peaks.append(self._peak)
        self._peak = self.bytes

    def save(self, tensor: Tensor) -> Tensor:
        """Marks a tensor as saved, and ends a section; pack hook of `torch.autograd.graph.saved_tensors_hooks`."""
        self.end_section()
        tensor = tensor.detach()
        for part in _parts(tensor):
            if part.untyped_storage()._cdata in self._alive:
                self._saved.add(part.untyped_storage()._cdata)
        return tensor

    def load(self, tensor: Tensor) -> Tensor:
        """Ends a section; unpack hook that belongs to `save`."""
        self.end_section()
        return tensor
