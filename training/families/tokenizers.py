"""Tokenizers that the user names, and what a model takes from its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ...modeling.loading.load import load_part, naming_the_model


def load_tokenizer(name: str, limit: int, needed: Iterable[str]) -> PreTrainedTokenizerFast:
    """Loads a tokenizer that the user names.

    Raises:
        ValueError: if it is none of the `tokenizers` library, or lacks a special token that is needed.
    """
    label = f"`tokenizer` ({name})"
    with naming_the_model("tokenizer", name, name):
        tokenizer = load_part(AutoTokenizer, name, label, model_max_length=limit)
    return require_special_tokens(tokenizer, needed, label)


def require_special_tokens(tokenizer: Any, needed: Iterable[str], label: str) -> PreTrainedTokenizerFast:
    """Gives the tokenizer back, if it is of the kind that is needed.

    Args:
        tokenizer: of a model, or to train one with.
        needed: names of special tokens, such as "pad".
        label: what errors call it.

    Raises:
        ValueError: if it is none of the `tokenizers` library, or lacks one of the tokens.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        kind = type(tokenizer).__name__
        raise ValueError(f"{label} must have a tokenizer of the `tokenizers` library, not a {kind}")
    for token in needed:
        if getattr(tokenizer, f"{token}_token_id") is None:
            raise ValueError(f"{label} has no {token} token, which is needed")
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
