"""Filling the masks of a text with a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from .training.run import model_path, naming_the_model


@dataclass(frozen=True)
class Guess:
    """A word piece for a mask, and its probability."""

    token: str
    probability: float


@torch.inference_mode()
def fill_masks(text: str, model: str | Path = "runs/bert", top: int = 5) -> list[list[Guess]]:
    """Guesses the masked word pieces of a text.

    Args:
        text: holds the tokenizer's mask token once or more.
        model: folder of a run or of a model, or a Hub id.
        top: number of guesses for each mask.

    Returns:
        For each mask, the most probable word pieces, best first.

    Raises:
        ValueError: if there is no mask in the text, the text is too long, or there is no model.
    """
    path = model_path(model)
    with naming_the_model("model", model, path):
        tokenizer = AutoTokenizer.from_pretrained(path)
        network = AutoModelForMaskedLM.from_pretrained(path, use_safetensors=True).eval()
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
