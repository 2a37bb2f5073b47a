"""Pretraining BERT: the settings of a run, the task, and the function that runs it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from ...configuration.bert import RegardBertConfig
from ...modeling.bert_pretraining import RegardBertForMaskedLM, RegardBertForPreTraining
from ...modeling.loading.load import load_model
from ...tokenization.wordpiece import check_vocabulary, train_wordpiece
from ..examples.bert import BertCollator, BertExamples, Epoch
from ..examples.masking import Masking
from ..examples.sentences import split_sentences
from ..examples.tokenized import FlatColumn, count_tokens, log_frequencies, tokenize_documents
from ..run.settings import option
from .base import Recipe
from .sizes import SizedSettings
from .text_corpus import CorpusSettings, load_document_split
from .tokenizers import load_tokenizer

logger = logging.getLogger("regard.training")


@dataclass
class BertSettings(CorpusSettings, SizedSettings):
    """What a BERT pretraining run can set."""

    tokenizer: str | None = option(None, "A tokenizer to use, a folder or Hub id, instead of training one.")
    vocab_size: int = option(4096, "Word pieces of the tokenizer to train.")
    lowercase: bool = option(True, "Whether the tokenizer to train lower-cases.")
    strip_accents: bool = option(False, "Whether the tokenizer to train drops accents.")
    mask_rate: float = option(0.15, "Share of the tokens to predict.")
    whole_words: bool = option(False, "Mask whole words instead of single pieces.")
    next_sentence: bool = option(True, "Train next sentence prediction too.")
    short_seq_prob: float = option(0.1, "Share of documents whose examples are made shorter.")

    def check(self) -> None:
        """See `TrainingSettings.check`."""
        super().check()
        if not 0 < self.mask_rate <= 1:
            raise ValueError(f"`mask_rate` ({self.mask_rate}) must be more than 0 and at most 1")
        if not 0 <= self.short_seq_prob <= 1:
            raise ValueError(f"`short_seq_prob` ({self.short_seq_prob}) must be at least 0 and at most 1")

    def make_config(self, tokenizer: PreTrainedTokenizerFast | None = None) -> RegardBertConfig:
        """The model's configuration, for the tokenizer if it is there yet.

        Raises:
            ValueError: if the fields do not fit together, or the positions do not reach as far as the examples.
        """
        fields: dict[str, Any] = {**self.transformer_fields(), "vocab_size": self.vocab_size}
        if tokenizer is not None:
            fields |= {
                "vocab_size": len(tokenizer),
                "pad_token_id": tokenizer.pad_token_id,
                "sep_token_id": tokenizer.sep_token_id,
            }
        config = RegardBertConfig(**{**fields, **self.config})
        self.require_positions(config.max_position_embeddings)
        return config


class BertObjective:
    """Masked language modeling, with or without next sentence prediction, for `Loop`.

    Args:
        train: makes the training examples.
        held_out: makes the held-out ones.
        token_counts: how often each id occurs in the training corpus, for the baseline.
    """

    loss_name = "masked_loss"

    def __init__(self, train: BertExamples, held_out: BertExamples, token_counts: np.ndarray) -> None:
        self._train, self._held_out = train, held_out
        self._epoch: Epoch | None = None
        self.next_sentence = train.next_sentence
        self.collate = BertCollator(train.next_sentence)
        ordinary = np.where(train.masking.special, 0, token_counts)
        self._most_frequent = int(ordinary.argmax())
        self._unigram = log_frequencies(ordinary)

    def epoch(self, number: int) -> Epoch:
        """See `loop.Objective`. The last one is kept: the first is asked for more than once, and takes time."""
        if self._epoch is None or self._epoch.number != number:
            self._epoch = self._train.epoch(number)
        return self._epoch

    @cached_property
    def _held_out_epoch(self) -> Epoch:
        return self._held_out.epoch(0)

    def held_out(self) -> Epoch:
        """See `loop.Objective`. Planned once, since it is the same at every evaluation."""
        return self._held_out_epoch

    def tokens(self, batch: dict[str, Tensor]) -> int:
        """See `loop.Objective`."""
        return batch["input_ids"].numel()

    def counts(self, batch: dict[str, Tensor]) -> dict[str, int]:
        """See `loop.Objective`."""
        counts = {"num_items_in_batch": len(batch["predicted_positions"])}
        return counts | ({"num_sequences_in_batch": len(batch["next_sentence_label"])} if self.next_sentence else {})

    def forward(self, model: nn.Module, batch: dict[str, Tensor], **counts: Tensor) -> Any:
        """See `loop.Objective`."""
        return model(**batch, **counts)

    def sums(self, output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `loop.Objective`."""
        labels = batch["labels"][0].index_select(0, batch["predicted_positions"])
        logits = output.prediction_logits if self.next_sentence else output.logits
        losses = nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        sums = {
            "predicted": torch.tensor(len(labels)),
            "masked_loss": losses,
            "masked_right": (logits.argmax(-1) == labels).sum(),
            "most_frequent_right": (labels == self._most_frequent).sum(),
            "unigram_loss": -self._unigram.to(labels.device)[labels].sum(),
        }
        if self.next_sentence:
            follows = batch["next_sentence_label"]
            sums |= {
                "pairs": torch.tensor(len(follows)),
                "next_right": (output.seq_relationship_logits.argmax(-1) == follows).sum(),
                "random_pairs": follows.sum(),
            }
        return sums

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """See `loop.Objective`.

        The baselines are the training corpus's most frequent token, its unigrams, and the larger kind of pairs.
        """
        predicted = max(sums["predicted"], 1.0)
        metrics = {
            "masked_accuracy": sums["masked_right"] / predicted,
            "masked_accuracy_baseline": sums["most_frequent_right"] / predicted,
            "masked_loss": sums["masked_loss"] / predicted,
            "masked_loss_unigram": sums["unigram_loss"] / predicted,
        }
        if self.next_sentence:
            random_share = sums["random_pairs"] / sums["pairs"]
            metrics |= {
                "next_sentence_accuracy": sums["next_right"] / sums["pairs"],
                "next_sentence_baseline": max(random_share, 1 - random_share),
            }
        return metrics


def make_tokenizer(settings: BertSettings, documents: Dataset) -> PreTrainedTokenizerFast:
    """The tokenizer that the settings name, or one trained on the documents.

    Raises:
        ValueError: if the one named lacks what pretraining needs; see `train_wordpiece` for training.
    """
    limit = settings.make_config().max_position_embeddings
    if settings.tokenizer is None:
        logger.info("Training a tokenizer of %d word pieces.", settings.vocab_size)
        return train_wordpiece(
            (row["text"] for row in documents),
            vocab_size=settings.vocab_size,
            lowercase=settings.lowercase,
            strip_accents=settings.strip_accents,
            model_max_length=limit,
        )
    return load_tokenizer(settings.tokenizer, limit, BertRecipe.special_tokens)


@torch.inference_mode()
def fill_examples(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, documents: Dataset, settings: BertSettings
) -> list[dict[str, Any]]:
    """Masks a word in each of five sentences and has the model guess it.

    Args:
        model: predicts masked tokens.
        tokenizer: of the model.
        documents: rows with a `text`, from which sentences of 8 to 30 pieces are drawn.
        settings: give the language, the longest example and the seed of the draw.

    Returns:
        For each sentence its `text` with the mask, the `word` under it and the three best `guesses`.
    """
    rng = np.random.default_rng(settings.seed)
    examples: list[dict[str, Any]] = []
    model.eval()
    for row in rng.permutation(len(documents)).tolist():
        sentences = split_sentences(documents[row]["text"], settings.language)
        sentence = sentences[rng.integers(len(sentences))]
        encoding = tokenizer(sentence).encodings[0]
        words = [
            place
            for place, token in enumerate(encoding.tokens)
            if len(token) > 3 and token.isalpha() and encoding.word_ids.count(encoding.word_ids[place]) == 1
        ]
        if not (8 <= len(encoding) - 2 <= min(30, settings.max_length - 2) and words):
            continue
        start, stop = encoding.offsets[rng.choice(words)]
        text = sentence[:start] + tokenizer.mask_token + sentence[stop:]
        inputs = tokenizer(text, return_tensors="pt").to(model.device)
        output = model(**inputs)
        logits = output.prediction_logits if "prediction_logits" in output else output.logits
        best = logits[inputs["input_ids"] == tokenizer.mask_token_id][0].topk(3).indices
        guesses = tokenizer.convert_ids_to_tokens(best.tolist())
        examples.append({"text": text, "word": sentence[start:stop], "guesses": guesses})
        if len(examples) == 5:
            break
    return examples


class BertRecipe(Recipe[BertSettings]):
    """Pretraining BERT."""

    name: ClassVar[str] = "bert"
    special_tokens: ClassVar[tuple[str, ...]] = ("cls", "sep", "mask", "pad")
    settings_class = BertSettings
    default_steps = 4000

    def _model_class(self, settings: BertSettings) -> type[PreTrainedModel]:
        return RegardBertForPreTraining if settings.next_sentence else RegardBertForMaskedLM

    def make_model(self, settings: BertSettings, processor: Any = None) -> PreTrainedModel:
        """See `Recipe`."""
        return self._model_class(settings)(settings.make_config(processor))

    def load_model(self, settings: BertSettings, path: str) -> PreTrainedModel:
        """See `Recipe`."""
        return load_model(self._model_class(settings), path, f"`model` ({path})")

    def settings_of(self, config: PreTrainedConfig) -> dict[str, Any]:
        """See `Recipe`."""
        return {"next_sentence": any(name.endswith("ForPreTraining") for name in config.architectures or ())}

    def load_data(self, settings: BertSettings) -> tuple[Dataset, Dataset]:
        """See `Recipe`."""
        return load_document_split(settings)

    def make_processor(self, settings: BertSettings, rows: Dataset) -> PreTrainedTokenizerFast:
        """See `Recipe`."""
        return make_tokenizer(settings, rows)

    def make_objective(
        self, settings: BertSettings, processor: Any, rows: Dataset, held_out: Dataset
    ) -> tuple[BertObjective, dict[str, Any]]:
        """See `Recipe`."""
        masking = Masking.from_tokenizer(processor, rate=settings.mask_rate, whole_words=settings.whole_words)

        def examples(part: Dataset) -> BertExamples:
            return BertExamples(
                tokenize_documents(part, processor, language=settings.language, word_starts=settings.whole_words),
                processor,
                masking,
                max_length=settings.max_length,
                seed=settings.seed,
                next_sentence=settings.next_sentence,
                short_seq_prob=settings.short_seq_prob,
            )

        train, held_out_examples = examples(rows), examples(held_out)
        counts = count_tokens(FlatColumn(train.corpus, "ids"), len(masking.special))
        task = BertObjective(train, held_out_examples, counts)
        first_epoch = task.epoch(0)
        unknown = counts[processor.unk_token_id] if processor.unk_token else 0
        data = {
            "documents": len(rows),
            "tokens": int(counts.sum()),
            "examples": len(first_epoch),
            "unknown_share": float(unknown / counts.sum()),
            "held_out_documents": len(held_out),
            "held_out_examples": len(task.held_out()),
        }
        if settings.next_sentence:
            data["random_pairs_share"] = first_epoch.random_share
        logger.info(
            "%s documents with %s tokens (%.3f%% unknown) make %s examples an epoch; held out: %s documents, "
            "%s examples.",
            *(f"{data[name]:,}" for name in ("documents", "tokens")),
            100 * data["unknown_share"],
            *(f"{data[name]:,}" for name in ("examples", "held_out_documents", "held_out_examples")),
        )
        check_vocabulary(processor, settings.make_config(processor).vocab_size)
        return task, data

    def try_out(
        self, settings: BertSettings, model: PreTrainedModel, processor: Any, held_out: Dataset
    ) -> dict[str, Any]:
        """See `Recipe`."""
        return {"filled": fill_examples(model, processor, held_out, settings)}


BERT = BertRecipe()
