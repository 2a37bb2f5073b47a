"""What erasing inputs does to a prediction, and what its gradients say of them.

DeYoung et al. (2020, ERASER), https://arxiv.org/abs/1911.03429, for comprehensiveness and sufficiency; Sundararajan et
al. (2017), https://arxiv.org/abs/1703.01365, for integrated gradients; Jain and Wallace (2019),
https://arxiv.org/abs/1902.10186, for comparing them with attention by Kendall's tau.

Dimension letters: P inputs that may be erased, S shares, R orders.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from .prediction import BATCH, Prediction

# Shares in percent: those that ERASER averages over, and those of the curves.
SHARES = (1, 5, 10, 20, 50)
CURVE = (0, 1, 5, 10, 20, 35, 50, 75, 100)
# The path of integrated gradients is taken in so many steps; while what they add up to is off by more than this, each
# half of it is, down to halves of halves so many times.
STEPS, TOLERANCE, DEPTH = 16, 0.001, 8


def require_packages() -> None:
    """Checks that what the tests of faithfulness need is installed.

    Raises:
        ValueError: if it is not, with what installs it.
    """
    missing = [name for name in ("captum", "scipy") if find_spec(name) is None]
    if missing:
        raise ValueError(f"tests of faithfulness need {' and '.join(missing)}: pip install 'regard[faithfulness]'")


def number_of_inputs(share: int, inputs: int) -> int:
    """How many inputs a share in percent is, rounded up: of a text that is short one at least."""
    return -(-share * inputs // 100)


def masks_of(orders: np.ndarray, shares: Sequence[int]) -> Tensor:
    """Which inputs are among the first ones of orders (R, P) by each share in percent: (R, S, P)."""
    inputs = orders.shape[1]
    ranks = np.empty_like(orders)
    np.put_along_axis(ranks, orders, np.broadcast_to(np.arange(inputs), orders.shape), axis=1)
    counts = np.array([number_of_inputs(share, inputs) for share in shares])
    return torch.from_numpy(ranks[:, None, :] < counts[None, :, None])


def most_first(scores: np.ndarray) -> np.ndarray:
    """The inputs by their scores (P,), the largest first; equal ones as they stand."""
    return np.argsort(-scores, kind="stable")


@torch.no_grad()
def after_erasing(prediction: Prediction, masks: Tensor) -> np.ndarray:
    """The probability of the prediction with inputs erased: masks (..., P) give (...)."""
    flat = masks.flatten(0, -2)
    # Orders begin with the same inputs, and all end with none.
    different, places = flat.unique(dim=0, return_inverse=True)
    found = torch.cat([prediction.probability(prediction.erased(part)) for part in different.split(BATCH)])
    return found.cpu().double().numpy()[places.numpy()].reshape(masks.shape[:-1])


@torch.no_grad()
def leave_one_out(prediction: Prediction) -> np.ndarray:
    """By how much the probability of the prediction falls when an input alone is erased, (P,)."""
    one_each = torch.eye(len(prediction.places), dtype=torch.bool)
    whole = after_erasing(prediction, torch.zeros_like(one_each[:1]))
    return whole - after_erasing(prediction, one_each)


def comprehensiveness(prediction: Prediction, orders: np.ndarray) -> np.ndarray:
    """By how much the probability falls without the first inputs of orders (R, P), the mean over `SHARES`: (R,).

    The higher, the more the prediction needed what an order puts first.
    """
    masks = masks_of(orders, SHARES)
    whole = after_erasing(prediction, torch.zeros_like(masks[0, :1]))
    return (whole - after_erasing(prediction, masks)).mean(axis=-1)


def sufficiency(prediction: Prediction, orders: np.ndarray) -> np.ndarray:
    """By how much the probability falls with the first inputs of orders (R, P) alone, the mean over `SHARES`: (R,).

    The lower, the more those were enough for the prediction.
    """
    masks = masks_of(orders, SHARES)
    whole = after_erasing(prediction, torch.zeros_like(masks[0, :1]))
    return (whole - after_erasing(prediction, ~masks)).mean(axis=-1)


def erasure_curves(prediction: Prediction, orders: np.ndarray) -> np.ndarray:
    """The probability without the first inputs of orders (R, P), for each share of `CURVE`: (R, S)."""
    return after_erasing(prediction, masks_of(orders, CURVE))


def integrated_gradients(prediction: Prediction) -> tuple[np.ndarray, float]:
    """What each input adds to the probability on the straight way from all erased to none.

    What they add up to is the difference between the two ends (completeness), but for the error of taking the way in
    steps.

    Returns:
        (P,), and that error.
    """
    captum = importlib.import_module("captum.attr")
    values = prediction.values.detach()
    everything = torch.ones(1, len(prediction.places), dtype=torch.bool)
    baseline = prediction.erased(everything).detach()
    method = captum.IntegratedGradients(prediction.probability)

    def between(start: Tensor, end: Tensor, depth: int) -> Tensor:
        attributions = method.attribute(
            end.clone(), baselines=start, n_steps=STEPS, internal_batch_size=BATCH
        ).detach()
        if depth == 0 or _incompleteness(prediction, attributions, start, end) <= TOLERANCE:
            return attributions
        # Attributions of the parts of a path add up; a probability that changes within a short part of it, as those of
        # models that are sure do, would take very many steps of one length.
        middle = (start + end) / 2
        return between(start, middle, depth - 1) + between(middle, end, depth - 1)

    # cuDNN's recurrent layers have no gradients in evaluation.
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False), warnings.catch_warnings():
        # It marks its inputs as needing gradients, and says so.
        warnings.filterwarnings("ignore", message="Input Tensor", category=UserWarning)
        attributions = between(baseline, values, DEPTH)
    error = _incompleteness(prediction, attributions, baseline, values)
    return prediction.by_input(attributions).cpu().double().numpy(), error


@torch.no_grad()
def _incompleteness(prediction: Prediction, attributions: Tensor, start: Tensor, end: Tensor) -> float:
    """How far the sum of attributions is from the difference of the two ends of their path."""
    first, last = prediction.probability(torch.cat([start, end])).double().tolist()
    return abs(float(attributions.double().sum()) - (last - first))


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Kendall's tau of two scores of the same inputs; NaN where all of one are equal."""
    stats = importlib.import_module("scipy.stats")
    # Without scipy's warning, where there is nothing to rank.
    if len(np.unique(first)) < 2 or len(np.unique(second)) < 2:
        return float("nan")
    return float(stats.kendalltau(first, second).statistic)
