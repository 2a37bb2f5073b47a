"""Clusters of vectors, and how many there are; one is a possible answer."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .variance import share_between

# The most clusters that are looked for, and how many vectors each must have on average.
MOST, LEAST_SIZE = 6, 5
# A structure is one at a level of 1 / (CLOUDS + 1) = 5%.
CLOUDS = 19


def load_extra(module: str, package: str) -> Any:
    """Imports a module that only this part needs.

    Raises:
        ValueError: if the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"senses need the package {package}: install the extra `senses`, or pip install gensim scikit-learn"
        ) from error


@dataclass(frozen=True)
class Clusters:
    """Clusters of vectors.

    Attributes:
        labels: cluster of each vector, (n,), from 0, the largest cluster first.
        axes: the vectors' coordinates on their principal axes, (n, axes), the most important first.
        axis_shares: share of the vectors' variance along each axis.
        share: of the vectors' variance between the clusters (R²); 0 of one cluster.
        chance_share: the same share where there are no clusters: when a cloud of one normal distribution, of the
            vectors' own covariance, is cut into as many.
        silhouette: the largest mean silhouette that was found, also if it was not enough; NaN if none was looked for.
        chance_silhouette: the largest that one of such clouds came to in the same search.
    """

    labels: np.ndarray
    axes: np.ndarray
    axis_shares: np.ndarray
    share: float
    chance_share: float
    silhouette: float
    chance_silhouette: float

    def nearest(self, cluster: int) -> np.ndarray:
        """The members of a cluster, the nearest to its centre first."""
        members = np.flatnonzero(self.labels == cluster)
        distances = ((self.axes[members] - self.axes[members].mean(axis=0)) ** 2).sum(axis=1)
        return members[distances.argsort(kind="stable")]


def find_clusters(vectors: np.ndarray, count: int | None = None, seed: int = 0) -> Clusters:
    """Finds clusters by k-means, so many or as many as there seem to be.

    The number is that of the largest mean silhouette (Rousseeuw, 1987), from 2 on. But k-means cuts any cloud into as
    many parts as it is asked for. So the same search is made in 19 clouds of as many points, from one normal
    distribution that has the vectors' own covariance: the null hypothesis of Liu et al. (2008,
    https://doi.org/10.1198/016214508000000454). If one of them comes to as large a silhouette, the number is 1. Of
    normally distributed vectors without clusters that is so in 19 cases of 20.

    Args:
        vectors: (n, D).
        count: how many clusters; if None, what seems right.
        seed: of the clouds and of the starts of k-means.

    Raises:
        ValueError: if there are too few vectors.
    """
    most = min(MOST, len(vectors) // LEAST_SIZE)
    if count is not None and not 1 <= count <= max(len(vectors) // 2, 1):
        raise ValueError(f"`senses` ({count}) must be at least 1 and at most half of the {len(vectors)} occurrences")
    axes, scales = _principal_axes(vectors)
    shares = scales**2 / max((scales**2).sum(), np.finfo(np.float64).tiny)
    one = Clusters(np.zeros(len(vectors), int), axes, shares, 0.0, 0.0, float("nan"), float("nan"))
    # The vectors of a static embedding are one.
    distinct = len(np.unique(axes, axis=0))
    tried = [number for number in ([count] if count else range(2, most + 1)) if 1 < number < distinct]
    if not tried:
        return one
    found = [_cut(axes, number, seed) for number in tried]
    generator = np.random.default_rng(seed)
    clouds = []
    for _ in range(CLOUDS):
        cloud = generator.standard_normal(axes.shape) * scales
        clouds.append([_cut(cloud, number, seed)[1:] for number in tried])
    chance = np.array(clouds)  # (clouds, numbers, silhouette and share)
    best = max(range(len(tried)), key=lambda place: found[place][1])
    labels, silhouette, share = found[best]
    chance_silhouette = float(chance[..., 0].max())
    if count is None and silhouette <= chance_silhouette:
        return replace(one, silhouette=silhouette, chance_silhouette=chance_silhouette)
    return Clusters(labels, axes, shares, share, float(chance[:, best, 1].mean()), silhouette, chance_silhouette)


def _principal_axes(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The vectors from their mean on, turned so that no two axes are correlated; and the deviation along each axis."""
    wide = vectors.astype(np.float64)
    left, sizes, right = np.linalg.svd(wide - wide.mean(axis=0), full_matrices=False)
    # Which way an axis points is left open by its definition.
    signs = np.sign(right[np.arange(len(right)), np.abs(right).argmax(axis=1)])
    # Directions that the vectors do not vary in, but for rounding.
    kept = sizes > 1e-6 * max(np.abs(wide).max(), np.finfo(np.float64).tiny)
    return (left * sizes * signs)[:, kept], sizes[kept] / np.sqrt(max(len(vectors) - 1, 1))


def _cut(points: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, float, float]:
    """Labels of so many clusters, the largest first; their mean silhouette and their share of the variance."""
    cluster: Any = load_extra("sklearn.cluster", "scikit-learn")
    metrics: Any = load_extra("sklearn.metrics", "scikit-learn")
    labels = cluster.KMeans(count, n_init=10, random_state=seed).fit_predict(points)
    order = np.bincount(labels, minlength=count).argsort(kind="stable")[::-1]
    labels = order.argsort()[labels]
    return labels, float(metrics.silhouette_score(points, labels)), share_between(points, labels)
