"""Examples of captioned images: tokenised captions, the examples of each epoch, and batches."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from datasets import Dataset, Features, Sequence, Value
from datasets.fingerprint import Hasher
from torch import Tensor

from ...tokenization.processor import RegardCaptionerProcessor
from .epoch import EpochDataset
from .masking import IGNORED
from .seq2seq import padded
from .tokenized import FlatColumn, plain_backend

logger = logging.getLogger("regard.training")


# Part of the cache key: increase it with each change that makes other rows of the same captions.
FORMAT_VERSION = 1


class CaptionExample(TypedDict):
    """An image and the ids of its caption, which end with the end token."""

    image: Any
    labels: np.ndarray


class CaptionExamples:
    """Makes the examples of each epoch from captioned images.

    Args:
        rows: data set with the columns `image` and `text`.
        processor: processor whose tokenizer turns captions into ids.
        max_length: length of the longest caption in tokens, the end token included. Longer captions are cut; a warning
            gives their number.
        seed: seed of the run.
    """

    def __init__(self, rows: Dataset, processor: RegardCaptionerProcessor, max_length: int, seed: int = 0) -> None:
        self.rows, self.seed = rows, seed
        self.captions = _tokenize_captions(rows, processor.tokenizer, max_length)
        self.unknown = np.flatnonzero(self.captions["unknown"])
        self.ids = FlatColumn(self.captions, "ids")

    def epoch(self, number: int) -> EpochDataset[CaptionExample]:
        """The examples of an epoch, in the order of that epoch.

        Raises:
            ValueError: if a caption has only unknown words, so that nothing can be learned from it.
        """
        if len(self.unknown):
            text = self.rows[int(self.unknown[0])]["text"]
            raise ValueError(
                f"the caption {text!r} holds no word that the tokenizer knows: leave it out, or choose another "
                "`tokenizer` or a lower `min_frequency`"
            )
        return EpochDataset(np.random.default_rng([self.seed, number]).permutation(len(self.rows)), self._build)

    def in_order(self) -> EpochDataset[CaptionExample]:
        """All examples, in the order of the rows."""
        return EpochDataset(np.arange(len(self.rows)), self._build)

    def _build(self, row: int, index: int) -> CaptionExample:
        return CaptionExample(image=self.rows[row]["image"], labels=self.ids.row(row))


def _tokenize_captions(rows: Dataset, tokenizer: Any, max_length: int) -> Dataset:
    backend = plain_backend(tokenizer)
    end, unknown = tokenizer.eos_token_id, tokenizer.unk_token_id

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        captions: dict[str, list[Any]] = {"ids": [], "cut": [], "unknown": []}
        for encoding in backend.encode_batch(batch["text"], add_special_tokens=False):
            captions["ids"].append([*encoding.ids[: max_length - 1], end])
            captions["cut"].append(len(encoding) >= max_length)
            captions["unknown"].append(all(id_ == unknown for id_ in encoding.ids))
        return captions

    captions = rows.select_columns(["text"]).map(
        tokenize,
        batched=True,
        remove_columns=["text"],
        features=Features({"ids": Sequence(Value("int32")), "cut": Value("bool"), "unknown": Value("bool")}),
        new_fingerprint=Hasher.hash((rows._fingerprint, backend.to_str(), end, unknown, max_length, FORMAT_VERSION)),
        desc="Tokenising",
    )
    if cut := sum(captions["cut"]):
        logger.warning("%s of %s captions are longer than `max_length` (%d) and cut.", cut, len(rows), max_length)
    return captions


@dataclass(frozen=True)
class CaptionCollator:
    """Resizes images to one size and pads captions to the length of the longest.

    Args:
        processor: processor that turns images into `pixel_values`.
    """

    processor: RegardCaptionerProcessor

    def __call__(self, examples: list[CaptionExample]) -> dict[str, Tensor]:
        """Makes a batch of `pixel_values` (batch, channels, height, width) and `labels` (batch, target)."""
        images = self.processor(images=[example["image"] for example in examples], return_tensors="pt")
        labels = padded([example["labels"] for example in examples], IGNORED)
        return {"pixel_values": images["pixel_values"], "labels": labels}
