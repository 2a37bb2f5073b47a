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
    """Gives every character of a corpus an id and returns a stock tokenizer that holds them.

    A character is one Unicode code point; white space counts, and nothing is normalised. `</s>` is put behind a text.
    The ids are `<pad>` 0, `<s>` 1, `</s>` 2, `<unk>` 3, then the characters, the most frequent first, equally frequent
    ones by their code points. A character not seen often enough is `<unk>`.

    Decoding gives a text of known characters back exactly. As ever, the name of a special token in a text is read as
    that token, unless the tokenizer is called with `split_special_tokens=True` (a backend by itself:
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
    # Not a dot: that leaves out line breaks.
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return train_word_level(
        backend, texts, "characters", min_frequency=min_frequency, model_max_length=model_max_length
    )
