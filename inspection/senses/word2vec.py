"""Static word vectors: word2vec, trained on the same texts, to compare contextual vectors with."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

WIDTH, WINDOW, EPOCHS = 100, 5, 10


def static_neighbours(
    contexts: Sequence[Sequence[str]], word: str, count: int = 10, *, min_count: int = 5, seed: int = 0
) -> list[tuple[str, float]]:
    """Trains word2vec and returns the words nearest to a word, with their cosines, nearest first.

    The model is gensim's skip-gram with negative sampling (Mikolov et al., 2013, https://arxiv.org/abs/1310.4546):
    vectors of 100 numbers, a window of 5 words, 10 epochs. It trains in one thread, so a seed always gives the same
    vectors. Signs are left out, unless the word itself is a sign.

    Args:
        contexts: the words of each text.
        word: one of these words.
        count: how many neighbours to return.
        min_count: how often a word must occur to have a vector.
        seed: seed of the training.

    Raises:
        ValueError: if the word is too rare.
    """
    texts = [[each for each in context if each == word or any(map(str.isalnum, each))] for context in contexts]
    occurrences = sum(text.count(word) for text in texts)
    if occurrences < min_count:
        raise ValueError(f"`word` ({word!r}) occurs {occurrences} times: word2vec needs {min_count}")
    trained = importlib.import_module("gensim.models").Word2Vec(
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
