"""Special tokens, training, stock classes and saving for the tokenizers of generating models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import Trainer, WordLevelTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# The ids are the places here. Each name has letters and punctuation, which all of these tokenizers separate before
# learning, so none of them learns a token of the same name from a text.
PAD, BOS, EOS, UNK = SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")


def train_backend(backend: Tokenizer, trainer: Trainer, texts: Iterable[str]) -> None:
    """Trains a backend tokenizer on texts, which are read once.

    Raises:
        TypeError: if `texts` is one string.
        ValueError: if `texts` contains only empty strings.
    """
    if isinstance(texts, str):
        raise TypeError("`texts` must be an iterable of strings, not one string")
    backend.train_from_iterator(_check_texts(texts), trainer)


def _check_texts(texts: Iterable[str]) -> Iterator[str]:
    """Yields the texts, and after the last one raises an error if all were empty."""
    characters = 0
    for text in texts:
        characters += len(text)
        yield text
    if not characters:
        raise ValueError("`texts` holds no text to train a tokenizer on")


def check_settings(min_frequency: int, model_max_length: int) -> None:
    """Checks the settings that all of these tokenizers share.

    Raises:
        ValueError: if a setting is out of range.
    """
    if min_frequency < 1:
        raise ValueError(f"`min_frequency` ({min_frequency}) must be at least 1")
    if model_max_length < 2:
        raise ValueError(f"`model_max_length` ({model_max_length}) must be at least 2: a special token and another")


def train_word_level(
    backend: Tokenizer, texts: Iterable[str], kind: str, *, min_frequency: int, model_max_length: int
) -> PreTrainedTokenizerFast:
    """Gives an id to each part of the texts, the most frequent first, and puts `</s>` after a text.

    Args:
        backend: backend that splits texts, with a `WordLevel` model.
        texts: the corpus; read once.
        kind: name of the parts in errors, such as "words".
        min_frequency: how often a part must occur to get an id.
        model_max_length: the model's longest sequence, in tokens.

    Raises:
        TypeError: if `texts` is one string.
        ValueError: if no part occurs often enough, or if a setting is out of range.
    """
    check_settings(min_frequency, model_max_length)
    trainer = WordLevelTrainer(
        vocab_size=2**32,  # no limit: the trainer's default is 30,000
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    train_backend(backend, trainer, texts)
    if backend.get_vocab_size() == len(SPECIAL_TOKENS):
        raise ValueError(f"`texts` holds no {kind} that occur `min_frequency` ({min_frequency}) times")
    return wrap_backend(backend, f"$A {EOS}", model_max_length)


def wrap_backend(backend: Tokenizer, template: str, model_max_length: int) -> PreTrainedTokenizerFast:
    """Makes a stock tokenizer of a trained backend.

    Args:
        backend: the backend, whose first ids are those of `SPECIAL_TOKENS`.
        template: a text with its special tokens, written as for `TemplateProcessing`, such as "<s> $A".
        model_max_length: the model's longest sequence, in tokens.
    """
    backend.post_processor = TemplateProcessing(
        single=template,
        pair=f"{template} {template.replace('$A', '$B')}",
        special_tokens=[(token, backend.token_to_id(token)) for token in (BOS, EOS)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=model_max_length,
        padding_side="right",
        # Otherwise decoding would remove spaces before punctuation.
        clean_up_tokenization_spaces=False,
        # The models that generate have no segments.
        model_input_names=["input_ids", "attention_mask"],
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Saves a tokenizer as `save_pretrained` does, under a class name that every version of transformers knows.

    transformers 5 has renamed the class `PreTrainedTokenizerFast` to `TokenizersBackend`, writes the new name into
    `tokenizer_config.json`, and reads both. Earlier versions, and tools that read the file, know only the old one.
    Classes of another name keep theirs.

    Args:
        tokenizer: any tokenizer.
        folder: folder to save it in, created if it does not exist.
    """
    tokenizer.save_pretrained(folder)
    path = Path(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config["tokenizer_class"] == PreTrainedTokenizerFast.__name__:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
        path.write_text(f"{text}\n", encoding="utf-8")
