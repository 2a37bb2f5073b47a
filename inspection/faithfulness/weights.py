"""The attention weights behind a prediction, and the prediction with shuffled weights.

In every model attention weights come from a softmax. A first forward pass records the output of each softmax;
comparing them with the weights that the model returns shows which softmax belongs to which layer. In a further pass
the weights of the chosen softmaxes are shuffled before the model uses them. Everything else is the model's own forward
pass.

Jain and Wallace (2019), https://arxiv.org/abs/1902.10186, permute weights in the same way.

Dimension letters: H heads, Q queries, K keys, V classes or tokens of the vocabulary.
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


class _SoftmaxReplacer(TorchFunctionMode):
    """Replaces the output of every softmax.

    Args:
        change: function of the number of the softmax, its input and its output, which returns the new output.
    """

    def __init__(self, change: Callable[[int, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func not in _SOFTMAXES:
            return output
        self.calls += 1
        return self.change(self.calls - 1, args[0] if args else kwargs["input"], output)


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """The weights of all layers of one kind of attention.

    Args:
        kind: the kind of attention, as in `AttentionMap`.
        layers: the weights of each layer, (H, Q, K).
        softmaxes: the numbers of the softmaxes that computed each layer's weights: one, or in a recurrent decoder one
            for each step.
    """

    kind: str
    layers: tuple[Tensor, ...]
    softmaxes: tuple[tuple[int, ...], ...]


@torch.no_grad()
def attention_weights(prediction: Prediction) -> AttentionWeights:
    """Returns the weights of the attention that should explain a prediction.

    Args:
        prediction: a prediction whose model is on the eager attention kernel.

    Raises:
        ValueError: if the model returns no weights, or weights that are NaN, that are not over the inputs alone, or
            that no softmax computed.
    """
    computed: list[Tensor] = []

    def record(number: int, scores: Tensor, weights: Tensor) -> Tensor:
        computed.append(weights)
        return weights

    with _SoftmaxReplacer(record):
        outputs = prediction.run(prediction.values, output_attentions=True)
    name = type(prediction.model).__name__
    returned = outputs.get("attentions" if prediction.kind == "self" else "cross_attentions")
    layers = list(attending_layers(prediction.model.config.get_text_config(), returned).values())
    if not layers:
        raise ValueError(f"a {name} returned no attention weights: it has none, or does not return them")
    for layer in layers:
        if layer.isnan().any():
            raise ValueError(f"a {name} returned attention weights that are NaN")
        if layer.shape[-1] != prediction.keys:
            raise ValueError(
                f"a {name} attends to {layer.shape[-1]} keys, but there are {prediction.keys} inputs: attention to a "
                "prefix, or to anything but the inputs, cannot be tested"
            )
    softmaxes: list[tuple[int, ...]] = []
    for layer in layers:
        found = _find_softmaxes(layer, computed, softmaxes[-1][-1] + 1 if softmaxes else 0)
        if not found:
            raise ValueError(f"a {name} has attention weights that no softmax computed: they cannot be shuffled")
        softmaxes.append(found)
    # A recurrent model has no self-attention.
    is_alignment = prediction.kind == "cross" and outputs.get("decoder_attentions") is None
    kind = "alignment" if is_alignment else prediction.kind
    return AttentionWeights(kind, tuple(layer[0].float() for layer in layers), tuple(softmaxes))


def _find_softmaxes(layer: Tensor, computed: Sequence[Tensor], first: int) -> tuple[int, ...]:
    """Returns the numbers of the softmaxes, from `first` on, that computed a layer's weights; empty if none did."""

    def find(wanted: Tensor, begin: int) -> int | None:
        numbers = range(begin, len(computed))
        return next((number for number in numbers if torch.equal(computed[number].to(wanted.dtype), wanted)), None)

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
    """Permutes the weights of each row among the keys that the mask allows.

    Args:
        weights: the weights, (..., K).
        allowed: True for the keys that a query may attend to, (..., K); the weights of the others stay.
        generator: draws a permutation for each row.
    """
    # Drawn on the CPU, so that a seed gives the same permutations on every device.
    noise = torch.rand(weights.shape, generator=generator).to(weights.device)
    # Both index tensors list the allowed keys first, one in random order and one in their own; then the other keys.
    drawn = noise.masked_fill(~allowed, 2.0).argsort(dim=-1, stable=True)
    kept = (~allowed).to(torch.uint8).argsort(dim=-1, stable=True)
    return torch.empty_like(weights).scatter_(-1, kept, weights.gather(-1, drawn))


@torch.no_grad()
def shuffled_distributions(
    prediction: Prediction,
    softmaxes: Sequence[int],
    times: int,
    generator: torch.Generator,
    head: int | None = None,
) -> Tensor:
    """Returns the distributions that a model predicts with shuffled attention weights.

    Args:
        prediction: the prediction.
        softmaxes: numbers of the softmaxes whose weights are shuffled, as in `AttentionWeights`.
        times: number of distributions; each has its own permutation for each query and head.
        generator: draws the permutations.
        head: number of the only head whose weights are shuffled; None for all heads.

    Returns:
        (times, V).
    """

    def shuffle(number: int, scores: Tensor, weights: Tensor) -> Tensor:
        if number not in softmaxes:
            return weights
        # A masked score is the lowest number, or a little above it.
        allowed = scores > torch.finfo(scores.dtype).min / 2
        shuffled = shuffle_weights(weights, allowed, generator)
        if head is not None and weights.dim() == 4:
            others = torch.arange(weights.shape[1], device=weights.device) != head
            shuffled = torch.where(others[:, None, None], weights, shuffled)
        return shuffled

    parts = []
    for start in range(0, times, BATCH):
        rows = min(BATCH, times - start)
        with _SoftmaxReplacer(shuffle):
            outputs = prediction.run(prediction.values.expand(rows, *prediction.values.shape[1:]))
        parts.append(prediction.probabilities(outputs))
    return torch.cat(parts)
