"""Metrics of generated text, each computed from a list of predictions and a list of references.

They are case-sensitive, and normalise texts only where their documentation says so.
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
    """The share of predictions that equal their reference, character for character, from 0 to 1.

    Rajpurkar et al. (2016), https://arxiv.org/abs/1606.05250. They ignore case, punctuation and articles when they
    compare; here all of these count.

    Args:
        predictions: the generated texts.
        references: the correct text for each prediction.

    Raises:
        TypeError: if either is one string.
        ValueError: if the lists are empty or not of the same length.
    """
    _check(predictions, references)
    pairs = zip(predictions, references, strict=True)
    return sum(prediction == reference for prediction, reference in pairs) / len(predictions)


def token_f1(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The F1 score of the words of a prediction and its reference, averaged over all texts, from 0 to 1.

    A text counts as the bag of its words, split at white space: their order is ignored, their repetition is not. Two
    empty texts have an F1 of 1. Rajpurkar et al. (2016), https://arxiv.org/abs/1606.05250. They ignore case,
    punctuation and articles; here all of these count.

    Args:
        predictions: the generated texts.
        references: the correct text for each prediction.

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
    """The BLEU of a corpus, from 0 to 100, computed from n-grams of up to four words, counted over all texts together.

    Papineni et al. (2002), https://aclanthology.org/P02-1040, as sacreBLEU computes it by default (Post, 2018,
    https://arxiv.org/abs/1804.08771): with one reference; with the tokenizer "13a", which separates words from
    punctuation, decodes HTML entities and joins hyphenated line breaks; and with "exp" smoothing of n-gram orders
    without a match.

    Args:
        predictions: the generated texts.
        references: the correct text for each prediction.

    Raises:
        TypeError: if either is one string.
        ValueError: if the lists are empty or not of the same length.
    """
    _check(predictions, references)
    # `force` silences the warning that the texts look tokenised, as those of word tokenizers always do.
    return BLEU(tokenize="13a", smooth_method="exp", force=True).corpus_score(predictions, [references]).score


def chrf(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The chrF of a corpus, from 0 to 100, computed from n-grams of up to six characters, over all texts together.

    Popović (2015), https://aclanthology.org/W15-3049, as sacreBLEU computes it by default: recall weighs twice as much
    as precision (chrF2), and white space is ignored.

    Args:
        predictions: the generated texts.
        references: the correct text for each prediction.

    Raises:
        TypeError: if either is one string.
        ValueError: if the lists are empty or not of the same length.
    """
    _check(predictions, references)
    return CHRF(char_order=6, word_order=0, beta=2).corpus_score(predictions, [references]).score


def perplexity(total_loss: float, count: int) -> float:
    """The perplexity of a text: the exponential of the mean loss per token, or infinity if that is too large.

    Jelinek et al. (1977), "Perplexity: a measure of the difficulty of speech recognition tasks".

    Args:
        total_loss: sum of the tokens' negative log-likelihoods, in nats.
        count: number of tokens.

    Raises:
        ValueError: if `count` is less than 1.
    """
    if count < 1:
        raise ValueError(f"`count` ({count}) must be at least 1")
    try:
        return math.exp(total_loss / count)
    except OverflowError:
        return math.inf
