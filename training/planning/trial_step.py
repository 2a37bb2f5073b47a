"""Trial steps of a training run on synthetic data: their operations, memory and time."""

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
from ..families.base import Recipe
from ..loop.loop import make_optimizer
from ..run.settings import TrainingSettings
from .flops import FlopCount
from .memory_tracker import MemoryTracker

# The least duration of a measurement of the speed, in seconds and in steps after a first one that is not counted.
SECONDS, STEPS = 5.0, 3


@dataclass(frozen=True)
class TrialResult:
    """The measurements of a forward and backward pass, without the weights and the optimizer's state.

    Attributes:
        rows: number of examples.
        tokens: number of tokens in them.
        flops: floating point operations; a multiplication and an addition are two.
        saved: bytes that are kept for the backward pass when it begins.
        peaks: largest number of bytes in each section of the pass, without gradients. The number of sections does not
            depend on the number of examples.
        gradients: bytes of the gradients that exist in each section.
    """

    rows: int
    tokens: int
    flops: int
    saved: int
    peaks: tuple[int, ...]
    gradients: tuple[int, ...]


class TrialStep:
    """Runs steps of a model's training on the device that it would be trained on here.

    Args:
        recipe: recipe of the model's family.
        settings: settings of the run.
        processor: tokenizer or processor of the model; None if it does not exist yet.

    Raises:
        ValueError: if sizes do not fit together, or the device does not support the precision.
    """

    def __init__(self, recipe: Recipe, settings: TrainingSettings, processor: Any = None) -> None:
        self.recipe, self.settings = recipe, settings
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.device = accelerator or torch.device("cpu")
        if settings.precision == "fp16" and self.device.type == "cpu":
            raise ValueError("`precision` ('fp16') needs an accelerator, which this machine lacks: take 'bf16'")
        # The weights are random too, and must not advance the caller's generator.
        with torch.random.fork_rng(devices=[]):
            model: Any = recipe.make_model(settings, processor)
            self.model: PreTrainedModel = model.to(self.device).train()
        self._forward: Any = self.model
        if settings.precision != "no":
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[settings.precision]
            # Mixed precision as in Accelerate: the weights stay in float32.
            self._forward = convert_outputs_to_fp32(torch.autocast(self.device.type, dtype)(self.model.__call__))

    def _batch(self, rows: int) -> tuple[dict[str, Any], int]:
        batch, tokens = self.recipe.synthetic_batch(self.settings, self.model.config, rows)
        moved = {name: part.to(self.device) if isinstance(part, Tensor) else part for name, part in batch.items()}
        return moved, tokens

    def run(self, rows: int, again: bool = False) -> TrialResult:
        """Runs a forward and a backward pass.

        Args:
            rows: number of examples.
            again: run a second pass, which adds to the gradients of the first, and measure that one.
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
                # Packing pads the tokens to a multiple, which adds much to few examples and little to many: costs with
                # padding can't be extrapolated.
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
        """Measures the tokens per second of training on this machine, the median over some steps.

        Args:
            rows: number of examples in each of the parts into which `accumulation` splits a batch.
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
