"""The attention weights behind a prediction, and the same forward pass with these shuffled.

Whatever a model is made of, its weights come out of a softmax. A first pass notes what each softmax gave, and by the
weights that the model returns it is known which of them are those of a layer. In a further pass these alone are
shuffled before the model goes on with them, so it is the model's own forward pass, with its masks, in all else.

Jain and Wallace (2019), https://arxiv.org/abs/1902.10186, permute weights in the same way.

Dimension letters: N variants, H heads, Q queries, K keys, V classes or tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..maps.text_weights import attending_layers
from .prediction import BATCH, Prediction

_SOFTMAXES = (torch.softmax, Tensor.softmax, nn.functional.softmax)


class _Softmaxes(TorchFunctionMode):
    """Passes each softmax's number, what it read and what it gave to a function, whose answer takes its place."""

    def __init__(self, change: Callable[[int, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = func(*args, **kwargs)
        if func not in _SOFTMAXES:
            return given
        self.calls += 1
        return self.change(self.calls - 1, args[0] if args else kwargs["input"], given)


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of all layers of one kind of attention.

    Args:
        kind: of the attention, see `AttentionMap`.
        layers: of each layer (H, Q, K).
        calls: of each layer the numbers of the softmaxes that gave them, one for each step of a recurrent decoder.
    """

    kind: str
    layers: tuple[Tensor, ...]
    calls: tuple[tuple[int, ...], ...]


@torch.no_grad()
def weights_behind(prediction: Prediction) -> Weights:
    """Finds the weights of the attention that a prediction is asked about; see `eager_attention`.

    Raises:
        ValueError: if the model gives none, or such as are no numbers, are over something else than the inputs, or
            come from no softmax.
    """
    given: list[Tensor] = []

    def note(number: int, scores: Tensor, weights: Tensor) -> Tensor:
        given.append(weights)
        return weights

    with _Softmaxes(note):
        outputs = prediction.run(prediction.values, output_attentions=True)
    name = type(prediction.model).__name__
    told = outputs.get("attentions" if prediction.kind == "self" else "cross_attentions")
    layers = list(attending_layers(prediction.model.config.get_text_config(), told).values())
    if not layers:
        raise ValueError(f"a {name} gave no attention weights: it has none, or does not tell them")
    keys = int(prediction.owners.max()) + 1
    for layer in layers:
        if layer.isnan().any():
            raise ValueError(f"a {name} gave attention weights that are NaN")
        if layer.shape[-1] != keys:
            raise ValueError(
                f"a {name} attends to {layer.shape[-1]} keys where there are {keys} inputs: a prefix, or something "
                "else than these, can't be tested"
            )
    calls: list[tuple[int, ...]] = []
    for layer in layers:
        found = _calls_of(layer, given, calls[-1][-1] + 1 if calls else 0)
        if not found:
            raise ValueError(f"a {name} has weights that come from no softmax: they can't be shuffled")
        calls.append(found)
    # Attention before there was any within a text.
    is_alignment = prediction.kind == "cross" and outputs.get("decoder_attentions") is None
    kind = "alignment" if is_alignment else prediction.kind
    return Weights(kind, tuple(layer[0].float() for layer in layers), tuple(calls))


def _calls_of(layer: Tensor, given: Sequence[Tensor], first: int) -> tuple[int, ...]:
    """The numbers of the softmaxes that gave a layer's weights, the first of which may be `first`."""

    def find(wanted: Tensor, begin: int) -> int | None:
        numbers = range(begin, len(given))
        return next((number for number in numbers if torch.equal(given[number].to(wanted.dtype), wanted)), None)

    whole = find(layer, first)
    if whole is not None:
        return (whole,)
    found: list[int] = []
    for step in layer.unbind(dim=2):
        number = find(step, found[-1] + 1 if found else first)
        if number is None:
            return ()
        found.append(number)
    return tuple(found)


def shuffle_weights(weights: Tensor, allowed: Tensor, generator: torch.Generator) -> Tensor:
    """Permutes the weights of each row (..., K) among the keys that are allowed, (..., K), and leaves the others."""
    # On the CPU, so that a seed draws the same everywhere.
    noise = torch.rand(weights.shape, generator=generator).to(weights.device)
    # First the allowed keys, in a random order and in their own, and then the others, in their own in both.
    drawn = noise.masked_fill(~allowed, 2.0).argsort(dim=-1, stable=True)
    kept = (~allowed).to(torch.uint8).argsort(dim=-1, stable=True)
    return torch.empty_like(weights).scatter_(-1, kept, weights.gather(-1, drawn))


@torch.no_grad()
def shuffled_distributions(
    prediction: Prediction,
    calls: Sequence[int],
    times: int,
    generator: torch.Generator,
    head: int | None = None,
) -> Tensor:
    """What the model predicts with shuffled weights.

    Args:
        prediction: of the model.
        calls: numbers of the softmaxes whose weights are shuffled, see `Weights`.
        times: how many permutations are drawn; each query and each head has its own.
        generator: draws them.
        head: the one whose weights are shuffled; None: all heads.

    Returns:
        (times, V).
    """

    def change(number: int, scores: Tensor, weights: Tensor) -> Tensor:
        if number not in calls:
            return weights
        # What a mask hides has the lowest number, or that and a little.
        allowed = scores > torch.finfo(scores.dtype).min / 2
        changed = shuffle_weights(weights, allowed, generator)
        if head is not None and weights.dim() == 4:
            others = torch.arange(weights.shape[1], device=weights.device) != head
            changed = torch.where(others[:, None, None], weights, changed)
        return changed

    parts = []
    for start in range(0, times, BATCH):
        rows = min(BATCH, times - start)
        with _Softmaxes(change):
            outputs = prediction.run(prediction.values.expand(rows, *prediction.values.shape[1:]))
        parts.append(prediction.probabilities(outputs))
    return torch.cat(parts)
