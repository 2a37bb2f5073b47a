"""The settings of a fine-tuning run."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from ..run.settings import RunSettings, option

# Texts are cut to this many tokens by default, even if the model could take longer ones.
USUAL_LENGTH = 512

_TEXT = ("text_column", "second_text_column", "label_column")
# Each task, and the settings that it has and some other task lacks.
TASK_SETTINGS: dict[str, tuple[str, ...]] = {
    "classification": _TEXT,
    "regression": _TEXT,
    "multi-label": _TEXT,
    "tokens": ("tokens_column", "tags_column"),
    "question-answering": ("question_column", "context_column", "answers_column", "stride", "max_answer_length"),
    "multiple-choice": ("text_column", "second_text_column", "choices_column", "label_column"),
}


@dataclass
class FinetuneSettings(RunSettings):
    """The settings of fine-tuning, of which each task uses its own and those of all tasks."""

    model: str = option("runs/bert", "Model to start from: the folder of a run or a model, or a Hub id.")
    data: list[str] = option([], "Tables (csv, tsv, jsonl, parquet) or data sets of the Hub; several are joined.")
    validation: str = option("0.1", "Held-out data: a share of the rows, or another source like --data.")
    validation_split: str = option("validation", "The split of a Hub data set that --validation names.")
    text_column: str = option("text", "Column of the text; for multiple choice, of what the choices continue.")
    second_text_column: str | None = option(
        None, "Column of the second text of a pair; for multiple choice, of the beginning that all choices share."
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
        None,
        "Tokens that a window of a long context shares with the one before; a third of its tokens if not given.",
        least=0,
    )
    max_answer_length: int = option(30, "Longest answer, in tokens.", least=1)
    epochs: float = option(3.0, "Passes over the data.", above=0)
    learning_rate: float | None = option(
        None, "Highest learning rate; 5e-5, or with LoRA 5e-4, if not given.", above=0
    )
    warmup: float = option(0.1, "Share of the training in which the learning rate rises.", least=0, below=1)
    patience: int = option(
        2, "Stop after this many epochs that are no better than the best; 0 never stops early.", least=0
    )
    metric: str | None = option(None, "Metric that chooses the best model: one of the task's, or 'loss'.")
    lora: int = option(
        0, "Rank of LoRA's matrices, which alone are trained; 0 trains the whole model. Needs peft.", least=0
    )
    lora_targets: list[str] = option(
        [], "Modules that LoRA adapts, by the ends of their names; PEFT's defaults if not given."
    )
    log_with: list[str] = option(["tensorboard"], "Trackers to log to, as Trainer names them; 'none' for none.")

    def check(self) -> None:
        super().check()
        if not self.choices_column:
            raise ValueError("`choices_column` names no column")
        if self.lora_targets and not self.lora:
            raise ValueError(f"`lora_targets` ({', '.join(self.lora_targets)}) needs `lora`, the rank of the matrices")
        if self.lora and find_spec("peft") is None:
            raise ValueError(f"`lora` ({self.lora}) needs the package peft: pip install peft")


def belongs_to_some_tasks(setting: str) -> bool:
    """Returns whether only some tasks have a setting, namely those that `TASK_SETTINGS` names it for."""
    return any(setting in names for names in TASK_SETTINGS.values())
