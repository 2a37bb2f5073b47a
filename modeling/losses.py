"""Losses over a whole batch or a part of one, checks of labels, and shifting them.

Dimension letters: B batch, L length, P positions, E width of the model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .cpu import readable_values, vocabulary_loss


def check_labels(labels: Tensor, num_classes: int, name: str = "labels") -> None:
    """Checks that class labels are at least 0 and less than `num_classes`; -100 marks a position to ignore.

    Raises:
        ValueError: naming the argument, the label and what is allowed.
    """
    values = readable_values(labels)
    if values is None:
        return
    counted = values[values != -100]
    if counted.numel() and not (int(counted.min()) >= 0 and int(counted.max()) < num_classes):
        wrong = int(counted.min()) if int(counted.min()) < 0 else int(counted.max())
        raise ValueError(f"`{name}` contains {wrong}, but labels are 0 to {num_classes - 1}, or -100 to ignore one")


def mean_loss(total: Tensor, count: Tensor | int, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Divides a summed loss by the number of items.

    Args:
        total: the summed loss.
        count: number of items in it; for 0 the loss and its gradients are 0, not NaN.
        num_items_in_batch: number of items in the whole batch, over accumulation steps and processes, of which this
            is a part; replaces `count`.
    """
    items = count if num_items_in_batch is None else num_items_in_batch
    return total / torch.as_tensor(items, device=total.device).clamp(min=1)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    name: str = "labels",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Mean cross-entropy, in float32, of logits (..., classes) and labels (...), where -100 is ignored.

    It is divided as by `mean_loss`.

    Raises:
        ValueError: if a label is outside the classes.
    """
    check_labels(labels, logits.shape[-1], name)
    labels = labels.reshape(-1).to(logits.device)
    logits = logits.reshape(-1, logits.shape[-1]).float()
    total = nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    return mean_loss(total, (labels != -100).sum(), num_items_in_batch)


def loss_without_scores(
    hidden_states: Tensor,
    layer: nn.Module,
    labels: Tensor | None,
    num_classes: int,
    num_items_in_batch: Tensor | int | None = None,
    transform: Callable[[Tensor], Tensor] | None = None,
) -> Tensor | None:
    """Mean cross-entropy of an output layer's scores in training, which need not be in memory for it.

    Args:
        hidden_states: hidden states of the positions to predict, (P, E).
        layer: the output layer, from E to V.
        labels: (P,), -100 for a position to ignore.
        num_classes: V.
        num_items_in_batch: number of predicted positions in the whole batch, as for `mean_loss`.
        transform: computes what the layer reads from the hidden states.

    Returns:
        None if the scores have to be computed: without labels, for all positions of a batch (B, L, E), or where
        `vocabulary_loss` needs them.

    Raises:
        ValueError: if a label is outside the classes.
    """
    if labels is None or hidden_states.dim() != 2:
        return None
    check_labels(labels, num_classes)
    total = vocabulary_loss(hidden_states, layer, labels, transform)
    return None if total is None else mean_loss(total, (labels != -100).sum(), num_items_in_batch)


def weighted_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor, total_weight: Tensor | int, name: str = "labels"
) -> Tensor:
    """Cross-entropy of logits (B, classes) and labels (B,), each times its weight, over the batch's total weight.

    Raises:
        ValueError: if a label is outside the classes.
    """
    check_labels(labels, logits.shape[-1], name)
    labels = labels.reshape(-1).to(logits.device)
    each = nn.functional.cross_entropy(logits.float(), labels, reduction="none")
    return mean_loss((each * weights.to(each.device)).sum(), total_weight)


def causal_lm_loss(
    logits: Tensor, labels: Tensor | None, num_items_in_batch: Tensor | int | None, shift_labels: Tensor | None
) -> Tensor:
    """Cross-entropy of each token's logits (B, L, V) with the next token of `labels` (B, L).

    Args:
        logits: scores of the vocabulary.
        labels: the ids of the text itself; ignored if `shift_labels` is given.
        num_items_in_batch: number of predicted tokens in the whole batch, as for `mean_loss`.
        shift_labels: the ids to predict at each position, already shifted.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return cross_entropy(logits, shift_labels, num_items_in_batch)


def shift_right(labels: Tensor, start_id: int, pad_id: int | None) -> Tensor:
    """A decoder's input for labels (B, L): the start token, then all labels but the last, with padding for -100.

    Raises:
        ValueError: if a label is -100 and there is no padding token to replace it.
    """
    shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=start_id)
    if pad_id is not None:
        return shifted.masked_fill(shifted == -100, pad_id)
    values = readable_values(shifted)
    if values is not None and bool((values == -100).any()):
        raise ValueError("`labels` contains -100, which needs a `pad_token_id` in the configuration to replace it")
    return shifted
