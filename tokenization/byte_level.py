"""Byte-level BPE tokenizers: whatever a text holds, it has tokens, and they give it back exactly."""

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
    """Trains a byte-level BPE vocabulary and returns a stock tokenizer that holds it.

    `<s>` is put before a text and nothing behind it, so that a text is a prompt to go on with. The ids are `<pad>` 0,
    `<s>` 1, `</s>` 2, `<unk>` 3, then the 256 bytes, then longer tokens in the order learned. Nothing is ever unknown:
    `<unk>` is there for tools that ask for one. The same texts give the same vocabulary in every process.

    Decoding gives a text back exactly. As ever, the name of a special token in a text is read as that token, unless
    the tokenizer is called with `split_special_tokens=True` (a backend by itself: `encode_special_tokens`).

    Byte-pair encoding: Sennrich et al. (2016), https://arxiv.org/abs/1508.07909. Over bytes, with the same rule for
    where words part: Radford et al. (2019), "Language models are unsupervised multitask learners" (GPT-2).

    Args:
        texts: the corpus; read once.
        vocab_size: the most tokens to have, special tokens included; that a corpus yields fewer is logged.
        min_frequency: how often two tokens must meet to be merged into one.
        model_max_length: the model's longest sequence, in tokens; saved with the tokenizer.

    Raises:
        TypeError: if `texts` is one string.
        ValueError: if `texts` holds no text, or if a setting is out of range.
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
    found = backend.get_vocab_size()
    if found < vocab_size:
        logger.warning(
            "The texts yield %d tokens of the %d asked for (`min_frequency` %d).", found, vocab_size, min_frequency
        )
    return wrap_backend(backend, f"{BOS} $A", model_max_length)
