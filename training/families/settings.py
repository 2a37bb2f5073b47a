"""The settings of each family's runs, with the sizes of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...families.choices import ALIGNMENT_NAMES, DECODER_TYPES, RNN_TYPES
from ..run.settings import MOST_BEAMS, MOST_TOKENS, TrainingSettings, option

# Layers and width of the sizes of Turc et al. (2019), https://arxiv.org/abs/1908.08962, and of Devlin et al. (2019).
# The feed-forward layer is four times as wide. Heads are 64 wide, except that the smallest model has four, not two.
SIZES = {
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}

# A larger image would take gigabytes.
MOST_IMAGE_SIZE = 2**14


@dataclass
class SizedSettings(TrainingSettings):
    """Settings of a run whose model has a size."""

    planned: ClassVar[tuple[str, ...]] = (*TrainingSettings.planned, "size", "config", "dropout", "tokenizer")

    size: str = option("tiny", f"Size of the model: {', '.join(SIZES)}.", choices=tuple(SIZES))
    config: dict = option({}, "Fields of the model's configuration; they override the size.")
    dropout: float = option(0.1, "Dropout of hidden states and attention weights.", least=0, below=1)

    # The learning rate, unless it is given, is this divided by the width.
    rate_times_width: ClassVar[float] = 0.256

    def check(self) -> None:
        super().check()
        if self.learning_rate is None:
            self.learning_rate = self.rate_times_width / self.width

    @property
    def width(self) -> int:
        """The width of the model: that of the configuration fields, or else that of the size."""
        width = self.config.get("hidden_size")
        # The configuration refuses an invalid width itself.
        return width if isinstance(width, int) and 0 < width < 2**31 else SIZES[self.size][1]

    @property
    def layers(self) -> int:
        """The number of layers of the size."""
        return SIZES[self.size][0]

    @property
    def initializer_range(self) -> float:
        """BERT's 0.02 at its width of 768, and more for narrower layers, which add up fewer products."""
        return 0.02 * (768 / self.width) ** 0.5

    def transformer_fields(self) -> dict[str, Any]:
        """The configuration fields of a stack of Transformer blocks of the size."""
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": self.width,
            "num_attention_heads": max(4, self.width // 64),
            "intermediate_size": 4 * self.width,
            "hidden_dropout_prob": self.dropout,
            "attention_probs_dropout_prob": self.dropout,
            "initializer_range": self.initializer_range,
        }

    def require_positions(self, positions: int) -> None:
        """Raises a ValueError if examples may be longer than the model has positions."""
        if self.max_length > positions:
            raise ValueError(
                f"`max_length` ({self.max_length}) is more than `max_position_embeddings` ({positions}): "
                f"shorten it, or set max_position_embeddings={self.max_length} in `config`"
            )


@dataclass
class CorpusSettings(TrainingSettings):
    """Settings of a run on a text corpus."""

    data: list[str] = option(
        ["python-docs"],
        "Data to train on: 'python-docs', a text, jsonl, csv or parquet file, a folder, a glob, or a Hub data set id. "
        "Several are joined.",
    )
    text_column: str = option("text", "Column of a table or data set that has the text.")
    documents: str = option("file", "Unit of text files that makes a document: 'file', 'blank-line' or 'line'.")
    max_documents: int | None = option(None, "Most documents to read.", least=1)
    streaming: bool = option(False, "Read a Hub data set row by row, without keeping its files.")
    language: str = option("en", "Language of the text (ISO 639), for the model card and for splitting sentences.")


@dataclass
class BertSettings(CorpusSettings, SizedSettings):
    """Settings of a BERT pretraining run."""

    planned: ClassVar[tuple[str, ...]] = (*SizedSettings.planned, "vocab_size", "mask_rate", "next_sentence")

    tokenizer: str | None = option(None, "Tokenizer to use, a folder or Hub id, instead of training one.")
    vocab_size: int = option(4096, "Vocabulary size of the tokenizer to train, in word pieces.")
    lowercase: bool = option(True, "Whether the tokenizer to train lower-cases.")
    strip_accents: bool = option(False, "Whether the tokenizer to train drops accents.")
    mask_rate: float = option(0.15, "Share of the tokens to predict.", above=0, most=1)
    whole_words: bool = option(False, "Mask whole words instead of single word pieces.")
    next_sentence: bool = option(True, "Train next sentence prediction too.")
    short_seq_prob: float = option(0.1, "Share of documents whose examples are made shorter.", least=0, most=1)


@dataclass
class DecoderSettings(CorpusSettings, SizedSettings):
    """Settings of a run of the decoder-only language model."""

    planned: ClassVar[tuple[str, ...]] = (*SizedSettings.planned, "vocab_size")

    max_length: int = option(128, "Length of a training example, in tokens.", least=2, most=MOST_TOKENS)
    tokenizer: str | None = option(None, "Tokenizer to use, a folder or Hub id, instead of training one.")
    vocab_size: int = option(4096, "Vocabulary size of the tokenizer to train, a byte-level BPE.")
    dropout: float = option(0.0, "Dropout; use 0.1 or more if the same text is seen many times.", least=0, below=1)


@dataclass
class PairSettings(SizedSettings):
    """Settings of a run on pairs of texts."""

    planned: ClassVar[tuple[str, ...]] = (*SizedSettings.planned, "vocab_size", "units")

    data: list[str] = option(
        ["dates"],
        "Data to train on: 'dates' ('dates:de,fr' for some locales), a jsonl, csv or parquet file, a folder or a glob "
        "of them, or a Hub data set id. Several are joined.",
    )
    source_column: str = option("source", "Column of a table or data set that has the source texts.")
    target_column: str = option("target", "Column of a table or data set that has the target texts.")
    max_pairs: int | None = option(None, "Most pairs to read; of 'dates', the number of pairs to make.", least=1)
    max_dates: int = option(5, "Most dates in a source of 'dates'.", least=1)
    max_length: int = option(
        224, "Longest source and longest target in tokens, the end token included.", least=2, most=MOST_TOKENS
    )
    tokenizer: str | None = option(None, "Tokenizer to use, a folder or Hub id, instead of making one.")
    units: str = option(
        "characters",
        "Tokens of the tokenizer to make: 'characters', or 'pieces' (byte-level BPE).",
        choices=("characters", "pieces"),
    )
    vocab_size: int = option(8192, "Vocabulary size of a tokenizer of pieces.")
    beams: int = option(
        1, "Number of beams that generate the held-out targets; 1 is greedy.", least=1, most=MOST_BEAMS
    )
    dropout: float = option(0.0, "Dropout; use 0.1 or more if the same pairs are seen many times.", least=0, below=1)
    label_smoothing: float = option(
        0.0, "Share of the probability that the loss spreads over the vocabulary.", least=0, below=1
    )
    language: str | None = option(None, "Language of the texts (ISO 639), for the model card.")


@dataclass
class RecurrentSettings(PairSettings):
    """Settings of a run of the recurrent encoder-decoder."""

    planned: ClassVar[tuple[str, ...]] = (*PairSettings.planned, "alignment", "rnn_type")

    alignment: str = option(
        "additive",
        f"How the decoder's state is scored against the source: {', '.join(ALIGNMENT_NAMES)}.",
        choices=ALIGNMENT_NAMES,
    )
    rnn_type: str = option("gru", "Type of the recurrent layers: 'gru' or 'lstm'.", choices=RNN_TYPES)


@dataclass
class CaptionerSettings(SizedSettings):
    """Settings of a run of the image captioner."""

    planned: ClassVar[tuple[str, ...]] = (
        *SizedSettings.planned,
        *("image_size", "backbone", "freeze_backbone", "decoder_type"),
        *("alignment", "rnn_type", "attention_regularization"),
    )

    data: list[str] = option(
        ["glyphs"],
        "Data to train on: 'glyphs', a folder of images with metadata.jsonl, or a Hub data set id. Several are "
        "joined.",
    )
    caption_column: str = option("text", "Column of the metadata or data set that has the captions.")
    max_images: int | None = option(None, "Most images to read; of 'glyphs', the number of images to draw.", least=1)
    image_size: int = option(
        48, "Width and height that images are scaled to, in pixels.", least=1, most=MOST_IMAGE_SIZE
    )
    max_length: int = option(32, "Longest caption in tokens, the end token included.", least=2, most=MOST_TOKENS)
    batch_size: int = option(64, "Examples per step, over all processes and accumulation.", least=1)
    tokenizer: str | None = option(None, "Tokenizer to use, a folder or Hub id, instead of making one of words.")
    min_frequency: int = option(1, "How often a word must occur to enter the vocabulary.", least=1)
    backbone: str | None = option(
        None, "Trained backbone, a folder or Hub id; a small ResNet is trained if not given."
    )
    freeze_backbone: bool = option(False, "Do not train the backbone.")
    decoder_type: str = option("recurrent", f"Type of the decoder: {', '.join(DECODER_TYPES)}.", choices=DECODER_TYPES)
    alignment: str = option(
        "additive",
        f"How a recurrent decoder's state is scored against the image: {', '.join(ALIGNMENT_NAMES)}.",
        choices=ALIGNMENT_NAMES,
    )
    rnn_type: str = option("lstm", "Type of the recurrent layers: 'gru' or 'lstm'.", choices=RNN_TYPES)
    attention_regularization: float = option(1.0, "Weight of the doubly stochastic attention regularizer.")
    label_smoothing: float = option(
        0.0, "Share of the probability that the loss spreads over the vocabulary.", least=0, below=1
    )
    beams: int = option(
        1, "Number of beams that generate the held-out captions; 1 is greedy.", least=1, most=MOST_BEAMS
    )
    language: str | None = option(None, "Language of the captions (ISO 639), for the model card.")

    def check(self) -> None:
        super().check()
        if self.backbone is not None and "backbone_config" in self.config:
            raise ValueError(
                f"`backbone` ({self.backbone}) has a configuration: leave `backbone_config` out of `config`"
            )
