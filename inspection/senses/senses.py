"""A word's contextual vectors beside the one vector that word2vec has for it: its uses, and what tells them apart."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ...configuration.seeds import require_seed
from ..maps.text_weights import most_tokens
from .clusters import Clusters, find_clusters
from .occurrences import Context, Occurrence, Vectors, WordReader, contextual_vectors, has_own_pieces
from .variance import anisotropy, self_similarity, share_explained, variance_components
from .word2vec import static_neighbours

# Fewer occurrences than these are no basis for clusters, nor for a word to be compared with.
FEWEST, FEWEST_COMPARED = 10, 10


@dataclass(frozen=True)
class Sense:
    """A cluster of a word's occurrences.

    Attributes:
        occurrences: how many are in it.
        examples: the nearest to its centre, the nearest first.
        companions: words that stand in its contexts more than in those of the other clusters, the most telling first.
    """

    occurrences: int
    examples: tuple[Occurrence, ...]
    companions: tuple[str, ...]


@dataclass(frozen=True)
class LayerVariance:
    """How contextual the vectors of a layer are.

    Attributes:
        share: of the variance of all words' vectors, what lies between the contexts of the word; 0 if it is static.
        mean_share: the same of the words compared, on average: one less the intraclass correlation.
        self_similarity: mean cosine of the word's vectors in two contexts; 1 if it is static.
        anisotropy: mean cosine of the vectors of two different words.
    """

    share: float
    mean_share: float
    self_similarity: float
    anisotropy: float

    @property
    def corrected_similarity(self) -> float:
        """The self-similarity less what two different words have in common (Ethayarajh, 2019)."""
        return self.self_similarity - self.anisotropy


@dataclass(frozen=True)
class WordSenses:
    """A word's uses.

    Attributes:
        word: the word, as all its spellings are written.
        layer: the layer whose vectors are clustered; 0 is that of the embeddings.
        contexts: how many different texts have the word.
        occurrences: the word in those that were looked at, once in each.
        clusters: of the occurrences.
        senses: the clusters, the largest first.
        static_neighbours: the nearest words by word2vec, with their cosines.
        position_share: share of the variance between the word's contexts that its place and their length explain.
        words: how many words were compared with it.
        layers: each layer's figures.
    """

    word: str
    layer: int
    contexts: int
    occurrences: tuple[Occurrence, ...]
    clusters: Clusters
    senses: tuple[Sense, ...]
    static_neighbours: tuple[tuple[str, float], ...]
    position_share: float
    words: int
    layers: tuple[LayerVariance, ...]


def word_senses(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Iterable[str],
    word: str,
    *,
    layer: int = -1,
    senses: int | None = None,
    examples: int = 3,
    max_occurrences: int = 300,
    max_length: int = 64,
    words: int = 100,
    word_occurrences: int = 20,
    seed: int = 0,
) -> WordSenses:
    """Clusters a word's contextual vectors, and tells how much of their variance lies between contexts.

    A text that comes several times counts once, and so does a word that stands in a text several times, by its first
    occurrence: no two vectors are of one context. The vector of a word is the mean of its pieces' hidden states.
    What is one word, and in which spellings, see `WordReader`.

    Args:
        model: any of transformers' that reads text, ours or stock. Of an encoder-decoder it is the encoder.
        tokenizer: of the model, a fast one.
        texts: the contexts: sentences, as a rule.
        word: which.
        layer: whose vectors are clustered: 0 is that of the embeddings, -1 the last.
        senses: how many clusters; if None, what seems right, which may be 1: see `find_clusters`.
        examples: how many are kept of each.
        max_occurrences: how many occurrences of the word are looked at; of more a sample is drawn.
        max_length: how many tokens around the word the model reads at most. A model may have more positions than it
            was trained on.
        words: how many other words are compared, those of the most similar numbers of occurrences.
        word_occurrences: how many occurrences of each are looked at.
        seed: of the samples, the clusters and word2vec.

    Raises:
        ValueError: if an argument won't do, the word occurs too rarely or is none that the tokenizer knows, there are
            too few words to compare, or a package of the extra `senses` is missing.
    """
    require_seed(seed)
    _check(model, tokenizer, word, {"examples": examples, "max_length": max_length, "words": words})
    for name, number in (("max_occurrences", max_occurrences), ("word_occurrences", word_occurrences)):
        if number < FEWEST:
            raise ValueError(f"`{name}` ({number}) must be at least {FEWEST}")
    limit = most_tokens(model, tokenizer)
    reader = WordReader(tokenizer, word)
    contexts = reader.read(texts)
    word = reader.word
    places = _places_of_words(contexts)
    having = places.get(word, [])
    if len(having) < FEWEST:
        raise ValueError(
            f"`word` ({word!r}) stands in {len(having)} different texts of {len(contexts)}: it must be in {FEWEST} or "
            "more; give more texts, or another word"
        )
    known = has_own_pieces(tokenizer)
    if not known(word):
        raise ValueError(f"`word` ({word!r}) is none that the tokenizer knows: the model can't tell it from others")
    compared = _similar_words(places, word, words, known)
    if len(compared) < 2:
        raise ValueError(f"`texts` has {len(compared)} other words of {FEWEST_COMPARED} occurrences: it must have 2")
    generator = random.Random(seed)
    chosen = [(word, max_occurrences), *((other, word_occurrences) for other in compared)]
    samples = [_sample(reader, contexts, places[each], each, most, generator) for each, most in chosen]
    vectors = contextual_vectors(model, tokenizer, list(chain.from_iterable(samples)), min(max_length, limit))
    ends = np.cumsum([len(sample) for sample in samples])
    groups = [np.split(states, ends[:-1]) for states in vectors.layers]
    if not -len(groups) <= layer < len(groups):
        raise ValueError(f"`layer` ({layer}) must be at least {-len(groups)} and less than {len(groups)}")
    layer %= len(groups)
    own = groups[layer][0]
    clusters = find_clusters(own, senses, seed)
    return WordSenses(
        word,
        layer,
        len(having),
        tuple(samples[0]),
        clusters,
        _senses(reader, samples[0], clusters, examples),
        tuple(static_neighbours([context.words for context in contexts], word, seed=seed)),
        share_explained(own, _places(vectors, len(own))),
        len(compared),
        tuple(map(_layer_variance, groups)),
    )


def _check(model: Any, tokenizer: Any, word: str, numbers: dict[str, int]) -> None:
    name = type(model).__name__
    if hasattr(model, "feature_grid") or model.main_input_name != "input_ids":
        raise ValueError(f"`model` is a {name}, which reads no text: give one that does")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"`tokenizer` is a {type(tokenizer).__name__}: it must be a fast one, which knows offsets")
    if not word or any(map(str.isspace, word)):
        raise ValueError(f"`word` ({word!r}) must be one word, without white space")
    for argument, number in numbers.items():
        if number < 1:
            raise ValueError(f"`{argument}` ({number}) must be at least 1")


def _places_of_words(contexts: Sequence[Context]) -> dict[str, list[int]]:
    """Of each word the contexts that have it."""
    places: dict[str, list[int]] = {}
    for number, context in enumerate(contexts):
        for word in dict.fromkeys(context.words):
            places.setdefault(word, []).append(number)
    return places


def _similar_words(places: dict[str, list[int]], word: str, count: int, known: Any) -> list[str]:
    """The words, not signs or numbers, that occur about as often as a word."""
    own = math.log(len(places[word]))
    frequent = [
        (abs(math.log(len(having)) - own), other)
        for other, having in places.items()
        if len(having) >= FEWEST_COMPARED and other != word and any(map(str.isalpha, other))
    ]
    found: list[str] = []
    for _, other in sorted(frequent):
        if len(found) == count:
            break
        if known(other):
            found.append(other)
    return found


def _sample(
    reader: WordReader, contexts: Sequence[Context], having: list[int], word: str, most: int, generator: random.Random
) -> list[Occurrence]:
    drawn = sorted(generator.sample(having, most)) if len(having) > most else having
    return [reader.occurrence(contexts[place], word) for place in drawn]


def _senses(
    reader: WordReader, occurrences: Sequence[Occurrence], clusters: Clusters, examples: int
) -> tuple[Sense, ...]:
    texts = [{word for word, _, _ in reader.words(occurrence.text)} for occurrence in occurrences]
    senses = []
    for number in range(int(clusters.labels.max()) + 1):
        members = clusters.nearest(number)
        rest = np.flatnonzero(clusters.labels != number)
        here, there = (Counter(chain.from_iterable(texts[place] for place in places)) for places in (members, rest))
        kept = tuple(occurrences[place] for place in members[:examples])
        senses.append(Sense(len(members), kept, _companions(here, there, len(members), len(rest), reader.word)))
    return tuple(senses)


def _companions(
    here: Counter[str], there: Counter[str], size: int, others: int, word: str, count: int = 10
) -> tuple[str, ...]:
    """The words that tell one set of contexts from another by Dunning's log-likelihood ratio (1993)."""
    if not others:
        return ()
    ratios = []
    for each, found in here.items():
        elsewhere = there[each]
        rare = found + elsewhere < 3 or found * others <= elsewhere * size
        if rare or each == word or not any(map(str.isalpha, each)):
            continue
        expected = (found + elsewhere) / (size + others)
        ratio = sum(
            observed * math.log(observed / (total * share))
            for total, share, observed in (
                (size, expected, found),
                (size, 1 - expected, size - found),
                (others, expected, elsewhere),
                (others, 1 - expected, others - elsewhere),
            )
            if observed
        )
        ratios.append((-ratio, each))
    return tuple(each for _, each in sorted(ratios)[:count])


def _places(vectors: Vectors, count: int) -> np.ndarray:
    """What a vector may owe to where the word stands: place and length, with their logarithms."""
    positions, lengths = vectors.positions[:count], vectors.lengths[:count]
    return np.column_stack([positions, np.log1p(positions), lengths, np.log(lengths)]).astype(np.float64)


def _layer_variance(words: list[np.ndarray]) -> LayerVariance:
    shares = variance_components(words).shares
    return LayerVariance(float(shares[0]), float(shares[1:].mean()), self_similarity(words[0]), anisotropy(words))
