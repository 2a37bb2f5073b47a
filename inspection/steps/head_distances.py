"""How far away heads look: mean attention weight by the distance between key and query, and its picture.

Dimension letters: N layers, H heads, L length, R distances each way.
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

from ..maps.eager_mode import evaluating

# More than any picture shows.
MOST_OFFSET = 10_000


@dataclass(frozen=True)
class HeadDistances:
    """Where the heads of each layer look, from a query.

    Attributes:
        offsets: place of the key less place of the query: negative before it, positive after it, (2 R + 1,).
        weights: mean weight that a head gives a key at each offset, over all queries that have such a key,
            (N, H, 2 R + 1); NaN at an offset that no text is long enough for.
        mean_distance: how many places away a head looks on average, all its weights counted, (N, H).
        uniform_distance: the same for weights that are equal on all keys that a query may see.
        texts: number of texts.
        tokens: number of their tokens.
    """

    offsets: Tensor
    weights: Tensor
    mean_distance: Tensor
    uniform_distance: float
    texts: int
    tokens: int


@torch.no_grad()
def head_distances(
    model: PreTrainedModel, texts: Iterable[Mapping[str, Tensor]], max_offset: int = 10
) -> HeadDistances:
    """Measures how far away the self-attention of each head looks.

    Args:
        model: a BERT or a decoder, or an encoder-decoder Transformer, of which the encoder is looked at.
        texts: keyword arguments of the model for one text each, without padding, as its tokenizer gives them.
        max_offset: the farthest offset to each side that is told apart.

    Raises:
        ValueError: if the model has no self-attention, there is no text, or one is given with others.
    """
    if not 1 <= max_offset <= MOST_OFFSET:
        raise ValueError(f"`max_offset` ({max_offset}) must be at least 1 and at most {MOST_OFFSET:,}")
    network: Any = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    offsets = torch.arange(-max_offset, max_offset + 1)
    sums: Tensor | None = None
    pairs = torch.zeros(len(offsets), dtype=torch.float64)
    distances: Tensor | float = 0.0
    uniform, count, tokens = 0.0, 0, 0
    with evaluating(model):
        for text in texts:
            weights = _self_attention(network, text)  # (N, H, L, L)
            length = weights.shape[-1]
            places = torch.arange(length, device=weights.device)
            offset = places[None, :] - places[:, None]  # (L, L)
            # What a causal mask hides is not there to be looked at.
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
        raise ValueError("`texts` holds none: give one or more")
    mean = (distances / tokens).cpu()  # type: ignore[union-attr]
    return HeadDistances(
        offsets, sums.cpu() / pairs.where(pairs > 0, torch.nan), mean, uniform / tokens, count, tokens
    )


def _is_causal(network: PreTrainedModel) -> bool:
    return any(getattr(module, "is_causal", False) for module in network.modules())


def _self_attention(network: PreTrainedModel, text: Mapping[str, Tensor]) -> Tensor:
    """Weights of all layers for one text, (N, H, L, L) in float64."""
    ids = text.get("input_ids")
    if ids is None or len(ids) != 1 or not bool(text.get("attention_mask", torch.ones(1)).all()):
        raise ValueError("`texts` must hold the `input_ids` of one text each, without padding")
    attentions = network(**text, output_attentions=True, return_dict=True).get("attentions")
    if not attentions:
        raise ValueError(f"`model` has no self-attention: its {type(network).__name__} has none")
    return torch.cat(attentions).double()


def plot_head_distances(measured: HeadDistances, output: str | Path) -> None:
    """Draws a panel for each layer: a row for each head, the offset along it, darker where more weight goes."""
    layers, heads, _ = measured.weights.shape
    columns = min(layers, 4)
    rows = -(-layers // columns)
    width, height = 1.6 + 3.3 * columns, 1.3 + rows * (0.7 + 0.26 * max(heads, 3))
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True).flatten()
    reach = int(measured.offsets.max())
    # The root of the weight: small weights that are spread out stay visible beside a head that looks at one place.
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
    figure.supxlabel("place of the key less place of the query", fontsize=9)
    figure.supylabel("head  (mean distance)", fontsize=9)
    figure.suptitle(
        f"Where each head looks ({measured.tokens:,} tokens)\n"
        f"equal weights: mean distance {measured.uniform_distance:.1f}",
        fontsize=10,
    )
    figure.savefig(output, dpi=110)
