"""What a fine-tuning run can set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec

from ...configuration.seeds import require_seed
from ..run.settings import held_out_share, option, to_dict

# Texts are cut here if nothing is said, whatever the model could take.
USUAL_LENGTH = 512


@dataclass
class FinetuneSettings:
    """What a fine-tuning run can set."""

    model: str = option("runs/bert", "The model to start from: folder of a run or a model, or a Hub id.")
    data: list[str] = option([], "Tables (csv, tsv, jsonl, parquet) or data sets of the Hub; several are joined.")
    split: str = option("train", "The split of a Hub data set to train on.")
    validation: str = option("0.1", "Held-out data: a share of the rows, or another source like --data.")
    validation_split: str = option("validation", "The split of a Hub data set that --validation names.")
    text_column: str = option("text", "Column of the text; for multiple choice, of what the choices go on from.")
    second_text_column: str | None = option(
        None, "Column of the second text of a pair; for multiple choice, of what all choices begin with."
    )
    label_column: str = option("label", "Column of the class, number, list of labels, or number of the right choice.")
    tokens_column: str = option("tokens", "Column of a text's words.")
    tags_column: str = option("tags", "Column of the words' tags.")
    question_column: str = option("question", "Column of the question.")
    context_column: str = option("context", "Column of the text that holds the answer.")
    answers_column: str = option("answers", "Column of the answers, as SQuAD has them: text and answer_start.")
    choices_column: list[str] = option(["choices"], "Column with a list of choices, or a column for each choice.")
    max_length: int | None = option(None, f"Longest text in tokens; the model's, or {USUAL_LENGTH}, if not given.")
    stride: int | None = option(
        None, "Tokens that a window of a long context shares with the one before; a third of them if not given."
    )
    max_answer_length: int = option(30, "Longest answer, in tokens.")
    epochs: float = option(3.0, "Passes over the data.")
    batch_size: int = option(32, "Examples per step, over all processes and accumulation.")
    accumulation: int = option(1, "Parts in which each process computes its share of a batch, to save memory.")
    learning_rate: float | None = option(None, "Highest learning rate; 5e-5, or with LoRA 5e-4, if not given.")
    warmup: float = option(0.1, "Share of the training in which the learning rate rises.")
    weight_decay: float = option(0.01, "Decoupled weight decay, on matrices alone.")
    patience: int = option(2, "Stop after so many epochs that are no better than the best; 0 never stops early.")
    metric: str | None = option(None, "What tells the best model: a metric of the task, or 'loss'.")
    precision: str = option("no", "Mixed precision: 'no' (float32), 'bf16' or 'fp16'.")
    seed: int = option(0, "Seeds new weights, data and dropout.")
    lora: int = option(0, "Rank of LoRA's matrices, which alone are trained; 0 trains the whole model. Needs peft.")
    lora_targets: list[str] = option([], "Modules that LoRA adapts, by the ends of their names; PEFT's if not given.")
    log_every: int = option(10, "Steps between logged values.")
    log_with: list[str] = option(["tensorboard"], "Trackers to log to, as Trainer names them; 'none' for none.")

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Checks what can be told before anything is read.

        Raises:
            ValueError: naming the setting, what it got and what is allowed.
        """
        for name, value in to_dict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"`{name}` ({value}) must be a finite number")
        for name in ("epochs", "learning_rate"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"`{name}` ({getattr(self, name)}) must be more than 0")
        for name in ("batch_size", "accumulation", "log_every", "max_answer_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` ({getattr(self, name)}) must be at least 1")
        for name in ("stride", "weight_decay", "patience", "lora"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ValueError(f"`{name}` ({getattr(self, name)}) must be at least 0")
        require_seed(self.seed)
        if not 0 <= self.warmup < 1:
            raise ValueError(f"`warmup` ({self.warmup}) must be at least 0 and less than 1")
        if self.precision not in ("no", "bf16", "fp16"):
            raise ValueError(f"`precision` ({self.precision!r}) must be one of no, bf16, fp16")
        if not self.choices_column:
            raise ValueError("`choices_column` names no column")
        if self.lora_targets and not self.lora:
            raise ValueError(f"`lora_targets` ({', '.join(self.lora_targets)}) needs `lora`, the rank of the matrices")
        if self.lora and find_spec("peft") is None:
            raise ValueError(f"`lora` ({self.lora}) needs the package peft: pip install peft")
        held_out_share(self.validation)
