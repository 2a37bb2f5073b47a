"""Word tokenizers: one id per word, for captions."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from .generative import UNK, train_word_level

# A word with the hyphens and apostrophes inside it, or one sign.
_WORD = r"\w+(?:[-'’]\w+)*|[^\w\s]"


def train_words(
    texts: Iterable[str], *, min_frequency: int = 1, lowercase: bool = True, model_max_length: int = 64
) -> PreTrainedTokenizerFast:
    """Gives every word of a corpus an id and returns a stock tokenizer with them.

    Each word is one token, so that each word of a caption has its own attention map. White space separates words, and
    a punctuation mark is a word of its own, but hyphens and apostrophes inside a word belong to it ("long-legged",
    "don't"). Texts are normalized (NFC). `</s>` is put after a text. The ids are `<pad>` 0, `<s>` 1, `</s>` 2,
    `<unk>` 3, then the words, the most frequent first, equally frequent ones by their code points. A word that is not
    frequent enough is `<unk>`.

    Decoding puts one space between words, also before punctuation. As usual, the name of a special token in a text is
    read as that token, unless the tokenizer is called with `split_special_tokens=True` (in a backend by itself:
    `encode_special_tokens`).

    Args:
        texts: the corpus; read once.
        min_frequency: how often a word must occur to get an id.
        lowercase: whether texts are lower-cased.
        model_max_length: the model's longest sequence, in tokens; saved with the tokenizer.

    Raises:
        TypeError: if `texts` is one string.
        ValueError: if no word occurs often enough, or if a setting is out of range.
    """
    # Without a decoder the tokens are joined by single spaces.
    backend = Tokenizer(WordLevel(unk_token=UNK))
    backend.normalizer = normalizers.NFC()
    if lowercase:
        # NFC comes last, since a small letter may compose where its capital does not, such as j with a caron.
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.NFC()])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), "removed", invert=True)
    return train_word_level(backend, texts, "words", min_frequency=min_frequency, model_max_length=model_max_length)
