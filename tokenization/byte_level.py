"""Byte-level BPE tokenizers: every text has tokens, and they decode to exactly that text."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from .generative import BOS, SPECIAL_TOKENS, check_settings, train_backend, wrap_backend

logger = logging.getLogger(__name__)


def train_byte_level(
    texts: Iterable[str],
    *,
    vocab_size: int = 8192,
    min_frequency: int = 2,
    model_max_length: int = 1024,
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE vocabulary and returns a stock tokenizer with it.

    `<s>` is put before a text and nothing after it, so that a text is a prompt to continue. The ids are `<pad>` 0,
    `<s>` 1, `</s>` 2, `<unk>` 3, then the 256 bytes, then longer tokens in the order learned. Nothing is ever unknown:
    `<unk>` exists for tools that require one. The same texts give the same vocabulary in every process.

    Decoding returns a text exactly. As usual, the name of a special token in a text is read as that token, unless the
    tokenizer is called with `split_special_tokens=True` (in a backend by itself: `encode_special_tokens`).

    Byte-pair encoding: Sennrich et al. (2016), https://arxiv.org/abs/1508.07909. Over bytes, with the same rule for
    splitting words: Radford et al. (2019), "Language models are unsupervised multitask learners" (GPT-2).

    Args:
        texts: the corpus; read once.
        vocab_size: the largest number of tokens, special tokens included; if a corpus yields fewer, that is logged.
        min_frequency: how often two tokens must be neighbors to be merged into one.
        model_max_length: the model's longest sequence, in tokens; saved with the tokenizer.

    Raises:
        TypeError: if `texts` is one string.
        ValueError: if `texts` contains no text, or if a setting is out of range.
    """
    check_settings(min_frequency, model_max_length)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(SPECIAL_TOKENS) + len(alphabet)
    if vocab_size < least:
        raise ValueError(f"`vocab_size` ({vocab_size}) must be at least {least}: the special tokens and every byte")

    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    train_backend(backend, trainer, texts)
    learned = backend.get_vocab_size()
    if learned < vocab_size:
        logger.warning(
            "The texts yield %d tokens instead of %d (`min_frequency` %d).", learned, vocab_size, min_frequency
        )
    return wrap_backend(backend, f"{BOS} $A", model_max_length)
