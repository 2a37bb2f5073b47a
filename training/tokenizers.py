"""Tokenizers that the user names, and what a model takes from its tokenizer."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..modeling.pretrained import load_part
from .run import naming_the_model


def load_tokenizer(name: str, limit: int, needed: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Loads a tokenizer that the user names.

    Raises:
        ValueError: if it is none of the `tokenizers` library, or lacks a special token that is needed.
    """
    label = f"`tokenizer` ({name})"
    with naming_the_model("tokenizer", name, name):
        tokenizer = load_part(AutoTokenizer, name, label, model_max_length=limit)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"`tokenizer` ({name}) is none of the `tokenizers` library, which is needed")
    for token in needed:
        if getattr(tokenizer, f"{token}_token_id") is None:
            raise ValueError(f"`tokenizer` ({name}) has no {token} token, which training needs")
    return tokenizer


def special_ids(tokenizer: PreTrainedTokenizerFast | None) -> dict[str, Any]:
    """The configuration fields of an encoder-decoder that its tokenizer decides; none without one."""
    if tokenizer is None:
        return {}
    begin = tokenizer.pad_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": begin,
    }
