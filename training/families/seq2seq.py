"""Training the encoder-decoders on pairs of texts: their objective and their recipes."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from ...configuration.recurrent import RegardRecurrentConfig
from ...configuration.transformer import RegardTransformerConfig
from ...modeling.loading.load import load_model
from ...modeling.recurrent import RegardRecurrentForConditionalGeneration
from ...modeling.transformer import RegardTransformerForConditionalGeneration
from ...tokenization.byte_level import train_byte_level
from ...tokenization.characters import train_characters
from ...tokenization.wordpiece import check_vocabulary
from ..builtin.dates import load_dates, parse_dates_name
from ..examples.seq2seq import PairCollator, PairExample, PairExamples, tokenize_pairs
from ..generation.generate import exact_match_by, generate_texts, text_figures
from ..reading.splits import load_split
from ..reading.text_pairs import load_pairs
from .base import Recipe, Settings
from .seq2seq_objective import Seq2SeqObjective
from .settings import PairSettings, RecurrentSettings
from .tokenizers import load_tokenizer, special_ids

logger = logging.getLogger("regard.training")

# Metrics by source length are computed for ranges of this many characters.
LENGTH_STEP = 20


class PairObjective(Seq2SeqObjective):
    """Predicts the targets of pairs of texts."""

    def forward(self, model: nn.Module, batch: dict[str, Tensor], **counts: Tensor) -> Any:
        # Training needs the loss alone.
        return model(**batch, predicted_only=model.training, **counts)


def load_pair_split(settings: PairSettings) -> tuple[Dataset, Dataset]:
    """Loads the training pairs and the held-out pairs; those of `dates` have no date in common."""

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


class PairRecipe(Recipe[Settings]):
    """The common part of the two encoder-decoder families.

    Attributes:
        model_class: class of the model.
    """

    model_class: type[PreTrainedModel]
    special_tokens: ClassVar[tuple[str, ...]] = ("pad", "eos")

    @abstractmethod
    def make_config(self, settings: Any, tokenizer: PreTrainedTokenizerFast | None = None) -> PreTrainedConfig:
        """Makes the model's configuration, for the tokenizer's vocabulary if there is one yet."""

    def make_model(self, settings: Any, processor: Any = None) -> PreTrainedModel:
        model = self.model_class(self.make_config(settings, processor))
        # transformers' default would cut targets after 20 tokens.
        model.generation_config.max_new_tokens = settings.max_length
        return model

    def load_model(self, settings: Any, path: str) -> PreTrainedModel:
        return load_model(self.model_class, path, f"`model` ({path})")

    def load_data(self, settings: Any) -> tuple[Dataset, Dataset]:
        return load_pair_split(settings)

    def make_processor(self, settings: Any, rows: Dataset) -> PreTrainedTokenizerFast:
        limit = settings.max_length
        if settings.tokenizer is not None:
            return load_tokenizer(settings.tokenizer, limit, self.special_tokens)
        texts = (text for row in rows for text in (row["source"], row["target"]))
        if settings.units == "pieces":
            return train_byte_level(texts, vocab_size=settings.vocab_size, model_max_length=limit)
        return train_characters(texts, model_max_length=limit)

    def make_objective(
        self, settings: Any, processor: Any, rows: Dataset, held_out: Dataset
    ) -> tuple[PairObjective, dict[str, Any]]:
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
        return PairObjective(parts[0], parts[1], PairCollator(processor.pad_token_id)), data

    def sample_outputs(
        self, settings: Any, model: PreTrainedModel, processor: Any, held_out: Dataset
    ) -> dict[str, Any]:
        """Generates the targets of the held-out sources."""
        number = len(held_out)
        if settings.evaluation_batches is not None:
            number = min(number, settings.evaluation_batches * settings.batch_size)
        sources, references = held_out[:number]["source"], held_out[:number]["target"]
        # Sorted by length, so that batches have little padding.
        order = sorted(range(number), key=lambda row: -len(sources[row]))
        batches = (
            processor(
                [sources[row] for row in order[start : start + settings.batch_size]],
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=settings.max_length,
                # As in training, and without inputs that the models do not take.
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

    def synthetic_batch(self, settings: Settings, config: Any, rows: int) -> tuple[dict[str, Any], int]:
        rng = np.random.default_rng(settings.seed)
        sources, targets = rng.integers(0, config.vocab_size, (2, rows, settings.max_length))
        pairs = zip(sources, targets, strict=True)
        batch = PairCollator(0)([PairExample(input_ids=source, labels=target) for source, target in pairs])
        return {**batch, "predicted_only": True}, 2 * rows * settings.max_length


class TransformerRecipe(PairRecipe[PairSettings]):
    """Trains the encoder-decoder Transformer."""

    name: ClassVar[str] = "transformer"
    model_class = RegardTransformerForConditionalGeneration
    default_steps = 5000

    def settings_of(self, config: PreTrainedConfig) -> dict[str, Any]:
        return {"max_length": config.max_position_embeddings}

    def make_config(
        self, settings: PairSettings, tokenizer: PreTrainedTokenizerFast | None = None
    ) -> RegardTransformerConfig:
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


class RecurrentRecipe(PairRecipe[RecurrentSettings]):
    """Trains the recurrent encoder-decoder."""

    name: ClassVar[str] = "recurrent"
    model_class = RegardRecurrentForConditionalGeneration
    default_steps = 3000

    def make_config(
        self, settings: RecurrentSettings, tokenizer: PreTrainedTokenizerFast | None = None
    ) -> RegardRecurrentConfig:
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
