"""Training the encoder-decoders on pairs of texts: the settings, the task, and the two families."""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from ...configuration.recurrent import ALIGNMENT_NAMES, RNN_TYPES, RegardRecurrentConfig
from ...configuration.transformer import RegardTransformerConfig
from ...modeling.loading.load import load_model
from ...modeling.recurrent import RegardRecurrentForConditionalGeneration
from ...modeling.transformer import RegardTransformerForConditionalGeneration
from ...tokenization.byte_level import train_byte_level
from ...tokenization.characters import train_characters
from ...tokenization.wordpiece import check_vocabulary
from ..builtin.dates import load_dates, parse_dates_name
from ..examples.seq2seq import PairCollator, PairExamples, tokenize_pairs
from ..generation.generate import exact_match_by, generate_texts, require_beams, text_figures
from ..reading.splits import load_split
from ..reading.text_pairs import load_pairs
from ..run.settings import option
from .base import Recipe, Settings
from .seq2seq_objective import Seq2SeqObjective
from .sizes import SizedSettings
from .tokenizers import load_tokenizer, special_ids

logger = logging.getLogger("regard.training")

# How many source characters are told apart when figures are told by length.
LENGTH_STEP = 20


class PairTask(Seq2SeqObjective):
    """Predicting the targets of pairs."""

    def forward(self, model: nn.Module, batch: dict[str, Tensor], **counts: Tensor) -> Any:
        """See `loop.Objective`."""
        # Training asks for the loss alone.
        return model(**batch, predicted_only=model.training, **counts)


@dataclass
class PairSettings(SizedSettings):
    """What a run on pairs of texts can set."""

    data: list[str] = option(
        ["dates"],
        "What to train on: 'dates' ('dates:de,fr' for some locales), a jsonl, csv or parquet file, a folder or a glob "
        "of them, or a Hub data set id. Several are joined.",
    )
    source_column: str = option("source", "The column of a table or data set that holds the source texts.")
    target_column: str = option("target", "The column that holds the target texts.")
    max_pairs: int | None = option(None, "Read no more pairs than this; of 'dates', make so many.")
    max_dates: int = option(5, "Most dates in a source of 'dates'.")
    max_length: int = option(224, "Longest source and longest target, in tokens.")
    tokenizer: str | None = option(None, "A tokenizer to use, a folder or Hub id, instead of making one.")
    units: str = option("characters", "Tokens of the tokenizer to make: 'characters', or 'pieces' (byte-level BPE).")
    vocab_size: int = option(8192, "Tokens of a tokenizer of pieces.")
    beams: int = option(1, "Beams with which the held-out targets are generated; 1 is greedy.")
    dropout: float = option(0.0, "Dropout; 0.1 or more where the same pairs are seen many times.")
    label_smoothing: float = option(0.0, "Share of the probability that the loss spreads over the vocabulary.")
    language: str | None = option(None, "Language of the texts (ISO 639), for the model card.")

    def check(self) -> None:
        """See `TrainingSettings.check`."""
        super().check()
        self.require_choice("units", ("characters", "pieces"))
        for name in ("max_pairs", "max_dates"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"`{name}` ({getattr(self, name)}) must be at least 1")
        require_beams(self.beams)
        if self.max_length < 2:
            raise ValueError(f"`max_length` ({self.max_length}) must be at least 2: one token and the end")


def load_pair_split(settings: PairSettings) -> tuple[Dataset, Dataset]:
    """The training pairs and the held-out ones; those of `dates` share no date. See `load_split`."""

    def make(name: str, split: str) -> Dataset:
        return load_dates(
            split,
            locales=parse_dates_name(name),
            max_dates=settings.max_dates,
            size=settings.max_pairs if split == "train" else None,
            seed=settings.seed,
        )

    def read(names: list[str], is_training: bool) -> Dataset:
        return load_pairs(
            names,
            source_column=settings.source_column,
            target_column=settings.target_column,
            split=settings.split,
            max_pairs=settings.max_pairs if is_training else None,
            bad_records=settings.bad_records,
        )

    return load_split(settings, read, {"dates": make})


def make_tokenizer(settings: PairSettings, pairs: Dataset, limit: int) -> PreTrainedTokenizerFast:
    """The tokenizer that the settings name, or one made from the sources and targets of the pairs.

    Args:
        settings: of the run.
        pairs: the training pairs.
        limit: the model's longest sequence.

    Raises:
        ValueError: if the one named lacks what training needs.
    """
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer, limit, PairFamily.special_tokens)
    texts = (text for row in pairs for text in (row["source"], row["target"]))
    if settings.units == "pieces":
        return train_byte_level(texts, vocab_size=settings.vocab_size, model_max_length=limit)
    return train_characters(texts, model_max_length=limit)


class PairFamily(Recipe[Settings]):
    """What the two encoder-decoder families share.

    Attributes:
        model_class: is trained.
    """

    model_class: type[PreTrainedModel]
    special_tokens: ClassVar[tuple[str, ...]] = ("pad", "eos")

    @abstractmethod
    def make_config(self, settings: Any, tokenizer: PreTrainedTokenizerFast | None = None) -> PreTrainedConfig:
        """The model's configuration, for the tokenizer if it is there yet."""

    def make_model(self, settings: Any, processor: Any = None) -> PreTrainedModel:
        """See `Recipe`."""
        model = self.model_class(self.make_config(settings, processor))
        # transformers' own default would cut targets off after 20 tokens.
        model.generation_config.max_new_tokens = settings.max_length
        return model

    def load_model(self, settings: Any, path: str) -> PreTrainedModel:
        """See `Recipe`."""
        return load_model(self.model_class, path, f"`model` ({path})")

    def load_data(self, settings: Any) -> tuple[Dataset, Dataset]:
        """See `Recipe`."""
        return load_pair_split(settings)

    def make_processor(self, settings: Any, rows: Dataset) -> PreTrainedTokenizerFast:
        """See `Recipe`."""
        return make_tokenizer(settings, rows, settings.max_length)

    def make_objective(
        self, settings: Any, processor: Any, rows: Dataset, held_out: Dataset
    ) -> tuple[PairTask, dict[str, Any]]:
        """See `Recipe`."""
        parts = [
            PairExamples(tokenize_pairs(part, processor, settings.max_length), settings.batch_size, settings.seed)
            for part in (rows, held_out)
        ]
        data = {
            "pairs": len(parts[0].pairs),
            "tokens": int(parts[0].lengths.sum()),
            "held_out_pairs": len(parts[1].pairs),
        }
        logger.info("%s pairs with %s tokens; held out: %s pairs.", *(f"{number:,}" for number in data.values()))
        check_vocabulary(processor, self.make_config(settings, processor).vocab_size)
        return PairTask(parts[0], parts[1], PairCollator(processor.pad_token_id)), data

    def try_out(self, settings: Any, model: PreTrainedModel, processor: Any, held_out: Dataset) -> dict[str, Any]:
        """See `Recipe`: generates the targets of the held-out sources."""
        number = len(held_out)
        if settings.evaluation_batches is not None:
            number = min(number, settings.evaluation_batches * settings.batch_size)
        sources, references = held_out[:number]["source"], held_out[:number]["target"]
        # The longest first, as the batches then have little padding.
        order = sorted(range(number), key=lambda row: -len(sources[row]))
        batches = (
            processor(
                [sources[row] for row in order[start : start + settings.batch_size]],
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=settings.max_length,
                # Read as in training, and nothing that the models do not take.
                split_special_tokens=True,
                return_token_type_ids=False,
            )
            for start in range(0, number, settings.batch_size)
        )
        options = {"max_new_tokens": settings.max_length, "num_beams": settings.beams}
        generated = generate_texts(model, processor, batches, **options)
        predictions = [text for _, text in sorted(zip(order, generated, strict=True))]
        words = [len(reference.split()) for reference in references]
        lengths = [len(source) // LENGTH_STEP * LENGTH_STEP for source in sources]
        return {
            "metrics": text_figures(predictions, references),
            "by_target_words": exact_match_by(words, predictions, references),
            "by_source_length": exact_match_by(lengths, predictions, references),
            "generated": [
                {"source": sources[row], "target": references[row], "prediction": predictions[row]}
                for row in range(number)
            ],
        }


class TransformerRecipe(PairFamily[PairSettings]):
    """Training the encoder-decoder Transformer."""

    name: ClassVar[str] = "transformer"
    settings_class = PairSettings
    model_class = RegardTransformerForConditionalGeneration
    default_steps = 5000

    def settings_of(self, config: PreTrainedConfig) -> dict[str, Any]:
        """See `Recipe`."""
        return {"max_length": config.max_position_embeddings}

    def make_config(
        self, settings: PairSettings, tokenizer: PreTrainedTokenizerFast | None = None
    ) -> RegardTransformerConfig:
        """See `PairFamily`."""
        fields = {
            **settings.transformer_fields(),
            "max_position_embeddings": settings.max_length,
            "norm_position": "pre",
            "label_smoothing": settings.label_smoothing,
            **special_ids(tokenizer),
        }
        config = RegardTransformerConfig(**{**fields, **settings.config})
        settings.require_positions(config.max_position_embeddings)
        return config


@dataclass
class RecurrentSettings(PairSettings):
    """What a run of the recurrent encoder-decoder can set."""

    alignment: str = option(
        "additive", f"How the decoder's state is matched with the source: {', '.join(ALIGNMENT_NAMES)}."
    )
    rnn_type: str = option("gru", "The recurrent layers: 'gru' or 'lstm'.")

    def check(self) -> None:
        """See `TrainingSettings.check`."""
        super().check()
        self.require_choice("alignment", ALIGNMENT_NAMES)
        self.require_choice("rnn_type", RNN_TYPES)


class RecurrentRecipe(PairFamily[RecurrentSettings]):
    """Training the recurrent encoder-decoder."""

    name: ClassVar[str] = "recurrent"
    settings_class = RecurrentSettings
    model_class = RegardRecurrentForConditionalGeneration
    default_steps = 3000

    def make_config(
        self, settings: RecurrentSettings, tokenizer: PreTrainedTokenizerFast | None = None
    ) -> RegardRecurrentConfig:
        """See `PairFamily`."""
        fields = {
            "hidden_size": settings.width,
            "hidden_dropout_prob": settings.dropout,
            "initializer_range": settings.initializer_range,
            "alignment": settings.alignment,
            "rnn_type": settings.rnn_type,
            "label_smoothing": settings.label_smoothing,
            **special_ids(tokenizer),
        }
        return RegardRecurrentConfig(**{**fields, **settings.config})


TRANSFORMER, RECURRENT = TransformerRecipe(), RecurrentRecipe()
