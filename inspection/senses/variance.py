"""How much of the variance of word vectors lies between the contexts of a word.

Dimension letters: W words, n occurrences of a word, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class VarianceComponents:
    """The variance of word vectors, split into that between words and that within words, between their contexts.

    Attributes:
        within: variance within each word, (W,): the sum of the squared distances of its vectors from their mean,
            divided by n - 1.
        between: variance between words: the sum of the squared distances of the word means from their mean, divided by
            W - 1, minus the mean of within / n, which the variance within words adds by chance.
    """

    within: np.ndarray
    between: float

    @property
    def total(self) -> float:
        """Half the expected squared distance between two vectors of two random words."""
        return float(self.within.mean()) + self.between

    @property
    def shares(self) -> np.ndarray:
        """The variance between the contexts of each word, as a share of the total, (W,).

        The mean of the shares is one minus the intraclass correlation. In a static embedding the shares are 0.
        """
        return self.within / self.total if self.total > 0 else np.zeros_like(self.within)


def variance_components(words: Sequence[np.ndarray]) -> VarianceComponents:
    """Splits the variance of word vectors; each word counts equally, however often it occurs.

    This is the analysis of variance with one random effect, the word, over all D dimensions together (Fisher, 1925,
    Statistical Methods for Research Workers, chapter 7; Shrout and Fleiss, 1979).

    Args:
        words: the vectors of each word, (n, D); at least two words with at least two vectors each.
    """
    means = np.stack([vectors.mean(axis=0, dtype=np.float64) for vectors in words])
    sums = [((vectors - mean) ** 2).sum() for vectors, mean in zip(words, means, strict=True)]
    counts = np.array([len(vectors) for vectors in words])
    within = np.array(sums) / (counts - 1)
    spread = ((means - means.mean(axis=0)) ** 2).sum() / (len(words) - 1)
    return VarianceComponents(within, float(spread - (within / counts).mean()))


def self_similarity(vectors: np.ndarray) -> float:
    """Returns the mean cosine of a word's vectors in two contexts (Ethayarajh, 2019, https://arxiv.org/abs/1909.00512).

    Args:
        vectors: the vectors of one word, (n, D).
    """
    count = len(vectors)
    total = (_directions(vectors).sum(axis=0) ** 2).sum()
    # The n pairs of a vector with itself, each with a cosine of 1, do not count.
    return float((total - count) / (count * (count - 1)))


def anisotropy(words: Sequence[np.ndarray]) -> float:
    """Returns the mean cosine of the vectors of two different words, the baseline for self-similarity.

    Ethayarajh (2019) draws random occurrences of any words. Here the two are never of the same word, and each word
    counts equally.

    Args:
        words: the vectors of each word, (n, D).
    """
    means = np.stack([_directions(vectors).mean(axis=0) for vectors in words])
    count = len(means)
    return float(((means.sum(axis=0) ** 2).sum() - (means**2).sum()) / (count * (count - 1)))


def _directions(vectors: np.ndarray) -> np.ndarray:
    wide = vectors.astype(np.float64)
    return wide / np.linalg.norm(wide, axis=1, keepdims=True)


def share_between(vectors: np.ndarray, labels: np.ndarray) -> float:
    """Returns the share of the vectors' variance that lies between groups of them (R²).

    Args:
        vectors: the vectors, (n, D).
        labels: the group of each vector, (n,).
    """
    wide = vectors.astype(np.float64)
    total = ((wide - wide.mean(axis=0)) ** 2).sum()
    within = sum(((group - group.mean(axis=0)) ** 2).sum() for group in (wide[labels == each] for each in set(labels)))
    return float(1 - within / total) if total > 0 else 0.0


def share_explained(vectors: np.ndarray, properties: np.ndarray) -> float:
    """Returns the share of the vectors' variance that a linear regression on properties of the occurrences explains.

    This is R² over all D dimensions together, adjusted for the number of properties: for uninformative properties it
    is 0 on average, and may be negative.

    Args:
        vectors: the vectors, (n, D).
        properties: the properties of each occurrence, (n, properties).
    """
    varying = properties[:, properties.std(axis=0) > 0]
    design = np.column_stack([np.ones(len(vectors)), varying])
    wide = vectors.astype(np.float64)
    solution, _, rank, _ = np.linalg.lstsq(design, wide, rcond=None)
    rest = ((wide - design @ solution) ** 2).sum() / (len(wide) - rank)
    total = ((wide - wide.mean(axis=0)) ** 2).sum() / (len(wide) - 1)
    return float(1 - rest / total) if total > 0 else 0.0
