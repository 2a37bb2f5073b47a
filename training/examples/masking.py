"""Masked language modeling: chooses the tokens to predict and hides them from the model.

By default, 80% of the chosen tokens are replaced by the mask token, 10% by a random token, and 10% stay as they are
(Devlin et al., 2019, https://arxiv.org/abs/1810.04805).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

IGNORED = -100


@dataclass(frozen=True)
class Masking:
    """Chooses the tokens of a sequence that the model has to predict, and hides them.

    Args:
        mask_id: id of the mask token.
        special: for each id of the vocabulary, whether it is a special token. Special tokens are never chosen, and
            never drawn as a random token.
        rate: share of the tokens to predict, more than 0 and at most 1. At least one token of a sequence is chosen,
            unless all are special.
        mask_share: share of the chosen tokens that are replaced by the mask token.
        random_share: share of the chosen tokens that are replaced by a random token.
        whole_words: whether words are chosen with all of their pieces. A word that would exceed the rate is skipped;
            if every word would, the shortest is chosen.

    Raises:
        ValueError: if a share is negative, their sum exceeds 1, or the vocabulary has only special tokens.
    """

    mask_id: int
    special: np.ndarray
    rate: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    whole_words: bool = False

    def __post_init__(self) -> None:
        if min(self.mask_share, self.random_share) < 0 or self.mask_share + self.random_share > 1:
            raise ValueError(
                f"`mask_share` ({self.mask_share}) and `random_share` ({self.random_share}) must add up to at most 1"
            )
        if self.special.all():
            raise ValueError("the vocabulary has only special tokens: there is nothing to predict")

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Masking:
        """Makes a masking with the mask token and the special tokens of a tokenizer.

        Args:
            tokenizer: the tokenizer of the corpus.
            **settings: the other arguments of the class.

        Raises:
            ValueError: if the tokenizer has no mask token, or an argument is invalid.
        """
        if tokenizer.mask_token_id is None:
            raise ValueError("the tokenizer has no mask token: set `tokenizer.mask_token`, or train one with regard")
        vocabulary = list(tokenizer.get_vocab().values())
        # Added tokens may leave gaps between the ids. Ids in a gap count as special, so that none of them is drawn.
        special = np.ones(max(vocabulary) + 1, dtype=np.bool_)
        special[vocabulary] = False
        special[tokenizer.all_special_ids] = True
        return cls(tokenizer.mask_token_id, special, **settings)

    def __call__(
        self, ids: np.ndarray, starts_word: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Masks one sequence.

        Args:
            ids: ids of the tokens, special tokens included, (T,).
            starts_word: for each token, whether it begins a word, (T,); only used with `whole_words`.
            rng: random generator that chooses the tokens and their replacements.

        Returns:
            The ids that the model sees, (T,), and the labels, (T,): the ids of the chosen tokens, and `IGNORED`
            elsewhere.
        """
        ordinary = np.flatnonzero(~self.special[ids])
        # Rounded up or down at random, so that the rate holds on average for short sequences too.
        number = min(len(ordinary), max(1, int(self.rate * len(ordinary) + rng.random())))
        if self.whole_words:
            chosen = self._choose_words(ordinary, starts_word, number, rng)
        else:
            chosen = rng.permutation(ordinary)[:number]
        labels = np.full(len(ids), IGNORED, dtype=np.int64)
        labels[chosen] = ids[chosen]
        shown = ids.astype(np.int64)
        fate = rng.random(len(chosen))
        shown[chosen[fate < self.mask_share]] = self.mask_id
        randomised = chosen[(fate >= self.mask_share) & (fate < self.mask_share + self.random_share)]
        shown[randomised] = rng.choice(np.flatnonzero(~self.special), len(randomised))
        return shown, labels

    def _choose_words(
        self, ordinary: np.ndarray, starts_word: np.ndarray, number: int, rng: np.random.Generator
    ) -> np.ndarray:
        # A special token ends a word: the token after it begins another.
        begins = starts_word[ordinary] | (np.diff(ordinary, prepend=-2) > 1)
        words = np.split(ordinary, np.flatnonzero(begins)[1:])
        chosen: list[np.ndarray] = []
        free = number
        for index in rng.permutation(len(words)):
            if len(words[index]) <= free:
                chosen.append(words[index])
                free -= len(words[index])
            if not free:
                break
        return np.concatenate(chosen or [min(words, key=len)])
