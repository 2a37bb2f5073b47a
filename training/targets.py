"""Figures of targets that a decoder predicts, token by token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .masking import IGNORED
from .metrics import perplexity


def target_sums(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """What an evaluation adds up of targets, from logits (B, T, V) and labels (B, T)."""
    counted = labels != IGNORED
    right = logits.argmax(-1) == labels
    return {
        "predicted": counted.sum(),
        "loss": nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum"),
        "right": (right & counted).sum(),
        "targets": torch.tensor(len(labels), device=labels.device),
        "targets_right": (right | ~counted).all(dim=1).sum(),
    }


def target_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Figures of targets, each token predicted from the true ones before it.

    A target whose tokens are all right that way is also what greedy generation gives, so `exact_match` is greedy
    generation's.
    """
    return {
        "loss": sums["loss"] / sums["predicted"],
        "perplexity": perplexity(sums["loss"], int(sums["predicted"])),
        "token_accuracy": sums["right"] / sums["predicted"],
        "exact_match": sums["targets_right"] / sums["targets"],
    }
