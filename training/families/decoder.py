"""Training the decoder-only language model: the settings, the task and the family."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
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
from ..examples.masking import IGNORED
from ..examples.text_chunks import BlockCollator, BlockEpoch, BlockExamples
from ..examples.tokenized import count_tokens, log_frequencies, tokenize_texts
from ..generation.text_metrics import perplexity
from ..run.settings import option
from .base import Recipe
from .sizes import SizedSettings
from .text_corpus import CorpusSettings, load_document_split
from .tokenizers import load_tokenizer

logger = logging.getLogger("regard.training")


@dataclass
class DecoderSettings(CorpusSettings, SizedSettings):
    """What a run of the decoder-only language model can set."""

    max_length: int = option(128, "Length of a training example, in tokens.")
    tokenizer: str | None = option(None, "A tokenizer to use, a folder or Hub id, instead of training one.")
    vocab_size: int = option(4096, "Tokens of the tokenizer to train, a byte-level BPE.")
    dropout: float = option(0.0, "Dropout; 0.1 or more where the same text is seen many times.")

    def make_config(self, tokenizer: PreTrainedTokenizerFast | None = None) -> RegardDecoderConfig:
        """The model's configuration, for the tokenizer if it is there yet.

        Raises:
            ValueError: if the fields do not fit together, or the positions do not reach as far as the examples.
        """
        fields: dict[str, Any] = {
            **self.transformer_fields(),
            "vocab_size": self.vocab_size,
            # A position that no example reaches would stay as it began.
            "max_position_embeddings": self.max_length,
        }
        if tokenizer is not None:
            fields["vocab_size"] = len(tokenizer)
            fields |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        config = RegardDecoderConfig(**{**fields, **self.config})
        self.require_positions(config.max_position_embeddings)
        return config


class DecoderObjective:
    """Predicting each token from those before it, for `Loop`.

    Args:
        train: makes the training examples.
        held_out: makes the held-out ones.
        pad_id: id of the padding token.
        vocab_size: number of tokens.
    """

    loss_name = "loss"

    def __init__(self, train: BlockExamples, held_out: BlockExamples, pad_id: int, vocab_size: int) -> None:
        self._train, self._held_out = train, held_out
        self.collate = BlockCollator(pad_id)
        token_counts = count_tokens(train.ids, vocab_size)
        self._most_frequent = int(token_counts.argmax())
        self._unigram = log_frequencies(token_counts)

    def epoch(self, number: int) -> BlockEpoch:
        """See `loop.Objective`."""
        return self._train.epoch(number)

    @cached_property
    def _held_out_blocks(self) -> BlockEpoch:
        return self._held_out.in_order()

    def held_out(self) -> BlockEpoch:
        """See `loop.Objective`."""
        return self._held_out_blocks

    def tokens(self, batch: dict[str, Tensor]) -> int:
        """See `loop.Objective`."""
        return int(batch["attention_mask"].sum())

    def counts(self, batch: dict[str, Tensor]) -> dict[str, int]:
        """See `loop.Objective`. The first token of a block is predicted from nothing, so it is not."""
        return {"num_items_in_batch": int((batch["labels"][:, 1:] != IGNORED).sum())}

    def forward(self, model: nn.Module, batch: dict[str, Tensor], **counts: Tensor) -> Any:
        """See `loop.Objective`."""
        return model(**batch, use_cache=False, **counts)

    def sums(self, output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `loop.Objective`."""
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
        """See `loop.Objective`. The baselines are the training corpus's unigrams, and its most frequent token."""
        predicted = int(sums["predicted"])
        return {
            "loss": sums["loss"] / predicted,
            "perplexity": perplexity(sums["loss"], predicted),
            "perplexity_unigram": perplexity(sums["unigram_loss"], predicted),
            "token_accuracy": sums["right"] / predicted,
            "token_accuracy_baseline": sums["most_frequent_right"] / predicted,
        }


class DecoderRecipe(Recipe[DecoderSettings]):
    """Training the decoder-only language model."""

    name: ClassVar[str] = "decoder"
    special_tokens: ClassVar[tuple[str, ...]] = ("pad", "eos")
    settings_class = DecoderSettings
    default_steps = 1000

    def make_model(self, settings: DecoderSettings, processor: Any = None) -> PreTrainedModel:
        """See `Recipe`."""
        return RegardDecoderForCausalLM(settings.make_config(processor))

    def load_model(self, settings: DecoderSettings, path: str) -> PreTrainedModel:
        """See `Recipe`."""
        return load_model(RegardDecoderForCausalLM, path, f"`model` ({path})")

    def settings_of(self, config: PreTrainedConfig) -> dict[str, Any]:
        """See `Recipe`."""
        return {"max_length": min(DecoderSettings.max_length, config.max_position_embeddings)}

    def load_data(self, settings: DecoderSettings) -> tuple[Dataset, Dataset]:
        """See `Recipe`."""
        return load_document_split(settings)

    def make_processor(self, settings: DecoderSettings, rows: Dataset) -> PreTrainedTokenizerFast:
        """See `Recipe`."""
        limit = settings.make_config().max_position_embeddings
        if settings.tokenizer is not None:
            return load_tokenizer(settings.tokenizer, limit, self.special_tokens)
        logger.info("Training a tokenizer of %d tokens.", settings.vocab_size)
        return train_byte_level((row["text"] for row in rows), vocab_size=settings.vocab_size, model_max_length=limit)

    def make_objective(
        self, settings: DecoderSettings, processor: Any, rows: Dataset, held_out: Dataset
    ) -> tuple[DecoderObjective, dict[str, Any]]:
        """See `Recipe`."""
        vocab_size = settings.make_config(processor).vocab_size
        check_vocabulary(processor, vocab_size)
        parts = [
            BlockExamples(tokenize_texts(part, processor), settings.max_length, settings.seed)
            for part in (rows, held_out)
        ]
        task = DecoderObjective(parts[0], parts[1], processor.pad_token_id, vocab_size)
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
        return task, data

    def try_out(
        self, settings: DecoderSettings, model: PreTrainedModel, processor: Any, held_out: Dataset
    ) -> dict[str, Any]:
        """See `Recipe`: goes on from the beginnings of five held-out documents."""
        return {"generated": continue_texts(model, processor, held_out, settings)}


@torch.inference_mode()
def continue_texts(
    model: Any, tokenizer: PreTrainedTokenizerFast, documents: Dataset, settings: DecoderSettings
) -> list[dict[str, str]]:
    """Samples how held-out documents might go on.

    Args:
        model: predicts the next token.
        tokenizer: of the model.
        documents: rows with a `text`.
        settings: give the longest example, and the seed of the draw.

    Returns:
        For each of up to five documents the `prompt`, its first quarter of an example, and the `continuation`.
    """
    rng = np.random.default_rng(settings.seed)
    length = max(1, settings.max_length // 4)
    tokens = tokenize_texts(documents, tokenizer)
    examples = []
    set_seed(settings.seed)
    for row in rng.permutation(len(documents))[:5].tolist():
        ids = tokens[row]["ids"]
        # Without the end token, as long as there is another.
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
