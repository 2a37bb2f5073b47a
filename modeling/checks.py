"""Checks of a model's inputs: each error names what it got and what is allowed, before an index error."""

from __future__ import annotations

import torch
from torch import Tensor


def is_readable(ids: Tensor) -> bool:
    """Whether ids can be looked at: reading from an accelerator waits for it, and breaks a compiled graph."""
    return ids.device.type == "cpu" and ids.numel() > 0 and not torch.compiler.is_compiling()


def check_ids(name: str, ids: Tensor | None, size: int, size_name: str) -> None:
    """Refuses ids outside 0 to `size` - 1, where that can be read without waiting for an accelerator.

    Raises:
        ValueError: naming the argument, the id and the limit.
    """
    if ids is None or not is_readable(ids):
        return
    least, largest = (int(value) for value in torch.aminmax(ids))
    if least < 0 or largest >= size:
        wrong = least if least < 0 else largest
        raise ValueError(f"`{name}` holds the id {wrong}, but `{size_name}` ({size}) allows 0 to {size - 1}")


def require_exactly_one(input_ids: Tensor | None, inputs_embeds: Tensor | None, prefix: str = "") -> Tensor:
    """The one of the two that is given.

    Raises:
        ValueError: if none is, or both are.
    """
    given = input_ids if inputs_embeds is None else inputs_embeds
    if given is None or (input_ids is not None and inputs_embeds is not None):
        raise ValueError(f"give either `{prefix}input_ids` or `{prefix}inputs_embeds`, and not both")
    return given


def check_length(length: int, limit: int, past: int = 0) -> None:
    """Refuses a sequence longer than the positions, with the `past` tokens that are in a cache.

    Raises:
        ValueError: naming both lengths, and how to truncate.
    """
    # A static cache counts its tokens on the device.
    if isinstance(past, int):
        length += past
    if length > limit:
        raise ValueError(
            f"the sequence has {length} tokens, {length} > {limit} (`max_position_embeddings`): "
            f"truncate it, e.g. `tokenizer(..., truncation=True, max_length={limit})`"
        )


def check_positions(position_ids: Tensor, limit: int) -> None:
    """Refuses positions beyond the last, where they can be read without waiting for an accelerator.

    Raises:
        ValueError: see `check_length`; or for a negative position.
    """
    if is_readable(position_ids):
        check_length(int(position_ids.max()) + 1, limit)
        check_ids("position_ids", position_ids, limit, "max_position_embeddings")


def check_source(length: int, attention_mask: Tensor | None) -> None:
    """Refuses a source without tokens, of which nothing could be read.

    Raises:
        ValueError: for an empty source, or naming the row that is padding alone.
    """
    if length == 0:
        raise ValueError("the source is empty: give it one token or more")
    if attention_mask is None or attention_mask.dim() != 2 or not is_readable(attention_mask):
        return
    empty = ~attention_mask.bool().any(dim=1)
    if bool(empty.any()):
        raise ValueError(f"row {int(empty.nonzero()[0])} of the source is padding alone: give it one token or more")
