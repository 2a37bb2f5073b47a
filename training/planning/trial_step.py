"""Steps of a training run on made-up data: what one computes, the memory that it takes, and how long it lasts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor
from transformers import PreTrainedModel

from ...modeling.cpu import without_row_padding
from ..examples.bert import BertCollator, BertExample
from ..examples.masking import IGNORED
from ..examples.seq2seq import PairCollator, PairExample
from ..examples.text_chunks import ChunkCollator
from ..families.base import Recipe
from ..loop.loop import make_optimizer
from ..run.settings import TrainingSettings
from .flops import FlopCount
from .memory_tracker import MemoryTracker

# A measurement of the speed goes on for so long, and for no fewer steps, after one that is not counted.
SECONDS, STEPS = 5.0, 3


def _bert_batch(settings: Any, config: Any, rows: int, rng: np.random.Generator) -> tuple[dict[str, Any], int]:
    length, specials = settings.max_length, 3 if settings.next_sentence else 2
    if length < specials + 2:
        raise ValueError(f"`max_length` ({length}) must be at least {specials + 2}: {specials} special tokens and 2")
    ordinary, examples = length - specials, []
    # As many in each row, as training has them in the mean.
    number = max(1, round(settings.mask_rate * ordinary))
    for row in range(rows):
        ids = rng.integers(0, config.vocab_size, length)
        predicted = 1 + rng.permutation(ordinary)[:number]
        labels = np.full(length, IGNORED, dtype=np.int64)
        labels[predicted] = ids[predicted]
        types = np.zeros(length, dtype=np.int64)
        examples.append(BertExample(input_ids=ids, token_type_ids=types, labels=labels, next_sentence_label=row % 2))
    return BertCollator(settings.next_sentence)(examples), rows * length


def _decoder_batch(settings: Any, config: Any, rows: int, rng: np.random.Generator) -> tuple[dict[str, Any], int]:
    length = settings.max_length
    if length < 2:
        raise ValueError(f"`max_length` ({length}) must be at least 2: one token, and one to predict")
    batch = ChunkCollator(0)(list(rng.integers(0, config.vocab_size, (rows, length))))
    return {**batch, "use_cache": False}, rows * length


def _pair_batch(settings: Any, config: Any, rows: int, rng: np.random.Generator) -> tuple[dict[str, Any], int]:
    sources, targets = rng.integers(0, config.vocab_size, (2, rows, settings.max_length))
    pairs = zip(sources, targets, strict=True)
    batch = PairCollator(0)([PairExample(input_ids=source, labels=target) for source, target in pairs])
    return {**batch, "predicted_only": True}, 2 * rows * settings.max_length


def _caption_batch(settings: Any, config: Any, rows: int, rng: np.random.Generator) -> tuple[dict[str, Any], int]:
    size, length = settings.image_size, settings.max_length
    labels = torch.from_numpy(rng.integers(0, config.vocab_size, (rows, length)))
    images = torch.from_numpy(rng.standard_normal((rows, 3, size, size), dtype=np.float32))
    return {"pixel_values": images, "labels": labels}, rows * length


_BATCHES: dict[str, Callable[[Any, Any, int, np.random.Generator], tuple[dict[str, Any], int]]] = {
    "bert": _bert_batch,
    "decoder": _decoder_batch,
    "transformer": _pair_batch,
    "recurrent": _pair_batch,
    "captioner": _caption_batch,
}


def synthetic_batch(family: str, settings: TrainingSettings, config: Any, rows: int) -> tuple[dict[str, Any], int]:
    """A batch of random tokens and images, every example as long as the settings allow.

    Args:
        family: name of the model's family.
        settings: of the run.
        config: of the model.
        rows: number of examples.

    Returns:
        The arguments of the model, and the number of tokens as training counts them.

    Raises:
        ValueError: if the examples are too short to predict anything.
    """
    return _BATCHES[family](settings, config, rows, np.random.default_rng(settings.seed))


@dataclass(frozen=True)
class TrialResult:
    """What a pass forward and backward came to, beside the weights and what the optimizer keeps.

    Attributes:
        rows: number of examples.
        tokens: number of tokens in them.
        flops: floating point operations, a multiplication and an addition counted as two.
        saved: bytes that are kept for the backward pass when it begins.
        peaks: the most bytes in each section of the pass, gradients left out. How many sections there are does not
            depend on the number of examples.
        gradients: bytes of the gradients that there are in each section.
    """

    rows: int
    tokens: int
    flops: int
    saved: int
    peaks: tuple[int, ...]
    gradients: tuple[int, ...]


class TrialStep:
    """A model on the device that it would be trained on here, and steps of its training.

    Args:
        family: of the model.
        settings: of the run.
        processor: tokenizer or processor of the model; None if it is not there yet.

    Raises:
        ValueError: if sizes do not fit together, or the device has no such precision.
    """

    def __init__(self, family: Recipe, settings: TrainingSettings, processor: Any = None) -> None:
        self.family, self.settings = family, settings
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.device = accelerator or torch.device("cpu")
        if settings.precision == "fp16" and self.device.type == "cpu":
            raise ValueError("`precision` ('fp16') needs an accelerator, and there is none here: 'bf16' is as small")
        # The weights are made up too, and the generator is the caller's.
        with torch.random.fork_rng(devices=[]):
            model: Any = family.make_model(settings, processor)
            self.model: PreTrainedModel = model.to(self.device).train()
        self._forward: Any = self.model
        if settings.precision != "no":
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[settings.precision]
            # As Accelerate does: the weights stay in float32.
            self._forward = convert_outputs_to_fp32(torch.autocast(self.device.type, dtype)(self.model.__call__))

    def _batch(self, rows: int) -> tuple[dict[str, Any], int]:
        batch, tokens = synthetic_batch(self.family.name, self.settings, self.model.config, rows)
        moved = {name: part.to(self.device) if isinstance(part, Tensor) else part for name, part in batch.items()}
        return moved, tokens

    def run(self, rows: int, again: bool = False) -> TrialResult:
        """Passes forward and backward.

        Args:
            rows: number of examples.
            again: do it twice and tell of the second time, which finds gradients and adds to them.
        """
        batch, tokens = self._batch(rows)
        parameters = list(self.model.parameters())
        for parameter in parameters:
            parameter.grad = None
        memory = MemoryTracker(self.device, without=[*parameters, *self.model.buffers()])
        gradients: list[int] = []
        saved = 0

        def measured(hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def call(tensor: Tensor) -> Tensor:
                gradients.append(self._gradient_bytes())
                return hook(tensor)

            return call

        for part in batch.values():
            if isinstance(part, Tensor):
                memory.add(part)
        hooks = torch.autograd.graph.saved_tensors_hooks(measured(memory.save), measured(memory.load))
        count = FlopCount()
        with torch.random.fork_rng(devices=[]):
            for _ in range(2 if again else 1):
                memory.peaks.clear()
                gradients.clear()
                count.flops = 0
                # From what fills up a few examples that of many can't be told; there it is next to nothing.
                with count, memory, hooks, without_row_padding():
                    loss = self._forward(**batch).loss
                    saved = memory.saved
                    loss.backward()
                del loss
                memory.end_section()
                gradients.append(self._gradient_bytes())
        peaks = tuple(peak - held for peak, held in zip(memory.peaks, gradients, strict=True))
        return TrialResult(rows, tokens, count.flops, saved, peaks, tuple(gradients))

    def _gradient_bytes(self) -> int:
        return sum(each.grad.nbytes for each in self.model.parameters() if each.grad is not None)

    def measure_speed(self, rows: int) -> float:
        """Tokens per second of training steps on this machine, the median of some steps.

        Args:
            rows: number of examples in each part of a batch, of which the settings tell how many there are.
        """
        settings = self.settings
        batch, tokens = self._batch(rows)
        optimizer = make_optimizer(self.model, settings)
        times: list[float] = []
        began = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            while len(times) < 1 + STEPS or time.perf_counter() - began < SECONDS:
                start = time.perf_counter()
                for _ in range(settings.accumulation):
                    (self._forward(**batch).loss / settings.accumulation).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip or float("inf")).item()
                optimizer.step()
                optimizer.zero_grad()
                if self.device.type != "cpu":
                    torch.accelerator.synchronize()
                times.append(time.perf_counter() - start)
        return settings.accumulation * tokens / float(np.median(times[1:]))
