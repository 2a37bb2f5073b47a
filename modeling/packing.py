"""Sequences of different lengths in one row, without padding, and attention that stays within each of them.

A packed batch is one row, (1, T), that holds B sequences one after another. `cu_seq_lens_q` (B + 1) says where each
begins and ends, as in transformers' `DataCollatorWithFlattening` and the variable-length kernels of FlashAttention
(Dao, 2024, https://arxiv.org/abs/2307.08691).

Dimension letters: B sequences, L their padded length, T tokens of all, H heads, D width of a head, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils.generic import is_flash_attention_requested


class SequenceBounds(NamedTuple):
    """Where the sequences of a packed batch begin and end, under the names that attention functions know.

    Attributes:
        cu_seq_lens_q: of the queries, (B + 1), int32, from 0 to their number.
        cu_seq_lens_k: of the keys.
        max_length_q: the most queries that a sequence has.
        max_length_k: the most keys.
    """

    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int


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
        tensors: (B, L, ...) or (1, L, ...) each; those that are None are left out.
        attention_mask: 1 for tokens, 0 for padding, (B, L); None: no padding.
        rows: B.
        length: L.

    Returns:
        The tensors, (1, T, ...), and the bounds of the sequences.

    Raises:
        ValueError: if the mask is of another shape, or a row is padding alone.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    whole = {name: tensor.expand(rows, *tensor.shape[1:]).flatten(0, 1) for name, tensor in given.items()}
    if attention_mask is None:
        lengths = torch.full((rows,), length, device=next(iter(whole.values())).device)
    elif attention_mask.shape != (rows, length):
        raise ValueError(
            f"`attention_mask` of shape {tuple(attention_mask.shape)} can't be packed: it must be {(rows, length)}, "
            "1 for tokens and 0 for padding"
        )
    else:
        lengths = attention_mask.bool().sum(dim=1)
        if bool((lengths == 0).any()):
            raise ValueError(f"row {int((lengths == 0).nonzero()[0])} is padding alone, which can't be packed")
        kept = attention_mask.flatten().nonzero().squeeze(1)
        whole = {name: tensor.index_select(0, kept) for name, tensor in whole.items()}
    return {name: tensor.unsqueeze(0) for name, tensor in whole.items()}, sequence_bounds(lengths)


def count_predicted(labels: Tensor, cu_seq_lens: Tensor | None = None) -> Tensor:
    """How many labels, (B, L) or packed (1, T), each sequence has that are not -100: (B,)."""
    predicted = labels != -100
    if cu_seq_lens is None:
        return predicted.sum(dim=1)
    before = nn.functional.pad(predicted.flatten().cumsum(0), (1, 0))
    return before.index_select(0, cu_seq_lens).diff()


def take_bounds(options: dict[str, Any]) -> SequenceBounds | None:
    """Takes the bounds out of keyword arguments; None if there are none."""
    found = {name: options.pop(name, None) for name in SequenceBounds._fields}
    ends = found["cu_seq_lens_q"]
    if ends is None:
        return None
    longest = found["max_length_q"]
    longest = int(ends.diff().max()) if longest is None else longest
    return SequenceBounds(ends, ends, longest, longest)


def check_packed(given: Tensor, attention_mask: Tensor | None, wants_weights: bool) -> None:
    """Refuses what makes no sense with a packed batch.

    Raises:
        ValueError: if it has several rows or an attention mask, or attention weights are asked for.
    """
    if given.shape[0] != 1:
        raise ValueError(f"a packed batch (`cu_seq_lens_q`) is a single row, got {given.shape[0]}")
    if attention_mask is not None:
        raise ValueError("a packed batch (`cu_seq_lens_q`) holds no padding: give it no `attention_mask`")
    if wants_weights:
        raise ValueError(
            "a packed batch (`cu_seq_lens_q`, or with `predicted_only`) gives no attention weights: give a padded one"
        )


def position_ids_of(bounds: SequenceBounds, tokens: int) -> Tensor:
    """Positions in a packed batch, (T,), counted from 0 in each sequence."""
    ends = bounds.cu_seq_lens_q
    places = torch.arange(tokens, device=ends.device)
    return places - ends[torch.bucketize(places, ends[1:], right=True)]


# For each number of rows that it has not seen, oneDNN makes a kernel, which takes about as long as the product, and
# keeps it, with some megabytes. So tokens and predicted positions come in multiples of these.
TOKENS_AT_ONCE, POSITIONS_AT_ONCE = 64, 32
_filling: ContextVar[bool] = ContextVar("_filling", default=True)


@contextmanager
def without_filling() -> Iterator[None]:
    """Leaves packed batches as long as they are, so that what they take can be told for other lengths."""
    token = _filling.set(False)
    try:
        yield
    finally:
        _filling.reset(token)


def missing_rows(number: int, at_once: int) -> int:
    """How many rows are missing for a multiple of `at_once`."""
    return -number % at_once if _filling.get() else 0


def pad_to_multiple(hidden_states: Tensor, bounds: SequenceBounds) -> tuple[Tensor, SequenceBounds]:
    """Adds a sequence of zeros to a packed batch (1, T, E), if need be, for a multiple of `TOKENS_AT_ONCE` tokens."""
    tokens = hidden_states.shape[1]
    missing = missing_rows(tokens, TOKENS_AT_ONCE)
    if not missing:
        return hidden_states, bounds
    ends = nn.functional.pad(bounds.cu_seq_lens_q, (0, 1), value=tokens + missing)
    longest = max(bounds.max_length_q, missing)
    return nn.functional.pad(hidden_states, (0, 0, 0, missing)), SequenceBounds(ends, ends, longest, longest)


class Chosen(NamedTuple):
    """Positions of a packed batch that alone are computed, in the order of the batch.

    Attributes:
        positions: their places in the batch, (P,).
        bounds: the sequences, with these positions as queries and all as keys.
    """

    positions: Tensor
    bounds: SequenceBounds


def choose(positions: Tensor, bounds: SequenceBounds) -> tuple[Chosen, Tensor]:
    """Chooses positions, and each sequence's first.

    Args:
        positions: places in the batch, (P,), in any order.
        bounds: of the sequences.

    Returns:
        What is chosen, and where in it the first of each sequence and then the positions are found, (B + P,).
    """
    ends = bounds.cu_seq_lens_q
    ordered, order = torch.cat([ends[:-1].to(positions.dtype), positions]).sort(stable=True)
    found = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    chosen_ends = torch.searchsorted(ordered, ends.to(ordered.dtype), out_int32=True)
    # At most its tokens and its first again: to count how many a sequence has would wait for an accelerator.
    chosen_bounds = bounds._replace(cu_seq_lens_q=chosen_ends, max_length_q=bounds.max_length_q + 1)
    return Chosen(ordered, chosen_bounds), found


def attend_packed(
    attention: Callable, module: Any, query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, **options: Any
) -> tuple[Tensor, None]:
    """Attends within each sequence of a packed batch.

    FlashAttention has kernels for this. For others, sequences in a row that are equally long are given to the
    attention function together; but with CUDA, where to read the bounds would wait for the device, "sdpa" is left to
    PyTorch's own kernels for sequences of different lengths where they serve.

    Args:
        attention: in the signature of transformers' attention functions.
        module: gives the configuration, with the name of that function.
        query: (1, H, queries of all, D).
        key: (1, H, T, D).
        value: (1, H, T, D).
        bounds: of the sequences.
        **options: for the attention function.

    Returns:
        The context, (1, queries of all, H, D), and no weights.
    """
    if is_flash_attention_requested(module.config):
        context, _ = attention(module, query, key, value, None, **bounds._asdict(), **options)
    elif module.config._attn_implementation == "sdpa" and _has_jagged_kernel(query):
        context = _attend_jagged(query, key, value, bounds, **{"is_causal": module.is_causal, **options})
    else:
        context = _attend_each(partial(attention, module), query, key, value, bounds, **options)
    return context, None


def _has_jagged_kernel(query: Tensor) -> bool:
    # Other devices have none; without one PyTorch refuses projections that are parts of one tensor.
    return query.device.type == "cuda" and query.dtype != torch.float64 and query.shape[-1] % 8 == 0


def _attend_each(
    attention: Callable, query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, **options: Any
) -> Tensor:
    lengths = zip(bounds.cu_seq_lens_q.diff().tolist(), bounds.cu_seq_lens_k.diff().tolist(), strict=True)
    runs = [(*each, len(list(run))) for each, run in groupby(lengths)]
    of_queries, of_keys = ([run[side] * run[2] for run in runs] for side in (0, 1))
    parts = zip(runs, query.split(of_queries, 2), key.split(of_keys, 2), value.split(of_keys, 2), strict=True)
    contexts = []
    for (_, _, times), *run in parts:
        rows = (part.unflatten(2, (times, -1)).squeeze(0).transpose(0, 1) for part in run)  # (times, H, length, D)
        context, _ = attention(*rows, None, **options)
        contexts.append(context.flatten(0, 1))  # (times * length, H, D)
    return (torch.cat(contexts) if len(contexts) > 1 else contexts[0]).unsqueeze(0)


def _attend_jagged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: SequenceBounds,
    scaling: float,
    dropout: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    def jagged(part: Tensor, ends: Tensor, longest: int) -> Tensor:
        rows = part.squeeze(0).transpose(0, 1)  # (T, H, D)
        # That none is empty must be said: the fused kernels leave out batches with empty sequences.
        nested = torch.nested.nested_tensor_from_jagged(rows, ends.long(), min_seqlen=1, max_seqlen=longest)
        return nested.transpose(1, 2)  # (B, H, lengths, D)

    context = nn.functional.scaled_dot_product_attention(
        jagged(query, bounds.cu_seq_lens_q, bounds.max_length_q),
        jagged(key, bounds.cu_seq_lens_k, bounds.max_length_k),
        jagged(value, bounds.cu_seq_lens_k, bounds.max_length_k),
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scaling,
    )
    return context.transpose(1, 2).values().unsqueeze(0)
