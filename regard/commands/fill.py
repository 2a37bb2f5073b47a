"""Filling the masks of a text with a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..loading import for_filling, load_network
from ..modeling.loading.load import require_text


@dataclass(frozen=True)
class Guess:
    """A word piece for a mask, and its probability."""

    token: str
    probability: float


@torch.inference_mode()
def fill_masks(text: str, model: str | Path = "runs/bert", top: int = 5) -> list[list[Guess]]:
    """Guesses the masked word pieces of a text.

    Args:
        text: the text, with the tokenizer's mask token once or more.
        model: folder of a run or of a model, or a Hub id.
        top: number of guesses for each mask.

    Returns:
        For each mask, the most probable word pieces, best first.

    Raises:
        ValueError: if there is no such model, the text has no mask or is too long, or `top` is out of range.
    """
    network, tokenizer = load_network(model, for_filling)
    if tokenizer.mask_token_id is None:
        raise ValueError(f"`model` ({model}) has a tokenizer without a mask token")
    require_text(text, "text")
    inputs = tokenizer(text, return_tensors="pt")
    masks = inputs["input_ids"][0] == tokenizer.mask_token_id
    if not masks.any():
        raise ValueError(f"`text` ({text!r}) has no {tokenizer.mask_token}: put one where a word is to be guessed")
    if not 1 <= top <= network.config.vocab_size:
        raise ValueError(f"`top` ({top}) must be at least 1 and at most the vocabulary's {network.config.vocab_size}")
    best = network(**inputs).logits[0, masks].softmax(-1).topk(top)
    return [
        [Guess(str(tokenizer.decode([index])), probability) for index, probability in zip(row, values, strict=True)]
        for row, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
