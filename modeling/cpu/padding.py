"""Padding rows of a product to a multiple, so that oneDNN can use a kernel again.

For each number of rows that it has not seen, oneDNN makes a kernel, which takes about as long as the product, and
keeps it, with some megabytes. So on CPUs tokens and predicted positions come in multiples of the two numbers below.

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
    """Within it, packed batches keep their lengths, so that the cost of other lengths can be derived from theirs."""
    token = _is_enabled.set(False)
    try:
        yield
    finally:
        _is_enabled.reset(token)


def missing_rows(number: int, multiple: int) -> int:
    """The number of rows to add to `number` for a multiple; 0 within `without_row_padding`."""
    return -number % multiple if _is_enabled.get() else 0


def pad_to_multiple(hidden_states: Tensor, bounds: SequenceBounds) -> tuple[Tensor, SequenceBounds]:
    """On a CPU, adds a sequence of zeros to a packed batch (1, T, E) for a multiple of `TOKEN_MULTIPLE` tokens."""
    tokens = hidden_states.shape[1]
    missing = missing_rows(tokens, TOKEN_MULTIPLE)
    if not missing or not can_use_cpu_kernels(hidden_states):
        return hidden_states, bounds
    ends = nn.functional.pad(bounds.cu_seq_lens_q, (0, 1), value=tokens + missing)
    longest = max(bounds.max_length_q, missing)
    return nn.functional.pad(hidden_states, (0, 0, 0, missing)), SequenceBounds(ends, ends, longest, longest)
