"""What the families' model classes share: initial weights, checks of the input, losses."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, initialization

from .cpu.linear import fast_inference
from .positions import LearnedPositions, SinusoidalPositions


class RegardPreTrainedModel(PreTrainedModel):
    """Base of every model class of the package."""

    supports_gradient_checkpointing = True
    _no_split_modules = ["TransformerBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SinusoidalPositions):
            # Buffers that are not saved have no content after loading; this is also called then.
            initialization.copy_(module.table, module.compute_table())
        elif isinstance(module, LearnedPositions):
            initialization.copy_(module.weight, module.compute_start(self.config.initializer_range))

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """See `PreTrainedModel.save_pretrained`.

        A checkpoint may have its code beside it, named by the configuration's `auto_map`. Only a class that was
        loaded from there takes the code along; saved by the package's own, it must not be promised either.
        """
        if self._auto_class is None and hasattr(self.config, "auto_map"):
            del self.config.auto_map
        super().save_pretrained(save_directory, *args, **kwargs)


class FastGenerationMixin(GenerationMixin):
    """`GenerationMixin`, by faster linear layers: scores are those of `forward` to float32's rounding."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See `GenerationMixin.generate`."""
        with fast_inference():
            return super().generate(*args, **kwargs)


def show_weights(forward: Callable) -> Callable:
    """Decorator of a base model's `forward`: runs it on the eager kernel when it is asked for attention weights.

    The others return none, and transformers would then give back empty tuples.
    """

    @wraps(forward)
    def wrapper(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        kernel = self.config._attn_implementation
        if kernel == "eager" or not kwargs.get("output_attentions", self.config.output_attentions):
            return forward(self, *args, **kwargs)
        self.config._attn_implementation = "eager"
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.config._attn_implementation = kernel

    return wrapper


def _readable(ids: Tensor) -> bool:
    # Reading a value from an accelerator waits for it, and a compiled graph would break.
    return ids.device.type == "cpu" and ids.numel() > 0 and not torch.compiler.is_compiling()


def check_ids(name: str, ids: Tensor | None, size: int, size_name: str) -> None:
    """Refuses ids outside 0 to `size` - 1, where that can be read without waiting for an accelerator.

    Raises:
        ValueError: naming the argument, the id and the limit.
    """
    if ids is None or not _readable(ids):
        return
    least, largest = (int(value) for value in torch.aminmax(ids))
    if least < 0 or largest >= size:
        wrong = least if least < 0 else largest
        raise ValueError(f"`{name}` holds the id {wrong}, but `{size_name}` ({size}) allows 0 to {size - 1}")


def one_of(input_ids: Tensor | None, inputs_embeds: Tensor | None, prefix: str = "") -> Tensor:
    """The one of the two that is given.

    Raises:
        ValueError: if none is, or both are.
    """
    given = input_ids if inputs_embeds is None else inputs_embeds
    if given is None or (input_ids is not None and inputs_embeds is not None):
        raise ValueError(f"give either `{prefix}input_ids` or `{prefix}inputs_embeds`, and not both")
    return given


def check_length(length: int, limit: int, past: int = 0) -> None:
    """Refuses a sequence longer than the positions, with the `past` tokens that are in a cache.

    Raises:
        ValueError: naming both lengths, and how to truncate.
    """
    # A static cache counts its tokens on the device.
    if isinstance(past, int):
        length += past
    if length > limit:
        raise ValueError(
            f"the sequence has {length} tokens, {length} > {limit} (`max_position_embeddings`): "
            f"truncate it, e.g. `tokenizer(..., truncation=True, max_length={limit})`"
        )


def check_positions(position_ids: Tensor, limit: int) -> None:
    """Refuses positions beyond the last, where they can be read without waiting for an accelerator.

    Raises:
        ValueError: see `check_length`; or for a negative position.
    """
    if _readable(position_ids):
        check_length(int(position_ids.max()) + 1, limit)
        check_ids("position_ids", position_ids, limit, "max_position_embeddings")


def check_source(length: int, attention_mask: Tensor | None) -> None:
    """Refuses a source without tokens, of which nothing could be read.

    Raises:
        ValueError: for an empty source, or naming the row that is padding alone.
    """
    if length == 0:
        raise ValueError("the source is empty: give it one token or more")
    if attention_mask is None or attention_mask.dim() != 2 or not _readable(attention_mask):
        return
    empty = ~attention_mask.bool().any(dim=1)
    if bool(empty.any()):
        raise ValueError(f"row {int(empty.nonzero()[0])} of the source is padding alone: give it one token or more")


def check_labels(labels: Tensor, num_classes: int, name: str = "labels") -> None:
    """Refuses class labels outside 0 to `num_classes` - 1; -100 marks what is not to be predicted.

    Raises:
        ValueError: naming the argument, the label and what is allowed.
    """
    if not _readable(labels):
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
    if _readable(shifted) and bool((shifted == -100).any()):
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
