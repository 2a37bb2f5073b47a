"""The uses of a word: clusters of its contextual vectors, and how they compare with its one word2vec vector."""

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

from ...configuration.extras import require_extra
from ...families.seeds import require_seed
from ..maps.text_weights import token_limit
from .clusters import Clusters, find_clusters
from .occurrences import Context, Occurrence, Vectors, WordReader, contextual_vectors, is_known_word
from .variance import anisotropy, self_similarity, share_explained, variance_components
from .word2vec import static_neighbours

# The fewest occurrences that a word needs to be clustered, and to be compared with.
FEWEST, FEWEST_COMPARED = 10, 10


@dataclass(frozen=True)
class Sense:
    """A cluster of a word's occurrences.

    Attributes:
        occurrences: number of occurrences in the cluster.
        examples: the occurrences nearest to the centre of the cluster, the nearest first.
        companions: words that occur in its contexts more often than in those of the other clusters, the most
            characteristic first.
    """

    occurrences: int
    examples: tuple[Occurrence, ...]
    companions: tuple[str, ...]


@dataclass(frozen=True)
class LayerVariance:
    """How contextual the vectors of a layer are.

    Attributes:
        share: variance between the contexts of the word, as a share of the variance of all words' vectors; 0 for a
            static vector.
        mean_share: mean of that share over the compared words: one minus the intraclass correlation.
        self_similarity: mean cosine of the word's vectors in two contexts; 1 for a static vector.
        anisotropy: mean cosine of the vectors of two different words.
    """

    share: float
    mean_share: float
    self_similarity: float
    anisotropy: float

    @property
    def corrected_similarity(self) -> float:
        """The self-similarity minus the anisotropy (Ethayarajh, 2019)."""
        return self.self_similarity - self.anisotropy


@dataclass(frozen=True)
class WordSenses:
    """The uses of a word.

    Attributes:
        word: the word, in the spelling of `WordReader`.
        layer: number of the layer whose vectors are clustered; 0 is that of the embeddings.
        contexts: number of distinct texts that contain the word.
        occurrences: the sampled occurrences, one for each text.
        clusters: the clusters of their vectors.
        senses: the clusters with examples, the largest first.
        static_neighbours: the nearest words by word2vec, with their cosines.
        position_share: share of the variance between the word's contexts that its position and their length explain.
        words: number of other words in the comparison.
        layers: how contextual each layer is.
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
    """Clusters a word's contextual vectors, and measures how much of their variance lies between contexts.

    Repeated texts count once, and only the first occurrence of a word in a text counts, so every vector has a context
    of its own. The vector of a word is the mean of the hidden states of its tokens. `WordReader` says what counts as
    one word.

    Args:
        model: any model of transformers that reads text. Of an encoder-decoder the encoder is used.
        tokenizer: its tokenizer, a fast one.
        texts: the contexts, usually sentences.
        word: the word.
        layer: number of the layer whose vectors are clustered: 0 is that of the embeddings, -1 the last.
        senses: number of clusters; None to estimate it, with 1 as a possible answer, as `find_clusters` does.
        examples: number of example occurrences to keep of each cluster.
        max_occurrences: the most occurrences of the word to use; if there are more, a random sample.
        max_length: the most tokens around the word that the model reads. A model may have more positions than it was
            trained on.
        words: number of other words to compare with, those with the most similar numbers of occurrences.
        word_occurrences: the most occurrences of each of these to use.
        seed: seed of the samples, the clusters and word2vec.

    Raises:
        ValueError: if an argument is out of range, the word is too rare or unknown to the tokenizer, there are too few
            words to compare with, or a package of the extra `senses` is not installed.
    """
    require_extra("senses")
    require_seed(seed)
    _check(model, tokenizer, word, {"examples": examples, "max_length": max_length, "words": words})
    for name, number in (("max_occurrences", max_occurrences), ("word_occurrences", word_occurrences)):
        if number < FEWEST:
            raise ValueError(f"`{name}` ({number}) must be at least {FEWEST}")
    limit = token_limit(model, tokenizer)
    reader = WordReader(tokenizer, word)
    contexts = reader.read(texts)
    word = reader.word
    places = _contexts_of_words(contexts)
    having = places.get(word, [])
    if len(having) < FEWEST:
        raise ValueError(
            f"`word` ({word!r}) occurs in {len(having)} of {len(contexts)} distinct texts: it must occur in at least "
            f"{FEWEST}; give more texts, or another word"
        )
    if not is_known_word(tokenizer, word):
        raise ValueError(
            f"`word` ({word!r}) is unknown to the tokenizer: the model cannot tell it from other unknown words"
        )
    compared = _similar_words(tokenizer, places, word, words)
    if len(compared) < 2:
        raise ValueError(
            f"`texts` has {len(compared)} other words with at least {FEWEST_COMPARED} occurrences: there must be 2"
        )
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
        share_explained(own, _position_properties(vectors, len(own))),
        len(compared),
        tuple(map(_layer_variance, groups)),
    )


def _check(model: Any, tokenizer: Any, word: str, numbers: dict[str, int]) -> None:
    name = type(model).__name__
    if hasattr(model, "feature_grid") or model.main_input_name != "input_ids":
        raise ValueError(f"`model` is a {name}, which reads no text: use a model that reads text")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"`tokenizer` is a {type(tokenizer).__name__}: it must be a fast one, which returns offsets")
    if not word or any(map(str.isspace, word)):
        raise ValueError(f"`word` ({word!r}) must be one word, without white space")
    for argument, number in numbers.items():
        if number < 1:
            raise ValueError(f"`{argument}` ({number}) must be at least 1")


def _contexts_of_words(contexts: Sequence[Context]) -> dict[str, list[int]]:
    """Returns the numbers of the contexts that contain each word."""
    places: dict[str, list[int]] = {}
    for number, context in enumerate(contexts):
        for word in dict.fromkeys(context.words):
            places.setdefault(word, []).append(number)
    return places


def _similar_words(tokenizer: Any, places: dict[str, list[int]], word: str, count: int) -> list[str]:
    """Returns the words, without signs and numbers, that occur about as often as a word."""
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
        if is_known_word(tokenizer, other):
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
    """Returns the words that set one set of contexts apart from another, by Dunning's log-likelihood ratio (1993)."""
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


def _position_properties(vectors: Vectors, count: int) -> np.ndarray:
    """Returns the position of each word and the length of its context, both also as logarithms, (count, 4)."""
    positions, lengths = vectors.positions[:count], vectors.lengths[:count]
    return np.column_stack([positions, np.log1p(positions), lengths, np.log(lengths)]).astype(np.float64)


def _layer_variance(words: list[np.ndarray]) -> LayerVariance:
    shares = variance_components(words).shares
    return LayerVariance(float(shares[0]), float(shares[1:].mean()), self_similarity(words[0]), anisotropy(words))
