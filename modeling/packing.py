"""Packed batches: sequences of different lengths in one row, without padding.

A packed batch is one row, (1, T), that holds B sequences one after another. `cu_seq_lens_q` (B + 1) says where each
begins and ends, as in transformers' `DataCollatorWithFlattening` and the variable-length kernels of FlashAttention
(Dao, 2024, https://arxiv.org/abs/2307.08691).

Dimension letters: B sequences, L their padded length, T tokens of all sequences, P positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .cpu import SequenceBounds


def sequence_bounds(lengths: Tensor) -> SequenceBounds:
    """The bounds of sequences of these lengths, (B,)."""
    ends = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    return SequenceBounds(ends, ends, longest, longest)


def pack(
    tensors: dict[str, Tensor | None], attention_mask: Tensor | None, rows: int, length: int
) -> tuple[dict[str, Tensor], SequenceBounds]:
    """Packs a padded batch.

    Args:
        tensors: tensors of shape (B, L, ...) or (1, L, ...); those that are None are left out.
        attention_mask: 1 for tokens, 0 for padding, (B, L); None: no padding.
        rows: B.
        length: L.

    Returns:
        The tensors, (1, T, ...), and the bounds of the sequences.

    Raises:
        ValueError: if the mask has another shape, or a row is nothing but padding.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    packed = {name: tensor.expand(rows, *tensor.shape[1:]).flatten(0, 1) for name, tensor in given.items()}
    if attention_mask is None:
        lengths = torch.full((rows,), length, device=next(iter(packed.values())).device)
    elif attention_mask.shape != (rows, length):
        raise ValueError(
            f"`attention_mask` of shape {tuple(attention_mask.shape)} cannot be packed: it must be {(rows, length)}, "
            "1 for tokens and 0 for padding"
        )
    else:
        lengths = attention_mask.bool().sum(dim=1)
        if bool((lengths == 0).any()):
            raise ValueError(f"row {int((lengths == 0).nonzero()[0])} is nothing but padding, which cannot be packed")
        kept = attention_mask.flatten().nonzero().squeeze(1)
        packed = {name: tensor.index_select(0, kept) for name, tensor in packed.items()}
    return {name: tensor.unsqueeze(0) for name, tensor in packed.items()}, sequence_bounds(lengths)


def count_predicted(labels: Tensor, cu_seq_lens: Tensor | None = None) -> Tensor:
    """The number of labels, (B, L) or packed (1, T), in each sequence that are not -100: (B,)."""
    predicted = labels != -100
    if cu_seq_lens is None:
        return predicted.sum(dim=1)
    before = nn.functional.pad(predicted.flatten().cumsum(0), (1, 0))
    return before.index_select(0, cu_seq_lens).diff()


def take_bounds(options: dict[str, Any]) -> SequenceBounds | None:
    """Removes the bounds from keyword arguments and returns them; None if the batch is not packed."""
    taken = {name: options.pop(name, None) for name in SequenceBounds._fields}
    ends = taken["cu_seq_lens_q"]
    if ends is None:
        return None
    longest = taken["max_length_q"]
    longest = int(ends.diff().max()) if longest is None else longest
    return SequenceBounds(ends, ends, longest, longest)


def check_packed(inputs: Tensor, attention_mask: Tensor | None, wants_weights: bool) -> None:
    """Checks what is passed with a packed batch.

    Raises:
        ValueError: if the batch has several rows or an attention mask, or attention weights are requested.
    """
    if inputs.shape[0] != 1:
        raise ValueError(f"a packed batch (`cu_seq_lens_q`) must be a single row, got {inputs.shape[0]}")
    if attention_mask is not None:
        raise ValueError("a packed batch (`cu_seq_lens_q`) has no padding: do not pass an `attention_mask` with it")
    if wants_weights:
        raise ValueError(
            "a packed batch (`cu_seq_lens_q`, or `predicted_only`) returns no attention weights: pass a padded batch"
        )


def position_ids_of(bounds: SequenceBounds, tokens: int) -> Tensor:
    """Positions in a packed batch, (T,), counted from 0 in each sequence."""
    ends = bounds.cu_seq_lens_q
    places = torch.arange(tokens, device=ends.device)
    return places - ends[torch.bucketize(places, ends[1:], right=True)]


class SelectedPositions(NamedTuple):
    """The only positions of a packed batch whose outputs are computed, in the order of the batch.

    Attributes:
        positions: places in the batch, (P,).
        bounds: bounds of the sequences, with these positions as queries and all positions as keys.
    """

    positions: Tensor
    bounds: SequenceBounds


def select_positions(positions: Tensor, bounds: SequenceBounds) -> tuple[SelectedPositions, Tensor]:
    """Selects the first token of each sequence and the requested positions.

    Args:
        positions: places in the batch, (P,), in any order.
        bounds: bounds of the sequences.

    Returns:
        The selection; and the index in it of each sequence's first token, then of each requested position, (B + P,).
    """
    ends = bounds.cu_seq_lens_q
    ordered, order = torch.cat([ends[:-1].to(positions.dtype), positions]).sort(stable=True)
    indices = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    selected_ends = torch.searchsorted(ordered, ends.to(ordered.dtype), out_int32=True)
    # At most all tokens and the first one twice: counting the longest would wait for an accelerator.
    selected_bounds = bounds._replace(cu_seq_lens_q=selected_ends, max_length_q=bounds.max_length_q + 1)
    return SelectedPositions(ordered, selected_bounds), indices
