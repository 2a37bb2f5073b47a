"""Generation of texts with a trained model, and metrics of the generated texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import PreTrainedTokenizerBase

from ..run.settings import MOST_BEAMS, Bounds
from .text_metrics import bleu, chrf, exact_match


def require_beams(beams: int) -> None:
    """Raises a ValueError if a number of beams is out of range."""
    Bounds(least=1, most=MOST_BEAMS).require("beams", beams)


@torch.inference_mode()
def generate_texts(
    model: Any, tokenizer: PreTrainedTokenizerBase, batches: Iterable[dict[str, Any]], **options: Any
) -> list[str]:
    """Generates a text for each row of the batches, greedily unless the options say otherwise.

    Args:
        model: an encoder-decoder.
        tokenizer: tokenizer of the targets.
        batches: batches of the model's inputs; labels are ignored.
        **options: arguments of the model's `generate`.
    """
    texts: list[str] = []
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        generated = model.generate(**send_to_device(inputs, model.device), **options)
        texts += tokenizer.batch_decode(generated, skip_special_tokens=True)
    return texts


def text_figures(predictions: list[str], references: list[str]) -> dict[str, float]:
    """Exact match (0 to 1), chrF and BLEU (0 to 100) of generated texts."""
    return {
        "exact_match": exact_match(predictions, references),
        "chrf": chrf(predictions, references),
        "bleu": bleu(predictions, references),
    }


def exact_match_by(keys: Iterable[int], predictions: list[str], references: list[str]) -> list[dict[str, float]]:
    """Exact match of texts in groups: those with the same key form a group.

    Args:
        keys: key of each text, such as its number of words.
        predictions: the generated texts.
        references: the correct text for each prediction.

    Returns:
        For each key, in ascending order: the `key`, the `number` of texts and their `exact_match`.
    """
    groups: dict[int, list[bool]] = defaultdict(list)
    for key, prediction, reference in zip(keys, predictions, references, strict=True):
        groups[key].append(prediction == reference)
    return [
        {"key": key, "number": len(right), "exact_match": sum(right) / len(right)}
        for key, right in sorted(groups.items())
    ]
