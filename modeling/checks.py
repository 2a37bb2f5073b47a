"""Checks of a model's inputs: they raise an error that names the value and the limit, before an index error does.

None of them reads a tensor where that would wait for an accelerator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu import readable_values


def check_ids(name: str, ids: Tensor | None, size: int, size_name: str) -> None:
    """Checks that ids are at least 0 and less than `size`.

    Raises:
        ValueError: naming the argument, the id and the limit.
    """
    values = readable_values(ids)
    if values is None:
        return
    least, largest = (int(value) for value in torch.aminmax(values))
    if least < 0 or largest >= size:
        wrong = least if least < 0 else largest
        raise ValueError(f"`{name}` contains the id {wrong}, but `{size_name}` ({size}) allows 0 to {size - 1}")


def require_exactly_one(input_ids: Tensor | None, inputs_embeds: Tensor | None, prefix: str = "") -> Tensor:
    """Returns the one of the two that is given.

    Raises:
        ValueError: if neither or both are given.
    """
    given = input_ids if inputs_embeds is None else inputs_embeds
    if given is None or (input_ids is not None and inputs_embeds is not None):
        raise ValueError(f"give either `{prefix}input_ids` or `{prefix}inputs_embeds`, and not both")
    return given


def check_length(length: int, limit: int, past: int = 0) -> None:
    """Checks that a sequence, with the `past` tokens that are in a cache, is no longer than the positions.

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
    """Checks that positions are at least 0 and less than `limit`.

    Raises:
        ValueError: as `check_length` does, or for a negative position.
    """
    values = readable_values(position_ids)
    if values is not None:
        check_length(int(values.max()) + 1, limit)
        check_ids("position_ids", values, limit, "max_position_embeddings")


def check_source(length: int, attention_mask: Tensor | None) -> None:
    """Checks that every row of a source has a token.

    Raises:
        ValueError: for an empty source, or naming the row that is nothing but padding.
    """
    if length == 0:
        raise ValueError("the source is empty: it must have at least one token")
    values = readable_values(attention_mask)
    if values is None or values.dim() != 2:
        return
    empty = ~values.bool().any(dim=1)
    if bool(empty.any()):
        row = int(empty.nonzero()[0])
        raise ValueError(f"row {row} of the source is nothing but padding: it must have at least one token")
