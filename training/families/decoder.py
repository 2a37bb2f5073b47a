"""Training the decoder-only language model: its objective and its recipe."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, set_seed

from ...configuration.decoder import RegardDecoderConfig
from ...modeling.decoder import RegardDecoderForCausalLM
from ...modeling.loading.load import load_model
from ...tokenization.byte_level import train_byte_level
from ...tokenization.wordpiece import check_vocabulary
from ..examples.epoch import EpochDataset
from ..examples.masking import IGNORED
from ..examples.text_chunks import ChunkCollator, ChunkExamples
from ..examples.tokenized import count_tokens, log_frequencies, tokenize_texts
from ..generation.text_metrics import perplexity
from ..loop.objective import Objective
from .base import Recipe
from .settings import DecoderSettings
from .text_corpus import load_document_split
from .tokenizers import load_tokenizer

logger = logging.getLogger("regard.training")


class DecoderObjective(Objective):
    """Predicts each token of a text from the tokens before it.

    Args:
        train: makes the training examples.
        held_out: makes the held-out examples.
        pad_id: id of the padding token.
        vocab_size: number of tokens in the vocabulary.
    """

    loss_name = "loss"

    def __init__(self, train: ChunkExamples, held_out: ChunkExamples, pad_id: int, vocab_size: int) -> None:
        self._train, self._held_out = train, held_out
        self.collate = ChunkCollator(pad_id)
        token_counts = count_tokens(train.ids, vocab_size)
        self._most_frequent = int(token_counts.argmax())
        self._unigram = log_frequencies(token_counts)

    def epoch(self, number: int) -> EpochDataset[np.ndarray]:
        return self._train.epoch(number)

    def held_out(self) -> EpochDataset[np.ndarray]:
        return self._held_out.in_order()

    def tokens(self, batch: dict[str, Tensor]) -> int:
        return int(batch["attention_mask"].sum())

    def counts(self, batch: dict[str, Tensor]) -> dict[str, int]:
        """The number of predicted tokens: all but the first of each chunk, which has nothing before it."""
        return {"num_items_in_batch": int((batch["labels"][:, 1:] != IGNORED).sum())}

    def forward(self, model: nn.Module, batch: dict[str, Tensor], **counts: Tensor) -> Any:
        return model(**batch, use_cache=False, **counts)

    def sums(self, output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        labels = batch["labels"][:, 1:]
        counted = labels != IGNORED
        logits, labels = output.logits[:, :-1][counted], labels[counted]
        return {
            "predicted": counted.sum(),
            "loss": nn.functional.cross_entropy(logits.float(), labels, reduction="sum"),
            "right": (logits.argmax(-1) == labels).sum(),
            "most_frequent_right": (labels == self._most_frequent).sum(),
            "unigram_loss": -self._unigram.to(labels.device)[labels].sum(),
        }

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """The metrics of an evaluation. The baselines are the training corpus's unigrams and most frequent token."""
        predicted = int(sums["predicted"])
        return {
            "loss": sums["loss"] / predicted,
            "perplexity": perplexity(sums["loss"], predicted),
            "perplexity_unigram": perplexity(sums["unigram_loss"], predicted),
            "token_accuracy": sums["right"] / predicted,
            "token_accuracy_baseline": sums["most_frequent_right"] / predicted,
        }


class DecoderRecipe(Recipe[DecoderSettings]):
    """Trains the decoder-only language model."""

    name: ClassVar[str] = "decoder"
    special_tokens: ClassVar[tuple[str, ...]] = ("pad", "eos")
    default_steps = 1000

    def make_config(
        self, settings: DecoderSettings, tokenizer: PreTrainedTokenizerFast | None = None
    ) -> RegardDecoderConfig:
        """Makes the model's configuration, for the tokenizer's vocabulary if there is one yet.

        Raises:
            ValueError: if the fields do not fit together, or `max_length` exceeds the model's positions.
        """
        fields: dict[str, Any] = {
            **settings.transformer_fields(),
            "vocab_size": settings.vocab_size,
            # Positions that no example reaches would stay untrained.
            "max_position_embeddings": settings.max_length,
        }
        if tokenizer is not None:
            fields["vocab_size"] = len(tokenizer)
            fields |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        config = RegardDecoderConfig(**{**fields, **settings.config})
        settings.require_positions(config.max_position_embeddings)
        return config

    def make_model(self, settings: DecoderSettings, processor: Any = None) -> PreTrainedModel:
        return RegardDecoderForCausalLM(self.make_config(settings, processor))

    def load_model(self, settings: DecoderSettings, path: str) -> PreTrainedModel:
        return load_model(RegardDecoderForCausalLM, path, f"`model` ({path})")

    def settings_of(self, config: PreTrainedConfig) -> dict[str, Any]:
        return {"max_length": min(DecoderSettings.max_length, config.max_position_embeddings)}

    def load_data(self, settings: DecoderSettings) -> tuple[Dataset, Dataset]:
        return load_document_split(settings)

    def make_processor(self, settings: DecoderSettings, rows: Dataset) -> PreTrainedTokenizerFast:
        limit = self.make_config(settings).max_position_embeddings
        if settings.tokenizer is not None:
            return load_tokenizer(settings.tokenizer, limit, self.special_tokens)
        logger.info("Training a tokenizer of %d tokens.", settings.vocab_size)
        return train_byte_level((row["text"] for row in rows), vocab_size=settings.vocab_size, model_max_length=limit)

    def make_objective(
        self, settings: DecoderSettings, processor: Any, rows: Dataset, held_out: Dataset
    ) -> tuple[DecoderObjective, dict[str, Any]]:
        vocab_size = self.make_config(settings, processor).vocab_size
        check_vocabulary(processor, vocab_size)
        parts = [
            ChunkExamples(tokenize_texts(part, processor), settings.max_length, settings.seed)
            for part in (rows, held_out)
        ]
        objective = DecoderObjective(parts[0], parts[1], processor.pad_token_id, vocab_size)
        data = {
            "documents": len(rows),
            "tokens": len(parts[0].ids),
            "held_out_documents": len(held_out),
            "held_out_tokens": len(parts[1].ids),
        }
        logger.info(
            "%s documents with %s tokens; held out: %s documents with %s tokens.",
            *(f"{number:,}" for number in data.values()),
        )
        return objective, data

    def sample_outputs(
        self, settings: DecoderSettings, model: PreTrainedModel, processor: Any, held_out: Dataset
    ) -> dict[str, Any]:
        """Continues five held-out documents from their beginnings."""
        return {"generated": continue_texts(model, processor, held_out, settings)}

    def synthetic_batch(self, settings: DecoderSettings, config: Any, rows: int) -> tuple[dict[str, Any], int]:
        rng = np.random.default_rng(settings.seed)
        length = settings.max_length
        if length < 2:
            raise ValueError(f"`max_length` ({length}) must be at least 2: one token, and one to predict")
        batch = ChunkCollator(0)(list(rng.integers(0, config.vocab_size, (rows, length))))
        return {**batch, "use_cache": False}, rows * length


@torch.inference_mode()
def continue_texts(
    model: Any, tokenizer: PreTrainedTokenizerFast, documents: Dataset, settings: DecoderSettings
) -> list[dict[str, str]]:
    """Samples continuations of held-out documents.

    Args:
        model: the language model.
        tokenizer: the model's tokenizer.
        documents: rows with a `text`, of which up to five are drawn.
        settings: settings of the run; `max_length` and `seed` are used.

    Returns:
        For each document its `prompt`, a quarter of `max_length` at most, and the sampled `continuation`.
    """
    rng = np.random.default_rng(settings.seed)
    length = max(1, settings.max_length // 4)
    tokens = tokenize_texts(documents, tokenizer)
    examples = []
    set_seed(settings.seed)
    for row in rng.permutation(len(documents))[:5].tolist():
        ids = tokens[row]["ids"]
        # Without the end token, unless it is the only one.
        begun = max(1, min(length, len(ids) - 1))
        inputs = torch.tensor([ids[:begun]], device=model.device)
        generated = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=True, top_p=0.9, max_new_tokens=length
        )
        prompt, continuation = (
            str(tokenizer.decode(part, skip_special_tokens=True))
            for part in (generated[0, :begun], generated[0, begun:])
        )
        examples.append({"prompt": prompt, "continuation": continuation})
    return examples


DECODER = DecoderRecipe()
