"""The choice of an attention kernel for a device, and attention within the sequences of a packed batch.

A packed batch is one row, (1, T), that holds B sequences one after another.

Dimension letters: B sequences, T tokens of all sequences, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils.generic import is_flash_attention_requested


def attention_kernel(name: str, query: Tensor, dropout: float) -> str:
    """Returns the attention implementation to use, which may differ from the one that the configuration names.

    Args:
        name: the implementation that the configuration names.
        query: the queries.
        dropout: dropout of the attention weights.
    """
    if name == "sdpa" and dropout and query.device.type == "cpu":
        # On CPUs, PyTorch has no fused kernel with dropout; its substitute is slower than the eager implementation.
        return "eager"
    return name


class SequenceBounds(NamedTuple):
    """The bounds of the sequences in a packed batch, under the argument names of transformers' attention functions.

    Attributes:
        cu_seq_lens_q: cumulative lengths of the sequences in queries, (B + 1,), int32, starting at 0.
        cu_seq_lens_k: cumulative lengths of the sequences in keys, (B + 1,), int32, starting at 0.
        max_length_q: an upper bound of the number of queries in a sequence.
        max_length_k: an upper bound of the number of keys in a sequence.
    """

    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int


def attend_packed(
    attention: Callable, module: Any, query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, **options: Any
) -> tuple[Tensor, None]:
    """Attends within each sequence of a packed batch.

    FlashAttention has kernels for this. For other implementations, consecutive sequences of the same length are passed
    to the attention function together. On CUDA, where reading the bounds would make the host wait for the device,
    "sdpa" uses PyTorch's own kernels for sequences of different lengths if they support the tensors.

    Args:
        attention: attention function with the signature of transformers' attention functions.
        module: attention layer, whose configuration names the attention function.
        query: (1, H, queries of all sequences, D).
        key: (1, H, T, D).
        value: (1, H, T, D).
        bounds: bounds of the sequences.
        **options: options of the attention function.

    Returns:
        The context, (1, queries of all sequences, H, D), and None for the weights.
    """
    if is_flash_attention_requested(module.config):
        context, _ = attention(module, query, key, value, None, **bounds._asdict(), **options)
    elif module.config._attn_implementation == "sdpa" and _has_jagged_kernel(query):
        context = _attend_jagged(query, key, value, bounds, **{"is_causal": module.is_causal, **options})
    else:
        context = _attend_each(partial(attention, module), query, key, value, bounds, **options)
    return context, None


def _has_jagged_kernel(query: Tensor) -> bool:
    # PyTorch has jagged kernels for CUDA only. Without one, it refuses projections that are views of one tensor.
    return query.device.type == "cuda" and query.dtype != torch.float64 and query.shape[-1] % 8 == 0


def _attend_each(
    attention: Callable, query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, **options: Any
) -> Tensor:
    lengths = zip(bounds.cu_seq_lens_q.diff().tolist(), bounds.cu_seq_lens_k.diff().tolist(), strict=True)
    runs = [(*each, len(list(run))) for each, run in groupby(lengths)]
    query_sizes, key_sizes = ([run[side] * run[2] for run in runs] for side in (0, 1))
    parts = zip(runs, query.split(query_sizes, 2), key.split(key_sizes, 2), value.split(key_sizes, 2), strict=True)
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
        # Without a minimum length, PyTorch assumes that sequences may be empty, which its fused kernels don't support.
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
