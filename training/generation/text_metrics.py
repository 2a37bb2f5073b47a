"""Measures of generated text, each from a list of predictions and the list of what they should have been.

They are case-sensitive, and normalise nothing unless they say so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from sacrebleu.metrics import BLEU, CHRF


def _check(predictions: Sequence[str], references: Sequence[str]) -> None:
    for name, texts in (("predictions", predictions), ("references", references)):
        if isinstance(texts, str):
            raise TypeError(f"`{name}` must be a list of strings, not one string")
    if not predictions or len(predictions) != len(references):
        raise ValueError(
            f"`predictions` ({len(predictions)}) and `references` ({len(references)}) must be lists of the same "
            "length, with one text or more"
        )


def exact_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The share of predictions that are their reference, character for character, from 0 to 1.

    Rajpurkar et al. (2016), https://arxiv.org/abs/1606.05250, who compare without case, punctuation and articles; here
    these count.

    Args:
        predictions: the generated texts.
        references: for each, what it should have been.

    Raises:
        TypeError: if either is one string.
        ValueError: if the lists are empty or not of the same length.
    """
    _check(predictions, references)
    pairs = zip(predictions, references, strict=True)
    return sum(prediction == reference for prediction, reference in pairs) / len(predictions)


def token_f1(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The mean over texts of the F1 of their words, from 0 to 1.

    A text is the bag of its words, as white space parts them: order does not count, repetition does. Two empty texts
    have an F1 of 1. Rajpurkar et al. (2016), https://arxiv.org/abs/1606.05250, who leave out case, punctuation and
    articles; here these count.

    Args:
        predictions: the generated texts.
        references: for each, what it should have been.

    Raises:
        TypeError: if either is one string.
        ValueError: if the lists are empty or not of the same length.
    """
    _check(predictions, references)
    total = 0.0
    for prediction, reference in zip(predictions, references, strict=True):
        found, wanted = Counter(prediction.split()), Counter(reference.split())
        words = found.total() + wanted.total()
        total += 2 * (found & wanted).total() / words if words else 1.0
    return total / len(predictions)


def bleu(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The BLEU of a corpus, from 0 to 100: n-grams of up to four words, counted over all texts together.

    Papineni et al. (2002), https://aclanthology.org/P02-1040, as sacreBLEU computes it by default (Post, 2018,
    https://arxiv.org/abs/1804.08771): one reference, words and punctuation parted by the rules of "13a", which read
    HTML entities and hyphenated line breaks as plain text, and "exp" smoothing of orders without a match.

    Args:
        predictions: the generated texts.
        references: for each, what it should have been.

    Raises:
        TypeError: if either is one string.
        ValueError: if the lists are empty or not of the same length.
    """
    _check(predictions, references)
    # Forced: there is no need to be told that the texts look tokenized, as those of word tokenizers do.
    return BLEU(tokenize="13a", smooth_method="exp", force=True).corpus_score(predictions, [references]).score


def chrf(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The chrF of a corpus, from 0 to 100: n-grams of up to six characters, counted over all texts together.

    Popović (2015), https://aclanthology.org/W15-3049, as sacreBLEU computes it by default: recall weighs twice as much
    as precision (chrF2), and white space is left out.

    Args:
        predictions: the generated texts.
        references: for each, what it should have been.

    Raises:
        TypeError: if either is one string.
        ValueError: if the lists are empty or not of the same length.
    """
    _check(predictions, references)
    return CHRF(char_order=6, word_order=0, beta=2).corpus_score(predictions, [references]).score


def perplexity(total_loss: float, count: int) -> float:
    """The perplexity of a text: the exponential of the mean loss per token, infinite where that is too large.

    Jelinek et al. (1977), "Perplexity: a measure of the difficulty of speech recognition tasks".

    Args:
        total_loss: sum of the tokens' negative log-likelihoods, in nats.
        count: number of the tokens.

    Raises:
        ValueError: if there are no tokens.
    """
    if count < 1:
        raise ValueError(f"`count` ({count}) must be at least 1")
    try:
        return math.exp(total_loss / count)
    except OverflowError:
        return math.inf
