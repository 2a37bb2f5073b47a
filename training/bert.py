"""Pretraining BERT: the settings of a run, the task, and the function that runs it."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from ..configuration.bert import RegardBertConfig
from ..modeling.bert import RegardBertForMaskedLM, RegardBertForPreTraining
from ..tokenization.wordpiece import check_vocabulary, train_wordpiece
from .bert_data import BertCollator, BertExamples, Epoch
from .corpus import FlatColumn, tokenize_documents
from .loop import Loop, Outcome, make_accelerator, steps_per_epoch
from .masking import IGNORED, Masking
from .run import MODEL, TOKENIZER, load_results, open_run, save_results, save_settings
from .schedule import Budget
from .sentences import split_sentences
from .settings import TrainingSettings, option, to_dict
from .sources import load_documents

logger = logging.getLogger("regard.training")

# The sizes of Turc et al. (2019), https://arxiv.org/abs/1908.08962, and of Devlin et al. (2019): layers and width. The
# feed-forward layer is four times as wide, and a head 64, but for the smallest, whose two heads are made four.
SIZES = {
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
DEFAULT_STEPS = 4000


@dataclass
class BertSettings(TrainingSettings):
    """What a BERT pretraining run can set."""

    tokenizer: str | None = option(None, "A tokenizer to use, a folder or Hub id, instead of training one.")
    vocab_size: int = option(4096, "Word pieces of the tokenizer to train.")
    lowercase: bool = option(True, "Whether the tokenizer to train lower-cases.")
    strip_accents: bool = option(False, "Whether the tokenizer to train drops accents.")
    size: str = option("tiny", f"Size of the model: {', '.join(SIZES)}.")
    config: dict = option({}, "Fields of the model's configuration, which go before the size.")
    mask_rate: float = option(0.15, "Share of the tokens to predict.")
    whole_words: bool = option(False, "Mask whole words instead of single pieces.")
    next_sentence: bool = option(True, "Train next sentence prediction too.")
    short_seq_prob: float = option(0.1, "Share of documents whose examples are made shorter.")
    dropout: float = option(0.1, "Dropout of hidden states and attention weights.")

    def check(self) -> None:
        """See `TrainingSettings.check`."""
        self.require_choice("size", SIZES)
        if self.learning_rate is None:
            self.learning_rate = 0.256 / self._width
        super().check()
        if not 0 < self.mask_rate <= 1:
            raise ValueError(f"`mask_rate` ({self.mask_rate}) must be more than 0 and at most 1")
        if not 0 <= self.short_seq_prob <= 1:
            raise ValueError(f"`short_seq_prob` ({self.short_seq_prob}) must be at least 0 and at most 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` ({self.dropout}) must be at least 0 and less than 1")

    @property
    def _width(self) -> int:
        width = self.config.get("hidden_size")
        # One that is no width is left for the configuration to refuse.
        return width if isinstance(width, int) and width > 0 else SIZES[self.size][1]

    def make_config(self, tokenizer: PreTrainedTokenizerFast | None = None) -> RegardBertConfig:
        """The model's configuration, for the tokenizer if it is there yet.

        Raises:
            ValueError: if the fields do not fit together, or the positions do not reach as far as the examples.
        """
        width = self._width
        fields: dict[str, Any] = {
            "num_hidden_layers": SIZES[self.size][0],
            "hidden_size": width,
            "num_attention_heads": max(4, width // 64),
            "intermediate_size": 4 * width,
            "hidden_dropout_prob": self.dropout,
            "attention_probs_dropout_prob": self.dropout,
            "vocab_size": self.vocab_size,
            # BERT's 0.02 at its width of 768: narrower layers add up fewer products.
            "initializer_range": 0.02 * (768 / width) ** 0.5,
        }
        if tokenizer is not None:
            fields |= {
                "vocab_size": len(tokenizer),
                "pad_token_id": tokenizer.pad_token_id,
                "sep_token_id": tokenizer.sep_token_id,
            }
        config = RegardBertConfig(**{**fields, **self.config})
        positions = config.max_position_embeddings
        if self.max_length > positions:
            raise ValueError(
                f"`max_length` ({self.max_length}) is more than `max_position_embeddings` ({positions}): "
                f"shorten it, or set max_position_embeddings={self.max_length} in `config`"
            )
        return config


class BertTask:
    """Masked language modeling, with or without next sentence prediction, for `Loop`.

    Args:
        train: makes the training examples.
        held_out: makes the held-out ones.
        token_counts: how often each id occurs in the training corpus, for the baseline.
    """

    def __init__(self, train: BertExamples, held_out: BertExamples, token_counts: np.ndarray) -> None:
        self._train, self._held_out = train, held_out
        self.next_sentence = train.next_sentence
        self.collate = BertCollator(train.tokenizer.pad_token_id, train.next_sentence)
        ordinary = np.where(train.masking.special, 0, token_counts)
        self._most_frequent = int(ordinary.argmax())
        # A word piece that the training corpus lacks would have no probability.
        self._unigram = torch.from_numpy(np.log((ordinary + 1) / (ordinary + 1).sum()))

    def epoch(self, number: int) -> Epoch:
        """See `loop.Task`."""
        return self._train.epoch(number)

    @cached_property
    def _held_out_epoch(self) -> Epoch:
        return self._held_out.epoch(0)

    def held_out(self) -> Epoch:
        """See `loop.Task`. Planned once, since it is the same at every evaluation."""
        return self._held_out_epoch

    def counts(self, batch: dict[str, Tensor]) -> dict[str, int]:
        """See `loop.Task`."""
        counts = {"num_items_in_batch": int((batch["labels"] != IGNORED).sum())}
        return counts | ({"num_sequences_in_batch": len(batch["labels"])} if self.next_sentence else {})

    def forward(self, model: nn.Module, batch: dict[str, Tensor], **counts: Tensor) -> Any:
        """See `loop.Task`."""
        return model(**batch, **counts, predicted_only=True)

    def sums(self, output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `loop.Task`."""
        labels = batch["labels"][batch["labels"] != IGNORED]
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
        """See `loop.Task`.

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


def load_split(settings: TrainingSettings) -> tuple[Dataset, Dataset]:
    """The training documents and the held-out ones.

    Raises:
        ValueError: if `validation` is neither a share nor a source, or a part would be empty; see `load_documents`.
    """
    reading: dict[str, Any] = {
        "text_column": settings.text_column,
        "documents": settings.documents,
        "split": settings.split,
        "streaming": settings.streaming,
    }
    documents = load_documents(settings.data, max_documents=settings.max_documents, **reading)
    try:
        share = float(settings.validation)
    except ValueError:
        return documents, load_documents(settings.validation, **reading)
    if not 0 < share < 1:
        raise ValueError(f"`validation` ({settings.validation}) must be a share between 0 and 1, or a source")
    # Two on each side: a pair with a random second segment needs another document.
    number = max(2, round(share * len(documents)))
    if len(documents) < number + 2:
        raise ValueError(
            f"the corpus has {len(documents)} document{'s' if len(documents) > 1 else ''}, "
            f"too few to hold out {number} and train on 2 or more: add documents, "
            "split the text into several with `documents`, or name a source for `validation`"
        )
    split = documents.train_test_split(test_size=number, seed=settings.seed)
    return split["train"], split["test"]


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
    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer, model_max_length=limit)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"`tokenizer` ({settings.tokenizer}) is none of the `tokenizers` library, which is needed")
    for name in ("cls", "sep", "mask", "pad"):
        if getattr(tokenizer, f"{name}_token_id") is None:
            raise ValueError(f"`tokenizer` ({settings.tokenizer}) has no {name} token, which pretraining needs")
    return tokenizer


def pretrain_bert(
    output: str | Path, settings: dict[str, Any] | None = None, *, resume: bool = False
) -> dict[str, Any]:
    """Pretrains a BERT on Accelerate, in as many processes as it is launched in.

    Args:
        output: folder of the run, see `run`.
        settings: fields of `BertSettings` by name.
        resume: go on with the run in `output`, or start it if there is none.

    Returns:
        What the run came to, as it is written to `results.json`.

    Raises:
        ValueError: for settings, data or a folder that won't do. Nothing is written before all are known to do.
    """
    folder = Path(output)
    chosen = open_run(folder, BertSettings, "bert", settings or {}, resume)
    finished = load_results(folder)
    if finished is not None:
        logger.info("The run in %s has already ended.", folder)
        return finished
    model_class = RegardBertForPreTraining if chosen.next_sentence else RegardBertForMaskedLM
    # On the meta device a model costs nothing, and sizes that don't fit are refused before the data is read.
    with torch.device("meta"):
        model_class(chosen.make_config())
    accelerator = make_accelerator(chosen, folder)
    with accelerator.main_process_first():
        documents, held_out = load_split(chosen)
        task, tokenizer, data = _prepare(folder, chosen, documents, held_out)
    set_seed(chosen.seed)
    model = model_class(chosen.make_config(tokenizer))
    budget = Budget(chosen.steps, chosen.epochs, chosen.minutes)
    if budget == Budget():
        budget = Budget(steps=DEFAULT_STEPS)
    if budget.minutes is not None:
        logger.info("The learning rate follows the clock, so this run can't be repeated to the bit.")
    try:
        outcome = Loop(task, model, chosen, budget, folder, accelerator).run(resume)
        return _finish(accelerator, folder, chosen, model, tokenizer, held_out, data, outcome)
    finally:
        # Closes the trackers, and with them the process group.
        accelerator.end_training()


def _prepare(
    folder: Path, settings: BertSettings, documents: Dataset, held_out_documents: Dataset
) -> tuple[BertTask, PreTrainedTokenizerFast, dict[str, Any]]:
    """Tokenises the data. In a new run, writes settings and tokenizer once everything is known to do."""
    begun = (folder / TOKENIZER).exists()
    tokenizer: PreTrainedTokenizerFast = (
        AutoTokenizer.from_pretrained(folder / TOKENIZER)  # type: ignore[assignment]
        if begun
        else make_tokenizer(settings, documents)
    )
    masking = Masking.from_tokenizer(tokenizer, rate=settings.mask_rate, whole_words=settings.whole_words)

    def examples(part: Dataset) -> BertExamples:
        return BertExamples(
            tokenize_documents(part, tokenizer, language=settings.language),
            tokenizer,
            masking,
            max_length=settings.max_length,
            seed=settings.seed,
            next_sentence=settings.next_sentence,
            short_seq_prob=settings.short_seq_prob,
        )

    train, held_out = examples(documents), examples(held_out_documents)
    counts = np.zeros(len(masking.special), dtype=np.int64)
    for part in FlatColumn(train.corpus, "ids").parts():
        counts += np.bincount(part, minlength=len(counts))
    task = BertTask(train, held_out, counts)
    first_epoch = task.epoch(0)
    data = {
        "documents": len(documents),
        "tokens": int(counts.sum()),
        "examples": len(first_epoch),
        "unknown_share": float(counts[tokenizer.unk_token_id] / counts.sum()) if tokenizer.unk_token else 0.0,
        "held_out_documents": len(held_out_documents),
        "held_out_examples": len(task.held_out()),
    }
    if settings.next_sentence:
        data["random_pairs_share"] = first_epoch.random_share
    logger.info(
        "%s documents with %s tokens (%.3f%% unknown) make %s examples an epoch; held out: %s documents, %s examples.",
        *(f"{data[name]:,}" for name in ("documents", "tokens")),
        100 * data["unknown_share"],
        *(f"{data[name]:,}" for name in ("examples", "held_out_documents", "held_out_examples")),
    )
    check_vocabulary(tokenizer, settings.make_config(tokenizer).vocab_size)
    steps_per_epoch(first_epoch, settings.batch_size)
    if not begun:
        save_settings(folder, "bert", settings)
        # Renamed in: a resumed run takes a tokenizer that is there to be whole.
        tokenizer.save_pretrained(folder / f"partial-{TOKENIZER}")
        os.replace(folder / f"partial-{TOKENIZER}", folder / TOKENIZER)
    return task, tokenizer, data


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


def _finish(
    accelerator: Accelerator,
    folder: Path,
    settings: BertSettings,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    held_out: Dataset,
    data: dict[str, Any],
    outcome: Outcome,
) -> dict[str, Any]:
    results = {
        "family": "bert",
        "architecture": type(model).__name__,
        "parameters": model.num_parameters(),
        "metrics": outcome.metrics,
        "filled": fill_examples(accelerator.unwrap_model(model), tokenizer, held_out, settings),
        **asdict(outcome.progress),
        "processes": outcome.processes,
        "device": accelerator.device.type,
        "data": data,
        "settings": to_dict(settings),
        "versions": {
            name: version(name) for name in ("torch", "transformers", "accelerate", "datasets", "tokenizers")
        },
    }
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder / MODEL)
        tokenizer.save_pretrained(folder / MODEL)
        save_results(folder, results)
    accelerator.wait_for_everyone()
    return results
