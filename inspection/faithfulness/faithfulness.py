"""Is attention an explanation here? Erasure, rank correlations and shuffled weights, for one model and some examples.

What is a prediction, and what erasing an input means: see `faithfulness_prediction`. The measures are in
`faithfulness_erasure` and `faithfulness_weights`, the verdict and its rule in `faithfulness_report`.

Dimension letters: P inputs that may be erased, S shares, L layers, H heads, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ...configuration.seeds import require_seed
from ..maps.eager_mode import eager_attention
from ..maps.maps import AttentionMap
from ..maps.tokens import Token
from .erasure import (
    CURVE,
    comprehensiveness,
    erasure_curves,
    integrated_gradients,
    leave_one_out,
    most_first,
    rank_correlation,
    require_packages,
    sufficiency,
)
from .prediction import Example, Prediction, studied
from .report import Estimate, draw, estimate, report_lines
from .weights import Weights, shuffled_distributions, weights_behind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Draws of each example.
RANDOM_ORDERS = 10
PERMUTATIONS = 20


@dataclass(frozen=True, eq=False)
class ExampleFaithfulness:
    """What one example came to.

    Args:
        inputs: the inputs that may be erased, for a reader.
        predicted: the token or class that is predicted.
        probability: of it.
        attention: the weight of each input, (P,).
        leave_one_out: by how much the probability falls without each input, (P,).
        integrated_gradients: what each adds to the probability, (P,).
        curves: the probability with the first inputs erased, for each share of `CURVE`, (S,), by the order:
            "attention" (the most attended first), "least" (the least attended first), "random" (the mean of several
            orders), and "leave_one_out" (the largest fall first).
        measures: figures by name, see `Faithfulness.estimates`.
    """

    inputs: tuple[str, ...]
    predicted: int
    probability: float
    attention: np.ndarray
    leave_one_out: np.ndarray
    integrated_gradients: np.ndarray
    curves: dict[str, np.ndarray]
    measures: dict[str, float]


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """Whether attention is an explanation of some predictions, in numbers.

    Args:
        title: whose attention it is.
        kind: of attention, see `AttentionMap`.
        layer: its number from 0.
        head: its number from 0, or "mean" or "max" over all.
        heads: how many there are.
        seed: of all draws.
        examples: what each came to.
    """

    title: str
    kind: str
    layer: int
    head: int | str
    heads: int
    seed: int
    examples: tuple[ExampleFaithfulness, ...]

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """The mean of each figure over the examples, its spread and its interval, by name.

        - `probability`: of what is predicted.
        - `largest_weight`: of the attention on one input that may be erased.
        - `comprehensiveness_` and `sufficiency_` with `attention`, `random`, `least` or `leave_one_out`: see the
          functions, and `ExampleFaithfulness` for the orders.
        - `comprehensiveness_gain`: of attention over random orders; `sufficiency_gain`: by how much less the
          probability falls when the most attended are kept than when random ones are.
        - `tau_attention_leave_one_out`, `tau_attention_gradients`, `tau_leave_one_out_gradients`: rank correlations,
          of leave-one-out and integrated gradients without their signs.
        - `completeness_error`: of integrated gradients.
        - `layer_distance` and `all_distance`: total variation distance between the output's distribution and that with
          the weights of the layer (of the one head alone, if `head` is a number), or of all layers of the kind,
          shuffled; 0 if nothing changes, and 1 if all does.
          `layer_change` and `all_change`: by how much the probability of the prediction falls.
        """
        names = self.examples[0].measures
        return {name: estimate([example.measures[name] for example in self.examples], self.seed) for name in names}

    @property
    def lines(self) -> list[str]:
        """What was found, and the verdict; its rule is in `report_lines`."""
        return report_lines(self.estimates, len(self.examples), self.description, self._shuffled)

    @property
    def _shuffled(self) -> str:
        return "layer" if self.heads == 1 or isinstance(self.head, str) else "head"

    @property
    def description(self) -> str:
        """Which attention it is."""
        if self.heads == 1:
            shown = "the one head"
        else:
            shown = f"{self.head} of {self.heads} heads" if isinstance(self.head, str) else f"head {self.head}"
        return f"{self.title} · {self.kind} attention, layer {self.layer}, {shown}"

    def summary(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)

    def figure(self) -> Figure:
        """Draws the erasure curves, the rank correlations and the effect of shuffled weights."""
        curves = {
            name: np.stack([example.curves[name] for example in self.examples]) for name in self.examples[0].curves
        }
        measures = {
            name: np.array([example.measures[name] for example in self.examples]) for name in self.examples[0].measures
        }
        return draw(CURVE, curves, measures, self.estimates, self.description, self.seed, self._shuffled)


def faithfulness(
    model: PreTrainedModel,
    processor: Any,
    examples: Sequence[Example],
    *,
    layer: int = -1,
    head: int | str = "mean",
    max_tokens: int = 64,
    seed: int = 0,
    title: str | None = None,
    progress: Callable[[Sequence[Example]], Any] | None = None,
) -> Faithfulness:
    """Tests whether attention weights explain what a model predicts.

    The model may be on any kernel and in training: for the look it is on the eager one and in evaluation, and then as
    it was. Random numbers come from the seed alone, and an example's do not depend on those before it.

    Args:
        model: with its output layer: a masked language model, a sequence classifier of the BERT kind, a causal
            language model or an encoder-decoder, ours or stock, or a captioner of ours.
        processor: its tokenizer, or the captioner's processor.
        examples: two or more: texts; for an encoder-decoder sources, or pairs of source and target; for a classifier
            or a masked language model also pairs of texts; for a captioner images, or pairs of image and caption.
        layer: the layer looked at, from 0, or from the last one, -1.
        head: its head in the same way, or "mean" or "max" over all, as in `AttentionMap.matrix`.
        max_tokens: longer texts are cut after so many tokens.
        seed: of the places of the predictions, the random orders, the permutations and the bootstrap.
        title: says whose attention it is; the model's name if not given.
        progress: wraps the examples as they are gone through, as `tqdm` does.

    Raises:
        ValueError: for a model or an example that can't be tested, a layer or a head that is not there, or packages
            that are not installed.
    """
    require_packages()
    require_seed(seed)
    if isinstance(examples, str) or len(examples) < 2:
        raise ValueError("`examples` must hold two or more: the verdict is about their mean")
    if max_tokens < 3:
        raise ValueError(f"`max_tokens` ({max_tokens}) must be at least 3")
    found: list[ExampleFaithfulness] = []
    with eager_attention(model), _whole_gradients(model):
        for number, example in enumerate(examples if progress is None else progress(examples)):
            prediction = studied(
                model, processor, example, f"example {number}", np.random.default_rng([seed, number, 0]), max_tokens
            )
            weights = weights_behind(prediction)
            attention = _attention_of(prediction, weights, layer, head)
            found.append(
                _measured(prediction, weights, attention, range(len(weights.layers))[layer], head, seed, number)
            )
    title = title or model.config.name_or_path or type(model).__name__
    heads = weights.layers[0].shape[0]
    head = head if isinstance(head, str) else range(heads)[head]
    layer = range(len(weights.layers))[layer]
    return Faithfulness(title, weights.kind, layer, head, heads, seed, tuple(found))


@contextmanager
def _whole_gradients(model: Any) -> Iterator[None]:
    """Within it the gradients of a captioner go through its backbone, also if that is frozen."""
    frozen = getattr(model.config, "freeze_backbone", None)
    if frozen:
        model.config.freeze_backbone = False
    try:
        yield
    finally:
        if frozen:
            model.config.freeze_backbone = frozen


def _attention_of(prediction: Prediction, weights: Weights, layer: int, head: int | str) -> np.ndarray:
    """The weight of each input that may be erased, (P,)."""
    every = torch.stack(weights.layers).cpu().numpy()  # (L, H, Q, K)
    queries, keys = (tuple(Token("", "", None, place, "") for place in range(size)) for size in every.shape[2:])
    row = AttentionMap(every, queries, keys, prediction.kind).matrix(layer, head)[prediction.query]
    if prediction.kind == "self" and prediction.row is None and every.shape[2] > 1 and row[1:].max() == 0:
        raise ValueError(
            f"in a {type(prediction.model).__name__} the first token sees no other: a class is not told from it"
        )
    return row[prediction.places.cpu().numpy()].astype(np.float64)


def _measured(
    prediction: Prediction,
    weights: Weights,
    attention: np.ndarray,
    layer: int,
    head: int | str,
    seed: int,
    number: int,
) -> ExampleFaithfulness:
    inputs = len(attention)
    rng = np.random.default_rng([seed, number, 1])
    single = leave_one_out(prediction)
    gradients, error = integrated_gradients(prediction)
    ranked = {
        "attention": most_first(attention)[None],
        "least": most_first(-attention)[None],
        "random": np.stack([rng.permutation(inputs) for _ in range(RANDOM_ORDERS)]),
        "leave_one_out": most_first(single)[None],
    }
    bounds = np.cumsum([len(orders) for orders in ranked.values()])[:-1]
    orders = np.concatenate(list(ranked.values()))

    def by_order(values: np.ndarray) -> dict[str, np.ndarray]:
        return {name: part.mean(axis=0) for name, part in zip(ranked, np.split(values, bounds), strict=True)}

    falls = by_order(comprehensiveness(prediction, orders))
    kept = by_order(sufficiency(prediction, orders))
    whole = prediction.distribution(prediction.values)[0]
    measures = {
        "probability": float(whole[prediction.predicted]),
        "largest_weight": float(attention.max()),
        **{f"comprehensiveness_{name}": float(value) for name, value in falls.items()},
        "comprehensiveness_gain": float(falls["attention"] - falls["random"]),
        **{f"sufficiency_{name}": float(value) for name, value in kept.items()},
        "sufficiency_gain": float(kept["random"] - kept["attention"]),
        "tau_attention_leave_one_out": rank_correlation(attention, np.abs(single)),
        "tau_attention_gradients": rank_correlation(attention, np.abs(gradients)),
        "tau_leave_one_out_gradients": rank_correlation(np.abs(single), np.abs(gradients)),
        "completeness_error": error,
    }
    everywhere = [call for calls in weights.calls for call in calls]
    one = None if isinstance(head, str) else range(weights.layers[layer].shape[0])[head]
    # One seed for both, so that of a single layer they are the same.
    drawn = int(rng.integers(2**62))
    for name, calls, only in (("layer", weights.calls[layer], one), ("all", everywhere, None)):
        generator = torch.Generator().manual_seed(drawn)
        shuffled = shuffled_distributions(prediction, calls, PERMUTATIONS, generator, only)
        measures[f"{name}_distance"] = float((shuffled - whole).abs().sum(dim=-1).mean() / 2)
        measures[f"{name}_change"] = float((whole - shuffled)[:, prediction.predicted].mean())
    return ExampleFaithfulness(
        prediction.labels,
        prediction.predicted,
        measures["probability"],
        attention,
        single,
        gradients,
        by_order(erasure_curves(prediction, orders)),
        measures,
    )
