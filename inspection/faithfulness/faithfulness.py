"""Tests of whether attention explains the predictions of a model: erasure, rank correlations and shuffled weights.

`prediction.py` defines a prediction and what erasing an input means. The measures are in `erasure.py` and
`weights.py`, the verdict and its rule in `report.py`.

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

from ...configuration.extras import require_extra
from ...families.seeds import require_seed
from ..maps.attention_map import describe_head, select_weights
from ..maps.eager_mode import eager_attention
from .erasure import (
    CURVE_SHARES,
    comprehensiveness,
    descending_order,
    erasure_curves,
    integrated_gradients,
    leave_one_out,
    rank_correlation,
    sufficiency,
)
from .prediction import Example, Prediction, make_prediction
from .report import Estimate, draw_faithfulness, estimate, report_lines
from .weights import AttentionWeights, attention_weights, shuffled_distributions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Number of random draws for each example.
RANDOM_ORDERS = 10
PERMUTATIONS = 20


@dataclass(frozen=True, eq=False)
class ExampleFaithfulness:
    """The results for one example.

    Args:
        inputs: readable names of the inputs that may be erased.
        predicted: the predicted token or class.
        probability: the probability of the prediction.
        attention: the attention weight of each input, (P,).
        leave_one_out: by how much the probability falls without each input, (P,).
        integrated_gradients: the attribution of each input, (P,).
        curves: the probability with the first inputs erased, for each share of `CURVE_SHARES`, (S,), by the order of
            erasing: "attention" (the most attended first), "least" (the least attended first), "random" (the mean of
            several random orders) and "leave_one_out" (the largest fall first).
        measures: the other figures by name; `Faithfulness.estimates` explains them.
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
    """The results of testing whether attention explains some predictions.

    Args:
        title: name of the model or other heading.
        kind: the kind of attention, as in `AttentionMap`.
        layer: number of the layer from 0.
        head: number of the head from 0, or "mean" or "max" over all heads.
        heads: number of heads in the layer.
        seed: seed of all random draws.
        examples: the results for each example.
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
        """The mean of each figure over the examples, with its spread and interval, by name.

        - `probability`: probability of the prediction.
        - `largest_weight`: the largest attention weight on an input that may be erased.
        - `comprehensiveness_` and `sufficiency_` followed by `attention`, `random`, `least` or `leave_one_out`: the
          measures of `erasure.py` for the orders that `ExampleFaithfulness` lists.
        - `comprehensiveness_gain`: how much more the probability falls without the most attended inputs than without
          random ones; `sufficiency_gain`: how much less it falls with only these than with only random ones.
        - `tau_attention_leave_one_out`, `tau_attention_gradients`, `tau_leave_one_out_gradients`: rank correlations
          with the absolute values of leave-one-out and integrated gradients.
        - `completeness_error`: error of the sum of the integrated gradients.
        - `layer_distance` and `all_distance`: total variation distance, from 0 to 1, between the output distributions
          with the model's own weights and with shuffled weights, of the layer (of the one head, if `head` is a number)
          or of all layers. `layer_change` and `all_change`: by how much the probability of the prediction falls.
        """
        names = self.examples[0].measures
        return {name: estimate([example.measures[name] for example in self.examples], self.seed) for name in names}

    @property
    def lines(self) -> list[str]:
        """The figures and the verdict, as `report_lines` writes them."""
        return report_lines(self.estimates, len(self.examples), self.description, self._shuffled_part)

    @property
    def _shuffled_part(self) -> str:
        return "layer" if self.heads == 1 or isinstance(self.head, str) else "head"

    @property
    def description(self) -> str:
        """The title with the kind, layer and head of the attention."""
        shown = describe_head(self.head, self.heads)
        return f"{self.title} · {self.kind} attention, layer {self.layer}, {shown}"

    def summary(self) -> str:
        """Returns the lines as one text."""
        return "\n".join(self.lines)

    def figure(self) -> Figure:
        """Draws the erasure curves, the rank correlations and the effect of shuffling the weights."""
        curves = {
            name: np.stack([example.curves[name] for example in self.examples]) for name in self.examples[0].curves
        }
        measures = {
            name: np.array([example.measures[name] for example in self.examples]) for name in self.examples[0].measures
        }
        return draw_faithfulness(
            CURVE_SHARES, curves, measures, self.estimates, self.description, self.seed, self._shuffled_part
        )


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

    The model may be on any attention kernel and in training mode. It runs on the eager kernel in evaluation mode and
    is restored afterwards. All random numbers come from the seed, and those of an example do not depend on the
    examples before it.

    Args:
        model: a model with its output layer: a masked language model, a sequence classifier like BERT's, a causal
            language model or an encoder-decoder, from this package or from transformers, or a captioner of this
            package.
        processor: its tokenizer, or the processor of the captioner.
        examples: at least two texts; for an encoder-decoder sources, or pairs of source and target; for a classifier
            or a masked language model also pairs of texts; for a captioner images, or pairs of image and caption.
        layer: number of the layer from 0, or counted from the last, which is -1.
        head: number of the head, counted in the same way, or "mean" or "max" over all, as in `AttentionMap.matrix`.
        max_tokens: the most tokens of a text; longer texts are cut.
        seed: seed of the positions of the predictions, the random orders, the permutations and the bootstrap.
        title: heading of the results; the model's name if None.
        progress: wraps the examples in an iterator, as `tqdm` does.

    Raises:
        ValueError: if the model or an example cannot be tested, there is no such layer or head, or a package of the
            extra `faithfulness` is not installed.
    """
    require_extra("faithfulness")
    require_seed(seed)
    if isinstance(examples, str) or len(examples) < 2:
        raise ValueError("`examples` must hold at least two: the verdict is about their mean")
    if max_tokens < 3:
        raise ValueError(f"`max_tokens` ({max_tokens}) must be at least 3")
    results: list[ExampleFaithfulness] = []
    with eager_attention(model), _gradients_through_backbone(model):
        for number, example in enumerate(examples if progress is None else progress(examples)):
            prediction = make_prediction(
                model, processor, example, f"example {number}", np.random.default_rng([seed, number, 0]), max_tokens
            )
            weights = attention_weights(prediction)
            attention = _input_weights(prediction, weights, layer, head)
            results.append(
                _measure(prediction, weights, attention, range(len(weights.layers))[layer], head, seed, number)
            )
    title = title or model.config.name_or_path or type(model).__name__
    heads = weights.layers[0].shape[0]
    head = head if isinstance(head, str) else range(heads)[head]
    layer = range(len(weights.layers))[layer]
    return Faithfulness(title, weights.kind, layer, head, heads, seed, tuple(results))


@contextmanager
def _gradients_through_backbone(model: Any) -> Iterator[None]:
    """Runs a block in which a captioner computes gradients through its backbone even if that is frozen."""
    frozen = getattr(model.config, "freeze_backbone", None)
    if frozen:
        model.config.freeze_backbone = False
    try:
        yield
    finally:
        if frozen:
            model.config.freeze_backbone = frozen


def _input_weights(prediction: Prediction, weights: AttentionWeights, layer: int, head: int | str) -> np.ndarray:
    """Returns the attention weight of each input that may be erased, (P,)."""
    every = torch.stack(weights.layers).cpu().numpy()  # (L, H, Q, K)
    row = select_weights(every, layer, head)[prediction.query]
    if prediction.kind == "self" and prediction.row is None and every.shape[2] > 1 and row[1:].max() == 0:
        raise ValueError(
            f"in a {type(prediction.model).__name__} the first token attends to no other, so the class cannot come "
            "from it"
        )
    return row[prediction.erasable_keys.cpu().numpy()].astype(np.float64)


def _measure(
    prediction: Prediction,
    weights: AttentionWeights,
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
    orders_by_name = {
        "attention": descending_order(attention)[None],
        "least": descending_order(-attention)[None],
        "random": np.stack([rng.permutation(inputs) for _ in range(RANDOM_ORDERS)]),
        "leave_one_out": descending_order(single)[None],
    }
    bounds = np.cumsum([len(orders) for orders in orders_by_name.values()])[:-1]
    orders = np.concatenate(list(orders_by_name.values()))

    def by_order(values: np.ndarray) -> dict[str, np.ndarray]:
        return {name: part.mean(axis=0) for name, part in zip(orders_by_name, np.split(values, bounds), strict=True)}

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
    all_softmaxes = [number for softmaxes in weights.softmaxes for number in softmaxes]
    head_number = None if isinstance(head, str) else range(weights.layers[layer].shape[0])[head]
    # One seed for both, so that they agree in a model of a single layer.
    shuffle_seed = int(rng.integers(2**62))
    for name, softmaxes, only_head in (
        ("layer", weights.softmaxes[layer], head_number),
        ("all", all_softmaxes, None),
    ):
        generator = torch.Generator().manual_seed(shuffle_seed)
        shuffled = shuffled_distributions(prediction, softmaxes, PERMUTATIONS, generator, only_head)
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
