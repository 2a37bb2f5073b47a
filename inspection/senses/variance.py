"""How much of the variance of words' vectors lies between the contexts of a word.

Dimension letters: W words, n occurrences of a word, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class VarianceComponents:
    """The variance of vectors of words, split into that between words and that within them, between their contexts.

    Attributes:
        within: of each word, (W,): the sum of its vectors' squared distances from their mean, divided by n - 1.
        between: the sum of the word means' squared distances from the mean of these, divided by W - 1, less what the
            variance within words adds to it by chance, the mean of within / n.
    """

    within: np.ndarray
    between: float

    @property
    def total(self) -> float:
        """The expected squared distance of two vectors of two words drawn at random, halved."""
        return float(self.within.mean()) + self.between

    @property
    def shares(self) -> np.ndarray:
        """Of each word the variance between its contexts, as a share of the total, (W,).

        Their mean is one less the intraclass correlation. A static embedding has a share of 0.
        """
        return self.within / self.total if self.total > 0 else np.zeros_like(self.within)


def variance_components(words: Sequence[np.ndarray]) -> VarianceComponents:
    """Splits the variance of words' vectors, with every word weighing the same, however often it occurs.

    It is the analysis of variance of one random effect, the word, over all D dimensions together (Fisher, 1925,
    Statistical Methods for Research Workers, chapter 7; Shrout and Fleiss, 1979).

    Args:
        words: of each word its vectors, (n, D), two or more; of two words or more.
    """
    means = np.stack([vectors.mean(axis=0, dtype=np.float64) for vectors in words])
    sums = [((vectors - mean) ** 2).sum() for vectors, mean in zip(words, means, strict=True)]
    counts = np.array([len(vectors) for vectors in words])
    within = np.array(sums) / (counts - 1)
    spread = ((means - means.mean(axis=0)) ** 2).sum() / (len(words) - 1)
    return VarianceComponents(within, float(spread - (within / counts).mean()))


def self_similarity(vectors: np.ndarray) -> float:
    """Mean cosine of a word's vectors in two contexts (Ethayarajh, 2019, https://arxiv.org/abs/1909.00512).

    Args:
        vectors: of one word, (n, D).
    """
    count = len(vectors)
    total = (_directions(vectors).sum(axis=0) ** 2).sum()
    # The n pairs of a vector with itself have a cosine of 1.
    return float((total - count) / (count * (count - 1)))


def anisotropy(words: Sequence[np.ndarray]) -> float:
    """Mean cosine of vectors of two different words: what a self-similarity is to be compared with.

    Ethayarajh draws occurrences at random, of whatever words; here two are never of one word, and every word weighs
    the same.

    Args:
        words: of each word its vectors, (n, D).
    """
    means = np.stack([_directions(vectors).mean(axis=0) for vectors in words])
    count = len(means)
    return float(((means.sum(axis=0) ** 2).sum() - (means**2).sum()) / (count * (count - 1)))


def _directions(vectors: np.ndarray) -> np.ndarray:
    wide = vectors.astype(np.float64)
    return wide / np.linalg.norm(wide, axis=1, keepdims=True)


def share_between(vectors: np.ndarray, labels: np.ndarray) -> float:
    """The share of the vectors' variance that lies between groups of them (R²).

    Args:
        vectors: (n, D).
        labels: the group of each, (n,).
    """
    wide = vectors.astype(np.float64)
    total = ((wide - wide.mean(axis=0)) ** 2).sum()
    within = sum(((group - group.mean(axis=0)) ** 2).sum() for group in (wide[labels == each] for each in set(labels)))
    return float(1 - within / total) if total > 0 else 0.0


def share_explained(vectors: np.ndarray, properties: np.ndarray) -> float:
    """The share of the vectors' variance that a linear regression on properties of the occurrences explains.

    It is R² over all D dimensions together, adjusted for the number of properties, so that it is 0 on average for
    properties that say nothing (and may come out below).

    Args:
        vectors: (n, D).
        properties: numbers of each occurrence, (n, properties).
    """
    varying = properties[:, properties.std(axis=0) > 0]
    design = np.column_stack([np.ones(len(vectors)), varying])
    wide = vectors.astype(np.float64)
    solution, _, rank, _ = np.linalg.lstsq(design, wide, rcond=None)
    rest = ((wide - design @ solution) ** 2).sum() / (len(wide) - rank)
    total = ((wide - wide.mean(axis=0)) ** 2).sum() / (len(wide) - 1)
    return float(1 - rest / total) if total > 0 else 0.0
