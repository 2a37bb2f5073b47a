"""Measures of which inputs a prediction depends on: erasure, leave-one-out and integrated gradients.

Comprehensiveness and sufficiency follow DeYoung et al. (2020, ERASER), https://arxiv.org/abs/1911.03429; integrated
gradients Sundararajan et al. (2017), https://arxiv.org/abs/1703.01365; the comparison with attention by Kendall's tau
Jain and Wallace (2019), https://arxiv.org/abs/1902.10186.

Dimension letters: P inputs that may be erased, S shares, R orders.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .prediction import BATCH, Prediction

# Shares of the inputs in percent: those that ERASER averages over, and those of the erasure curves.
SHARES = (1, 5, 10, 20, 50)
CURVE_SHARES = (0, 1, 5, 10, 20, 35, 50, 75, 100)
# Integrated gradients take this many steps along a path. If their sum is off by more than the tolerance, the path is
# halved and each half is integrated in the same way, up to this depth.
STEPS, TOLERANCE, DEPTH = 16, 0.001, 8


def number_of_inputs(share: int, inputs: int) -> int:
    """Returns how many inputs a share in percent is, rounded up, so that any share of a short text is at least one."""
    return -(-share * inputs // 100)


def erasure_masks(orders: np.ndarray, shares: Sequence[int]) -> Tensor:
    """Returns masks that are True at the first inputs of each order.

    Args:
        orders: the inputs in the order in which they are erased, (R, P).
        shares: how many are erased, in percent, (S,).

    Returns:
        (R, S, P).
    """
    inputs = orders.shape[1]
    ranks = np.empty_like(orders)
    np.put_along_axis(ranks, orders, np.broadcast_to(np.arange(inputs), orders.shape), axis=1)
    counts = np.array([number_of_inputs(share, inputs) for share in shares])
    return torch.from_numpy(ranks[:, None, :] < counts[None, :, None])


def descending_order(scores: np.ndarray) -> np.ndarray:
    """Returns the inputs in descending order of their scores (P,); equal scores keep their order."""
    return np.argsort(-scores, kind="stable")


@torch.no_grad()
def erased_probability(prediction: Prediction, masks: Tensor) -> np.ndarray:
    """Returns the probability of the prediction with the masked inputs erased: masks (..., P) give (...)."""
    flat = masks.flatten(0, -2)
    # Many masks are equal: every order starts with nothing erased and ends with everything erased.
    distinct, indices = flat.unique(dim=0, return_inverse=True)
    found = torch.cat([prediction.probability(prediction.erase(part)) for part in distinct.split(BATCH)])
    return found.cpu().double().numpy()[indices.numpy()].reshape(masks.shape[:-1])


@torch.no_grad()
def leave_one_out(prediction: Prediction) -> np.ndarray:
    """Returns by how much the probability of the prediction falls if one input alone is erased, (P,)."""
    one_each = torch.eye(len(prediction.erasable_keys), dtype=torch.bool)
    whole = erased_probability(prediction, torch.zeros_like(one_each[:1]))
    return whole - erased_probability(prediction, one_each)


def comprehensiveness(prediction: Prediction, orders: np.ndarray) -> np.ndarray:
    """Returns by how much the probability falls without the first inputs of each order, averaged over `SHARES`.

    The higher the value, the more the prediction needs the inputs that come first.

    Args:
        prediction: the prediction.
        orders: the inputs in the order in which they are erased, (R, P).

    Returns:
        (R,).
    """
    masks = erasure_masks(orders, SHARES)
    whole = erased_probability(prediction, torch.zeros_like(masks[0, :1]))
    return (whole - erased_probability(prediction, masks)).mean(axis=-1)


def sufficiency(prediction: Prediction, orders: np.ndarray) -> np.ndarray:
    """Returns by how much the probability falls with only the first inputs of each order, averaged over `SHARES`.

    The lower the value, the closer these inputs alone are to being enough for the prediction.

    Args:
        prediction: the prediction.
        orders: the inputs in the order in which they are kept, (R, P).

    Returns:
        (R,).
    """
    masks = erasure_masks(orders, SHARES)
    whole = erased_probability(prediction, torch.zeros_like(masks[0, :1]))
    return (whole - erased_probability(prediction, ~masks)).mean(axis=-1)


def erasure_curves(prediction: Prediction, orders: np.ndarray) -> np.ndarray:
    """Returns the probability without the first inputs of orders (R, P), for each share of `CURVE_SHARES`: (R, S)."""
    return erased_probability(prediction, erasure_masks(orders, CURVE_SHARES))


def integrated_gradients(prediction: Prediction) -> tuple[np.ndarray, float]:
    """Attributes the probability of the prediction to its inputs, along the straight path from all erased to none.

    The attributions add up to the difference in probability between the two ends (completeness), up to an error
    because the path is taken in steps.

    Returns:
        The attribution of each input, (P,), and the absolute error of their sum.
    """
    captum = importlib.import_module("captum.attr")
    values = prediction.values.detach()
    everything = torch.ones(1, len(prediction.erasable_keys), dtype=torch.bool)
    baseline = prediction.erase(everything).detach()
    method = captum.IntegratedGradients(prediction.probability)

    def attribute(start: Tensor, end: Tensor, depth: int) -> Tensor:
        attributions = method.attribute(
            end.clone(), baselines=start, n_steps=STEPS, internal_batch_size=BATCH
        ).detach()
        if depth == 0 or _incompleteness(prediction, attributions, start, end) <= TOLERANCE:
            return attributions
        # The attributions of the parts of a path add up. The probability of a confident model changes within a short
        # part of the path, which would take very many steps of equal length.
        middle = (start + end) / 2
        return attribute(start, middle, depth - 1) + attribute(middle, end, depth - 1)

    # cuDNN's recurrent layers have no gradients in evaluation mode.
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False), warnings.catch_warnings():
        # Captum warns when it marks its inputs as requiring gradients.
        warnings.filterwarnings("ignore", message="Input Tensor", category=UserWarning)
        attributions = attribute(baseline, values, DEPTH)
    error = _incompleteness(prediction, attributions, baseline, values)
    return prediction.sum_by_input(attributions).cpu().double().numpy(), error


@torch.no_grad()
def _incompleteness(prediction: Prediction, attributions: Tensor, start: Tensor, end: Tensor) -> float:
    """Returns how far the sum of attributions is from the difference between the two ends of their path."""
    first, last = prediction.probability(torch.cat([start, end])).double().tolist()
    return abs(float(attributions.double().sum()) - (last - first))


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Returns Kendall's tau of two scores of the same inputs; NaN if all values of one score are equal."""
    stats = importlib.import_module("scipy.stats")
    # scipy would return NaN too, but warn.
    if len(np.unique(first)) < 2 or len(np.unique(second)) < 2:
        return float("nan")
    return float(stats.kendalltau(first, second).statistic)
