"""Loading and checking of tokenizers, and the configuration fields that depend on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ...modeling.loading.load import load_part, naming_the_model


def load_tokenizer(name: str, limit: int, needed: Iterable[str]) -> PreTrainedTokenizerFast:
    """Loads the tokenizer that the setting `tokenizer` names.

    Args:
        name: a folder or Hub id.
        limit: the tokenizer's `model_max_length`.
        needed: names of the special tokens that it must have, such as "pad".

    Raises:
        ValueError: if there is no such tokenizer, it is not one of the `tokenizers` library, or it lacks one of the
            special tokens.
    """
    label = f"`tokenizer` ({name})"
    with naming_the_model("tokenizer", name, name):
        tokenizer = load_part(AutoTokenizer, name, label, model_max_length=limit)
    return require_special_tokens(tokenizer, needed, label)


def require_special_tokens(tokenizer: Any, needed: Iterable[str], label: str) -> PreTrainedTokenizerFast:
    """Checks a tokenizer and returns it.

    Args:
        tokenizer: tokenizer of a model.
        needed: names of the special tokens that it must have, such as "pad".
        label: name of the tokenizer or model, for errors.

    Raises:
        ValueError: if it is not a tokenizer of the `tokenizers` library, or lacks one of the special tokens.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        kind = type(tokenizer).__name__
        raise ValueError(f"{label} must have a tokenizer of the `tokenizers` library, not a {kind}")
    for token in needed:
        if getattr(tokenizer, f"{token}_token_id") is None:
            raise ValueError(f"{label} has no {token} token, which is needed")
    return tokenizer


def special_ids(tokenizer: PreTrainedTokenizerFast | None) -> dict[str, Any]:
    """The configuration fields of an encoder-decoder that depend on its tokenizer; empty without a tokenizer."""
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
