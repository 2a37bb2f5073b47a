"""Losses that count what has a label, alone and over a gradient accumulation; checks of labels; shifting them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .checks import is_readable


def check_labels(labels: Tensor, num_classes: int, name: str = "labels") -> None:
    """Refuses class labels outside 0 to `num_classes` - 1; -100 marks what is not to be predicted.

    Raises:
        ValueError: naming the argument, the label and what is allowed.
    """
    if not is_readable(labels):
        return
    counted = labels[labels != -100]
    if counted.numel() and not (int(counted.min()) >= 0 and int(counted.max()) < num_classes):
        wrong = int(counted.min()) if int(counted.min()) < 0 else int(counted.max())
        raise ValueError(f"`{name}` holds {wrong}, but the labels are 0 to {num_classes - 1}, and -100 to ignore one")


def mean_loss(total: Tensor, count: Tensor | int, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Divides a summed loss by what it was summed over.

    Args:
        total: the summed loss.
        count: number of items in it; with none the loss is 0, with gradients of 0, not NaN.
        num_items_in_batch: number of items in the whole batch, over accumulation steps and processes, of which this
            is a part; takes the place of `count`.
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
    """Mean cross-entropy, in float32, of logits (..., classes) and labels (...), -100 ignored; see `mean_loss`.

    Raises:
        ValueError: if a label is outside the classes.
    """
    check_labels(labels, logits.shape[-1], name)
    labels = labels.reshape(-1).to(logits.device)
    logits = logits.reshape(-1, logits.shape[-1]).float()
    total = nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    return mean_loss(total, (labels != -100).sum(), num_items_in_batch)


def causal_lm_loss(
    logits: Tensor, labels: Tensor | None, num_items_in_batch: Tensor | int | None, shift_labels: Tensor | None
) -> Tensor:
    """Cross-entropy of each token's logits (B, L, V) with the next token of `labels` (B, L).

    Args:
        logits: scores of the vocabulary.
        labels: the ids of the text itself; not read if `shift_labels` is given.
        num_items_in_batch: see `mean_loss`.
        shift_labels: the ids to predict at each position, shifted already.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return cross_entropy(logits, shift_labels, num_items_in_batch)


def shift_right(labels: Tensor, start_id: int, pad_id: int | None) -> Tensor:
    """A decoder's input for its labels (B, L): the start token in front, the last label off, padding for -100.

    Raises:
        ValueError: if labels are ignored, and there is no padding token to stand for them.
    """
    shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=start_id)
    if pad_id is not None:
        return shifted.masked_fill(shifted == -100, pad_id)
    if is_readable(shifted) and bool((shifted == -100).any()):
        raise ValueError("`labels` holds -100, which needs a `pad_token_id` in the configuration to stand for it")
    return shifted


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
