"""The report on attention as an explanation: means over examples with intervals, the verdict, and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..maps.figure import set_title

RESAMPLES = 2000
# A change of less than this share of a distribution counts as none.
NEGLIGIBLE = 0.05

_ORDERS = {
    "attention": ("most attended first", "C0", "-"),
    "random": ("random order", "0.45", "-"),
    "least": ("least attended first", "C1", "--"),
    "leave_one_out": ("largest leave-one-out first", "C2", "-."),
}
_TAUS = {
    "tau_attention_leave_one_out": "attention,\nleave-one-out",
    "tau_attention_gradients": "attention,\nintegrated gradients",
    "tau_leave_one_out_gradients": "leave-one-out,\nintegrated gradients",
}
_ROWS = (
    ("probability of the prediction", "probability"),
    ("largest weight on an input", "largest_weight"),
    ("comprehensiveness, most attended first", "comprehensiveness_attention"),
    ("  random order", "comprehensiveness_random"),
    ("  least attended first", "comprehensiveness_least"),
    ("  largest leave-one-out first", "comprehensiveness_leave_one_out"),
    ("  gain of attention over random", "comprehensiveness_gain"),
    ("sufficiency, most attended first", "sufficiency_attention"),
    ("  random order", "sufficiency_random"),
    ("  least attended first", "sufficiency_least"),
    ("  largest leave-one-out first", "sufficiency_leave_one_out"),
    ("  gain of attention over random", "sufficiency_gain"),
    ("tau, attention and leave-one-out", "tau_attention_leave_one_out"),
    ("  attention and integrated gradients", "tau_attention_gradients"),
    ("  leave-one-out and integrated gradients", "tau_leave_one_out_gradients"),
    ("shuffled weights of the {shuffled}: distance", "layer_distance"),
    ("  fall of the probability", "layer_change"),
    ("shuffled weights of all layers: distance", "all_distance"),
    ("  fall of the probability", "all_change"),
    ("error of completeness", "completeness_error"),
)
_SHUFFLES = {"layer_distance": "this {shuffled}", "all_distance": "all layers"}


@dataclass(frozen=True)
class Estimate:
    """The mean of a figure over examples, with its spread and interval.

    Args:
        mean: mean over the examples for which the figure is defined; NaN if there are none.
        deviation: standard deviation between these examples.
        low: lower end of the 95% interval of the mean, by a bootstrap over the examples.
        high: upper end of that interval.
        count: number of these examples.
    """

    mean: float
    deviation: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        if self.count == 0:
            return "undefined"
        return f"{self.mean:+.3f} ± {self.deviation:.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """Estimates the mean of a figure over examples.

    Args:
        values: the value of each example; NaN where the figure is undefined, which is left out.
        seed: seed of the bootstrap.
    """
    defined = np.array([value for value in values if not np.isnan(value)], dtype=np.float64)
    if not len(defined):
        return Estimate(np.nan, np.nan, np.nan, np.nan, 0)
    low, high = np.quantile(_resampled_means(defined, seed), (0.025, 0.975))
    deviation = defined.std(ddof=1) if len(defined) > 1 else np.nan
    return Estimate(float(defined.mean()), float(deviation), float(low), float(high), len(defined))


def _resampled_means(values: np.ndarray, seed: int) -> np.ndarray:
    """Returns the means of samples with replacement from examples (count, ...): (RESAMPLES, ...)."""
    drawn = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    return values[drawn].mean(axis=1)


def reasons_against(estimates: Mapping[str, Estimate]) -> list[str]:
    """Returns why attention is not a causal explanation, by the rule of `report_lines`; empty if it may be one."""
    reasons = []
    gain, moved = estimates["comprehensiveness_gain"], estimates["layer_distance"]
    if not gain.low > 0:
        compared = "less than" if gain.high < 0 else "no more than"
        reasons.append(f"dropping the most attended inputs changes the prediction {compared} dropping random ones")
    if moved.high < NEGLIGIBLE:
        reasons.append(f"shuffling the weights moves less than {NEGLIGIBLE:.0%} of the output's distribution")
    return reasons


def report_lines(
    estimates: Mapping[str, Estimate], examples: int, description: str, shuffled: str = "layer"
) -> list[str]:
    """Returns the figures and the verdict as lines of text.

    The verdict is "not a causal explanation" if

    - dropping the most attended inputs changes the predictions no more than dropping random ones: the interval of the
      gain in comprehensiveness is not above 0; or
    - the weights make no difference: the interval of the distance between the outputs with and without shuffled
      weights lies below `NEGLIGIBLE`.

    Otherwise the verdict is that attention points at inputs that matter, with what that does not prove.

    Args:
        estimates: the figures by name.
        examples: number of examples.
        description: the first line.
        shuffled: the part whose weights are shuffled, "layer" or "head".
    """
    rows = []
    width = max(len(label.format(shuffled=shuffled)) for label, _ in _ROWS)
    for label, name in _ROWS:
        value = estimates[name]
        fewer = f"  ({value.count} examples)" if 0 < value.count < examples else ""
        rows.append(f"{label.format(shuffled=shuffled).ljust(width)}  {value}{fewer}")
    return [
        description,
        f"{examples} examples: mean ± standard deviation [95% interval of the mean]",
        *rows,
        *_verdict(estimates),
    ]


def _verdict(estimates: Mapping[str, Estimate]) -> list[str]:
    reasons = reasons_against(estimates)
    gain, moved = estimates["comprehensiveness_gain"], estimates["layer_distance"]
    own, ceiling = estimates["tau_attention_leave_one_out"], estimates["tau_leave_one_out_gradients"]
    best = estimates["comprehensiveness_leave_one_out"].mean - estimates["comprehensiveness_random"].mean
    compared = f"by {gain.mean:.3f} more than dropping random ones (in leave-one-out order by {best:.3f} more)"
    lines = []
    if reasons:
        lines.append(f"Verdict: not a causal explanation: {', and '.join(reasons)}.")
        if gain.low > 0:
            lines.append(f"Still, dropping the most attended inputs lowers the probability {compared}.")
    else:
        lines.append(
            "Verdict: attention points at inputs that matter: dropping the most attended lowers the probability "
            f"{compared}, and shuffling the weights moves {moved.mean:.0%} of the output's distribution."
        )
        lines.append(
            "This does not prove that they are the reason: other weights may give the same output, the model was not "
            "trained on erased inputs, and a position may carry information from other inputs."
        )
    if own.count and ceiling.count:
        lines.append(
            f"Its ranking of the inputs agrees with that of leave-one-out with tau {own.mean:.2f}; that of integrated "
            f"gradients, the other measure of what matters, with tau {ceiling.mean:.2f}."
        )
    return lines


def draw_faithfulness(
    shares: Sequence[int],
    curves: Mapping[str, np.ndarray],
    measures: Mapping[str, np.ndarray],
    estimates: Mapping[str, Estimate],
    title: str,
    seed: int,
    shuffled: str,
) -> Figure:
    """Draws the erasure curves with 95% bands, and the rank correlations and shuffled distances of each example.

    Args:
        shares: the shares of erased inputs in percent, the horizontal axis of the curves.
        curves: the probabilities for each order, (examples, shares), by the name of the order.
        measures: the values of all examples, by the name of the measure.
        estimates: the means of the measures, by name.
        title: title of the figure.
        seed: seed of the bootstrap and of the horizontal scatter of the points.
        shuffled: the part whose weights are shuffled, "layer" or "head".
    """
    figure = Figure(figsize=(13.5, 4.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.35, 1.25, 0.75))
    for name, (label, colour, style) in _ORDERS.items():
        low, high = np.quantile(_resampled_means(curves[name], seed), (0.025, 0.975), axis=0)
        left.plot(shares, curves[name].mean(axis=0), style, color=colour, label=label, marker="o", markersize=3)
        left.fill_between(shares, low, high, color=colour, alpha=0.15, linewidth=0)
    left.set(xlabel="inputs dropped (%)", ylabel="probability of the prediction", xlim=(-2, 102), ylim=(0, None))
    left.set_title("Erasure", fontsize=10)
    # Below the axes, where it hides no curve.
    figure.legend(loc="outside lower left", ncols=len(_ORDERS), fontsize=9, frameon=False)
    rng = np.random.default_rng(seed)
    _draw_points(middle, _TAUS, measures, estimates, rng)
    middle.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    middle.set(ylabel="Kendall's tau", ylim=(-1.05, 1.05))
    middle.set_title("Rank correlation of the inputs", fontsize=10)
    shuffles = {name: label.format(shuffled=shuffled) for name, label in _SHUFFLES.items()}
    _draw_points(right, shuffles, measures, estimates, rng)
    right.set(ylabel="total variation distance", ylim=(-0.03, 1.03))
    right.set_title("Shuffled weights", fontsize=10)
    count = len(next(iter(measures.values())))
    set_title(figure, f"{title} · {count} examples")
    return figure


def _draw_points(
    axes: Any,
    labels: Mapping[str, str],
    measures: Mapping[str, np.ndarray],
    estimates: Mapping[str, Estimate],
    rng: np.random.Generator,
) -> None:
    """Draws a column of points for each measure, and beside it the mean with its interval."""
    for place, name in enumerate(labels):
        values, found = measures[name], estimates[name]
        axes.plot(place + rng.uniform(-0.28, 0.02, len(values)), values, ".", color="0.6", markersize=4, alpha=0.7)
        if not found.count:
            continue
        bars = [[found.mean - found.low], [found.high - found.mean]]
        axes.errorbar(place + 0.2, found.mean, np.abs(bars), fmt="o", color="C0", capsize=4)
        axes.annotate(f"{found.mean:.2f}", (place + 0.27, found.mean), fontsize=8, va="center")
    axes.set_xticks(range(len(labels)), list(labels.values()), fontsize=8)
    axes.set_xlim(-0.5, len(labels) - 0.35)
