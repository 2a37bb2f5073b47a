"""One vector for each word, learned from the text alone: word2vec, which contextual vectors are set beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .clusters import load_extra

WIDTH, WINDOW, EPOCHS = 100, 5, 10


def static_neighbours(
    contexts: Sequence[Sequence[str]], word: str, count: int = 10, *, min_count: int = 5, seed: int = 0
) -> list[tuple[str, float]]:
    """Trains word2vec and gives the words whose vectors are nearest to a word's, with their cosines, nearest first.

    It is the skip-gram model with negative sampling of Mikolov et al. (2013, https://arxiv.org/abs/1310.4546) as
    gensim has it: 100 numbers a word, a window of 5 words, 10 epochs. One thread trains it, so that a seed gives the
    same vectors each time. Signs are left out, unless the word is one.

    Args:
        contexts: the words of each text.
        word: must be among them.
        count: how many neighbours.
        min_count: words that occur less often are left out.
        seed: of the training.

    Raises:
        ValueError: if gensim is missing, or the word is too rare.
    """
    models: Any = load_extra("gensim.models", "gensim")
    texts = [[each for each in context if each == word or any(map(str.isalnum, each))] for context in contexts]
    occurrences = sum(text.count(word) for text in texts)
    if occurrences < min_count:
        raise ValueError(f"`word` ({word!r}) occurs {occurrences} times: word2vec needs {min_count}")
    trained = models.Word2Vec(
        texts,
        vector_size=WIDTH,
        window=WINDOW,
        epochs=EPOCHS,
        min_count=min_count,
        sg=1,
        seed=seed,
        workers=1,
    )
    return [(str(other), float(cosine)) for other, cosine in trained.wv.most_similar(word, topn=count)]
