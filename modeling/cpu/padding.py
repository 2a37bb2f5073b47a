"""Padding the number of rows of a product to a multiple, so that oneDNN can reuse its kernels.

For each new number of rows, oneDNN compiles a kernel, which takes about as long as the product itself, and keeps it in
some megabytes of memory. So on CPUs, tokens and predicted positions are padded to multiples of the two numbers below.

Dimension letters: T tokens of a packed batch, E width of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

from .attention import SequenceBounds
from .kernel_choice import can_use_cpu_kernels

TOKEN_MULTIPLE, POSITION_MULTIPLE = 64, 32
_is_enabled: ContextVar[bool] = ContextVar("_is_enabled", default=True)


@contextmanager
def without_row_padding() -> Iterator[None]:
    """A context in which packed batches are not padded, so that costs can be extrapolated from their lengths."""
    token = _is_enabled.set(False)
    try:
        yield
    finally:
        _is_enabled.reset(token)


def missing_rows(number: int, multiple: int) -> int:
    """The number of rows to add to `number` to reach a multiple; 0 within `without_row_padding`."""
    return -number % multiple if _is_enabled.get() else 0


def pad_to_multiple(hidden_states: Tensor, bounds: SequenceBounds) -> tuple[Tensor, SequenceBounds]:
    """On a CPU, pads a packed batch (1, T, E) to a multiple of `TOKEN_MULTIPLE` tokens with a sequence of zeros."""
    tokens = hidden_states.shape[1]
    missing = missing_rows(tokens, TOKEN_MULTIPLE)
    if not missing or not can_use_cpu_kernels(hidden_states):
        return hidden_states, bounds
    ends = nn.functional.pad(bounds.cu_seq_lens_q, (0, 1), value=tokens + missing)
    longest = max(bounds.max_length_q, missing)
    return nn.functional.pad(hidden_states, (0, 0, 0, missing)), SequenceBounds(ends, ends, longest, longest)
