"""Pretraining BERT: its objective and its recipe."""

from __future__ import annotations

import logging
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
from ..examples.bert import BertCollator, BertExample, BertExamples
from ..examples.epoch import EpochDataset
from ..examples.masking import IGNORED, Masking
from ..examples.sentences import split_sentences
from ..examples.tokenized import count_tokens, log_frequencies, tokenize_documents
from ..loop.objective import Objective
from .base import Recipe
from .settings import BertSettings
from .text_corpus import load_document_split
from .tokenizers import load_tokenizer

logger = logging.getLogger("regard.training")


class BertObjective(Objective):
    """Masked language modeling, with or without next sentence prediction.

    Args:
        train: makes the training examples.
        held_out: makes the held-out examples.
        token_counts: how often each id occurs in the training corpus, for the baselines.
    """

    loss_name = "masked_loss"

    def __init__(self, train: BertExamples, held_out: BertExamples, token_counts: np.ndarray) -> None:
        self._train, self._held_out = train, held_out
        self.next_sentence = train.next_sentence
        self.collate = BertCollator(train.next_sentence)
        ordinary = np.where(train.masking.special, 0, token_counts)
        self._most_frequent = int(ordinary.argmax())
        self._unigram = log_frequencies(ordinary)

    def epoch(self, number: int) -> EpochDataset[BertExample]:
        return self._train.epoch(number)

    def held_out(self) -> EpochDataset[BertExample]:
        return self._held_out.epoch(0)

    def tokens(self, batch: dict[str, Tensor]) -> int:
        return batch["input_ids"].numel()

    def counts(self, batch: dict[str, Tensor]) -> dict[str, int]:
        counts = {"num_items_in_batch": len(batch["predicted_positions"])}
        return counts | ({"num_sequences_in_batch": len(batch["next_sentence_label"])} if self.next_sentence else {})

    def forward(self, model: nn.Module, batch: dict[str, Tensor], **counts: Tensor) -> Any:
        return model(**batch, **counts)

    def sums(self, output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
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
        """The metrics of an evaluation.

        The baselines are the training corpus's most frequent token, its unigrams, and the more frequent kind of pair.
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


@torch.inference_mode()
def fill_examples(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, documents: Dataset, settings: BertSettings
) -> list[dict[str, Any]]:
    """Masks a word in each of five sentences, and lets the model predict it.

    Args:
        model: predicts masked tokens.
        tokenizer: the model's tokenizer.
        documents: rows with a `text`, from which sentences of 8 to 30 word pieces are drawn.
        settings: settings of the run; `language`, `max_length` and `seed` are used.

    Returns:
        For each sentence its `text` with the mask, the masked `word` and the three most probable `guesses`.
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
    """Pretrains BERT."""

    name: ClassVar[str] = "bert"
    special_tokens: ClassVar[tuple[str, ...]] = ("cls", "sep", "mask", "pad")
    default_steps = 4000

    def _model_class(self, settings: BertSettings) -> type[PreTrainedModel]:
        return RegardBertForPreTraining if settings.next_sentence else RegardBertForMaskedLM

    def make_config(
        self, settings: BertSettings, tokenizer: PreTrainedTokenizerFast | None = None
    ) -> RegardBertConfig:
        """Makes the model's configuration, for the tokenizer's vocabulary if there is one yet.

        Raises:
            ValueError: if the fields do not fit together, or `max_length` exceeds the model's positions.
        """
        fields: dict[str, Any] = {**settings.transformer_fields(), "vocab_size": settings.vocab_size}
        if tokenizer is not None:
            fields |= {
                "vocab_size": len(tokenizer),
                "pad_token_id": tokenizer.pad_token_id,
                "sep_token_id": tokenizer.sep_token_id,
            }
        config = RegardBertConfig(**{**fields, **settings.config})
        settings.require_positions(config.max_position_embeddings)
        return config

    def make_model(self, settings: BertSettings, processor: Any = None) -> PreTrainedModel:
        return self._model_class(settings)(self.make_config(settings, processor))

    def load_model(self, settings: BertSettings, path: str) -> PreTrainedModel:
        return load_model(self._model_class(settings), path, f"`model` ({path})")

    def settings_of(self, config: PreTrainedConfig) -> dict[str, Any]:
        return {"next_sentence": any(name.endswith("ForPreTraining") for name in config.architectures or ())}

    def load_data(self, settings: BertSettings) -> tuple[Dataset, Dataset]:
        return load_document_split(settings)

    def make_processor(self, settings: BertSettings, rows: Dataset) -> PreTrainedTokenizerFast:
        limit = self.make_config(settings).max_position_embeddings
        if settings.tokenizer is not None:
            return load_tokenizer(settings.tokenizer, limit, self.special_tokens)
        logger.info("Training a tokenizer of %d word pieces.", settings.vocab_size)
        return train_wordpiece(
            (row["text"] for row in rows),
            vocab_size=settings.vocab_size,
            lowercase=settings.lowercase,
            strip_accents=settings.strip_accents,
            model_max_length=limit,
        )

    def make_objective(
        self, settings: BertSettings, processor: Any, rows: Dataset, held_out: Dataset
    ) -> tuple[BertObjective, dict[str, Any]]:
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
        counts = count_tokens(train.ids, len(masking.special))
        objective = BertObjective(train, held_out_examples, counts)
        unknown = counts[processor.unk_token_id] if processor.unk_token else 0
        data = {
            "documents": len(rows),
            "tokens": int(counts.sum()),
            "examples": len(objective.epoch(0)),
            "unknown_share": float(unknown / counts.sum()),
            "held_out_documents": len(held_out),
            "held_out_examples": len(objective.held_out()),
        }
        if settings.next_sentence:
            data["random_pairs_share"] = train.random_share(0)
        logger.info(
            "%s documents with %s tokens (%.3f%% unknown) make %s examples an epoch; held out: %s documents, "
            "%s examples.",
            *(f"{data[name]:,}" for name in ("documents", "tokens")),
            100 * data["unknown_share"],
            *(f"{data[name]:,}" for name in ("examples", "held_out_documents", "held_out_examples")),
        )
        check_vocabulary(processor, self.make_config(settings, processor).vocab_size)
        return objective, data

    def sample_outputs(
        self, settings: BertSettings, model: PreTrainedModel, processor: Any, held_out: Dataset
    ) -> dict[str, Any]:
        """Masks a word in each of five held-out sentences, and predicts it."""
        return {"filled": fill_examples(model, processor, held_out, settings)}

    def synthetic_batch(self, settings: BertSettings, config: Any, rows: int) -> tuple[dict[str, Any], int]:
        rng = np.random.default_rng(settings.seed)
        length, specials = settings.max_length, 3 if settings.next_sentence else 2
        if length < specials + 2:
            raise ValueError(
                f"`max_length` ({length}) must be at least {specials + 2}: {specials} special tokens and 2"
            )
        ordinary, examples = length - specials, []
        # As many in each row, as training has them in the mean.
        number = max(1, round(settings.mask_rate * ordinary))
        for row in range(rows):
            ids = rng.integers(0, config.vocab_size, length)
            predicted = 1 + rng.permutation(ordinary)[:number]
            labels = np.full(length, IGNORED, dtype=np.int64)
            labels[predicted] = ids[predicted]
            types = np.zeros(length, dtype=np.int64)
            examples.append(
                BertExample(input_ids=ids, token_type_ids=types, labels=labels, next_sentence_label=row % 2)
            )
        return BertCollator(settings.next_sentence)(examples), rows * length


BERT = BertRecipe()
