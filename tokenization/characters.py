"""Character tokenizers: one id per character."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from .generative import UNK, train_word_level


def train_characters(
    texts: Iterable[str], *, min_frequency: int = 1, model_max_length: int = 512
) -> PreTrainedTokenizerFast:
    """Gives every character of a corpus an id and returns a stock tokenizer with them.

    A character is one Unicode code point; white space counts, and nothing is normalized. `</s>` is put after a text.
    The ids are `<pad>` 0, `<s>` 1, `</s>` 2, `<unk>` 3, then the characters, the most frequent first, equally frequent
    ones by their code points. A character that is not frequent enough is `<unk>`.

    Decoding returns a text of known characters exactly. As usual, the name of a special token in a text is read as
    that token, unless the tokenizer is called with `split_special_tokens=True` (in a backend by itself:
    `encode_special_tokens`).

    Args:
        texts: the corpus; read once.
        min_frequency: how often a character must occur to get an id.
        model_max_length: the model's longest sequence, in tokens; saved with the tokenizer.

    Raises:
        TypeError: if `texts` is one string.
        ValueError: if no character occurs often enough, or if a setting is out of range.
    """
    backend = Tokenizer(WordLevel(unk_token=UNK))
    # Not a dot, which does not match line breaks.
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return train_word_level(
        backend, texts, "characters", min_frequency=min_frequency, model_max_length=model_max_length
    )
