"""The objective of the encoder-decoders and the captioner: predicting a target token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..examples.masking import IGNORED
from ..generation.text_metrics import perplexity
from ..loop.objective import Epoch, Objective


class Examples(Protocol):
    """Makes the examples of each epoch."""

    def epoch(self, number: int) -> Epoch:
        """The examples of an epoch, in its order."""

    def in_order(self) -> Epoch:
        """All examples, in the order of the rows."""


class Seq2SeqObjective(Objective):
    """Predicts each token of a target from the encoder's output and the target's earlier tokens.

    Args:
        train: makes the training examples.
        held_out: makes the held-out examples.
        collate: makes a batch of examples, with `labels`.
    """

    loss_name = "loss"

    def __init__(self, train: Examples, held_out: Examples, collate: Callable[[list[Any]], dict[str, Tensor]]) -> None:
        self._train, self._held_out, self.collate = train, held_out, collate

    def epoch(self, number: int) -> Epoch:
        return self._train.epoch(number)

    def held_out(self) -> Epoch:
        return self._held_out.in_order()

    def tokens(self, batch: dict[str, Tensor]) -> int:
        """The number of target tokens and, where the sources are texts, of source tokens, without padding."""
        source = batch["attention_mask"].sum() if "attention_mask" in batch else 0
        return int((batch["labels"] != IGNORED).sum() + source)

    def counts(self, batch: dict[str, Tensor]) -> dict[str, int]:
        return {"num_items_in_batch": int((batch["labels"] != IGNORED).sum())}

    def forward(self, model: nn.Module, batch: dict[str, Tensor], **counts: Tensor) -> Any:
        return model(**batch, **counts)

    def sums(self, output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return target_sums(output.logits, batch["labels"])

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return target_metrics(sums)


def target_sums(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The quantities that an evaluation adds up over batches, from logits (B, T, V) and labels (B, T)."""
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
    """Metrics of targets, where each token is predicted from the true tokens before it.

    `exact_match` equals that of greedy generation, which makes the same target wherever all predictions are right.
    """
    return {
        "loss": sums["loss"] / sums["predicted"],
        "perplexity": perplexity(sums["loss"], int(sums["predicted"])),
        "token_accuracy": sums["right"] / sums["predicted"],
        "exact_match": sums["targets_right"] / sums["targets"],
    }
