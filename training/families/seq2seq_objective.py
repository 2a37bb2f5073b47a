"""Targets that a decoder predicts, token by token: the task of the encoder-decoders, and its figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..examples.masking import IGNORED
from ..generation.text_metrics import perplexity
from ..loop.objective import Examples


class Epochs(Protocol):
    """What makes examples of rows."""

    def epoch(self, number: int) -> Examples:
        """The examples of an epoch, in its order."""

    def in_order(self) -> Examples:
        """All examples in the order of the rows."""


class Seq2SeqObjective:
    """Predicting each token of a target from what is encoded and the tokens before it, for `Loop`.

    Args:
        train: makes the training examples.
        held_out: makes the held-out ones.
        collate: makes a batch of examples, with `labels`.
    """

    loss_name = "loss"

    def __init__(self, train: Epochs, held_out: Epochs, collate: Callable[[list[Any]], dict[str, Tensor]]) -> None:
        self._train, self._held_out, self.collate = train, held_out, collate

    def epoch(self, number: int) -> Examples:
        """See `loop.Objective`."""
        return self._train.epoch(number)

    def held_out(self) -> Examples:
        """See `loop.Objective`."""
        return self._held_out.in_order()

    def tokens(self, batch: dict[str, Tensor]) -> int:
        """See `loop.Objective`: those of the targets, and those of the sources where they are texts."""
        source = batch["attention_mask"].sum() if "attention_mask" in batch else 0
        return int((batch["labels"] != IGNORED).sum() + source)

    def counts(self, batch: dict[str, Tensor]) -> dict[str, int]:
        """See `loop.Objective`."""
        return {"num_items_in_batch": int((batch["labels"] != IGNORED).sum())}

    def forward(self, model: nn.Module, batch: dict[str, Tensor], **counts: Tensor) -> Any:
        """See `loop.Objective`."""
        return model(**batch, **counts)

    def sums(self, output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `loop.Objective`."""
        return target_sums(output.logits, batch["labels"])

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """See `loop.Objective`."""
        return target_metrics(sums)


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
