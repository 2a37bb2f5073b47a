"""How far away each head attends: its mean weight by the distance between key and query, measured and drawn.

Dimension letters: N layers, H heads, L length, R largest offset to each side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel

from ..maps.eager_mode import eager_attention

# Far more than a figure can show.
MOST_OFFSET = 10_000


@dataclass(frozen=True)
class HeadDistances:
    """The mean attention weights of each head by the offset from query to key.

    Attributes:
        offsets: position of the key minus position of the query, (2 R + 1,): negative for keys before the query.
        weights: mean weight of each head on a key at each offset, over all queries that have such a key,
            (N, H, 2 R + 1); NaN at an offset that no text is long enough for.
        mean_distance: mean distance in tokens from query to key, weighted by attention, (N, H).
        uniform_distance: the mean distance if every query attended equally to all keys that it may see.
        texts: number of texts.
        tokens: number of tokens in these texts.
    """

    offsets: Tensor
    weights: Tensor
    mean_distance: Tensor
    uniform_distance: float
    texts: int
    tokens: int


def head_distances(
    model: PreTrainedModel, texts: Iterable[Mapping[str, Tensor]], max_offset: int = 10
) -> HeadDistances:
    """Measures how far away the self-attention of each head attends.

    Args:
        model: a BERT, a decoder, or an encoder-decoder Transformer, of which the encoder is measured.
        texts: keyword arguments of the model for one text each, without padding, as its tokenizer returns them.
        max_offset: the largest offset to each side with a mean of its own; R.

    Raises:
        ValueError: if the model has no self-attention, there are no texts, one of them is a batch or has padding, or
            `max_offset` is out of range.
    """
    if not 1 <= max_offset <= MOST_OFFSET:
        raise ValueError(f"`max_offset` ({max_offset}) must be at least 1 and at most {MOST_OFFSET:,}")
    network: Any = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    offsets = torch.arange(-max_offset, max_offset + 1)
    sums: Tensor | None = None
    pairs = torch.zeros(len(offsets), dtype=torch.float64)
    distances: Tensor | float = 0.0
    uniform, count, tokens = 0.0, 0, 0
    with eager_attention(model):
        for text in texts:
            weights = _self_attention(network, text)  # (N, H, L, L)
            length = weights.shape[-1]
            places = torch.arange(length, device=weights.device)
            offset = places[None, :] - places[:, None]  # (L, L)
            # A causal mask hides the keys after the query.
            seen = torch.ones_like(offset, dtype=torch.bool) if not _is_causal(network) else offset <= 0
            away = offset.abs().double()
            near = seen & (away <= max_offset)
            index = (offset + max_offset)[near]
            flat = weights.new_zeros(*weights.shape[:2], len(offsets)).index_add_(2, index, weights[:, :, near])
            sums = flat if sums is None else sums + flat
            pairs += torch.bincount(index, minlength=len(offsets)).cpu()
            distances = distances + (weights * away).sum(dim=(-1, -2))
            uniform += float(((seen * away).sum(-1) / seen.sum(-1)).sum())
            count, tokens = count + 1, tokens + length
    if sums is None:
        raise ValueError("`texts` is empty: give at least one text")
    mean = (distances / tokens).cpu()  # type: ignore[union-attr]
    return HeadDistances(
        offsets, sums.cpu() / pairs.where(pairs > 0, torch.nan), mean, uniform / tokens, count, tokens
    )


def _is_causal(network: PreTrainedModel) -> bool:
    return any(getattr(module, "is_causal", False) for module in network.modules())


def _self_attention(network: PreTrainedModel, text: Mapping[str, Tensor]) -> Tensor:
    """Returns the weights of all layers for one text, (N, H, L, L) in float64."""
    ids = text.get("input_ids")
    if ids is None or len(ids) != 1 or not bool(text.get("attention_mask", torch.ones(1)).all()):
        raise ValueError("each of `texts` must hold the `input_ids` of one text, without padding")
    attentions = network(**text, output_attentions=True, return_dict=True).get("attentions")
    if not attentions:
        raise ValueError(f"`model` has no self-attention: its {type(network).__name__} returned no weights of it")
    return torch.cat(attentions).double()


def plot_head_distances(measured: HeadDistances, output: str | Path) -> None:
    """Draws a panel for each layer, with a row for each head and a column for each offset, and saves the figure.

    Args:
        measured: the distances to draw.
        output: file of the figure.
    """
    layers, heads, _ = measured.weights.shape
    columns = min(layers, 4)
    rows = -(-layers // columns)
    width, height = 1.6 + 3.3 * columns, 1.3 + rows * (0.7 + 0.26 * max(heads, 3))
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True).flatten()
    reach = int(measured.offsets.max())
    # Colours follow the square root, so that small spread-out weights stay visible beside a head with one sharp peak.
    norm = PowerNorm(0.5, 0, float(measured.weights.nan_to_num().max()))
    for number, axes in enumerate(grid):
        if number >= layers:
            axes.set_visible(False)
            continue
        image = axes.imshow(
            measured.weights[number].numpy(),
            aspect="auto",
            cmap="Blues",
            norm=norm,
            extent=(-reach - 0.5, reach + 0.5, heads - 0.5, -0.5),
        )
        axes.axvline(0, color="gray", linewidth=0.6, linestyle=":")
        labels = [f"{head}  ({float(mean):.1f})" for head, mean in enumerate(measured.mean_distance[number])]
        axes.set_yticks(range(heads), labels, fontsize=8)
        axes.set_title(f"layer {number}", fontsize=10)
        axes.tick_params(labelbottom=True)
    figure.colorbar(image, ax=grid.tolist(), label="mean weight", shrink=0.8)
    figure.supxlabel("position of the key minus position of the query", fontsize=9)
    figure.supylabel("head  (mean distance)", fontsize=9)
    figure.suptitle(
        f"Where each head attends ({measured.tokens:,} tokens)\n"
        f"equal weights: mean distance {measured.uniform_distance:.1f}",
        fontsize=10,
    )
    figure.savefig(output, dpi=110)
