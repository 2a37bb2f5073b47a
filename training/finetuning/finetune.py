"""Fine-tuning a model for a task with `transformers.Trainer`.

Any model that transformers loads for the task can be fine-tuned, ours or another. With `lora`, only a few small
matrices beside the frozen model are trained, and the layers that the checkpoint lacks (Hu et al., 2022,
https://arxiv.org/abs/2106.09685). In our BERT, `lora_targets` can name `query_key_value` (queries, keys and values in
one matrix) and `output` of the attention, and `up` and `down` of the feed-forward layers; a stock BERT has `query`,
`key`, `value` and `dense`.

The folder of a run:

settings.yaml           the settings
checkpoints/            the whole state of the run after the last epoch and after the best
logs/                   losses and metrics for TensorBoard
results.json            the results, once the run has ended
predictions.jsonl       the held-out rows with the model's predictions
confusion_matrix.csv    of classes: how often each label (row) got each prediction (column)
confusion_matrix.png    the same as a picture
adapter/                with LoRA: the trained weights, for PEFT
model/                  the best model and its tokenizer, for transformers; with LoRA, the merged model
"""

from __future__ import annotations

import inspect
import logging
import math
import signal
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import reduce
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import TensorBoardCallback

from ...modeling.loading.load import (
    MODEL,
    POOLER,
    load_model_and_drawn,
    load_part,
    model_path,
    naming_the_model,
    require_weights,
)
from ...tokenization.generative import save_tokenizer
from ..families.tokenizers import require_special_tokens
from ..loop.signals import StopSignals
from ..reading.typed_rows import load_table
from ..run.files import PARTIAL, delete_leftovers, rename_in
from ..run.folder import load_results, open_run, save_results, save_settings, writing
from ..run.settings import held_out_share, to_dict
from .checkpoints import last_checkpoint
from .lora import add_adapter
from .multiple_choice import MultipleChoice
from .question_answering import QuestionAnswering
from .results import best_of, figures_of, make_results, save_predictions
from .sequence_tasks import Classification, MultiLabel, Regression
from .settings import USUAL_LENGTH, FinetuneSettings
from .task import ERRORS, FinetuneTask
from .token_classification import TokenClassification

logger = logging.getLogger("regard.training")

TASKS: dict[str, type[FinetuneTask]] = {
    task.name: task
    for task in (Classification, Regression, MultiLabel, TokenClassification, QuestionAnswering, MultipleChoice)
}
CHECKPOINTS, LOGS, ADAPTER = "checkpoints", "logs", "adapter"


def finetune(
    task: str, output: str | Path, settings: dict[str, Any] | None = None, *, resume: bool = False
) -> dict[str, Any]:
    """Fine-tunes a model, in as many processes as are launched.

    Args:
        task: one of `TASKS`.
        output: folder of the run.
        settings: fields of `FinetuneSettings` by name.
        resume: whether to go on with the run in `output`, or start it if the folder holds none.

    Returns:
        The results of the run, as in `results.json`; they include the metrics of the best model.

    Raises:
        ValueError: if the settings, data, model or folder cannot be used. Nothing is written before all are checked.
        SystemExit: after SIGINT or SIGTERM, once a checkpoint is saved.
    """
    if task not in TASKS:
        raise ValueError(f"`task` ({task!r}) must be one of {', '.join(TASKS)}")
    folder, run_name = Path(output), f"finetune {task}"
    chosen = open_run(folder, FinetuneSettings, run_name, settings or {}, resume)
    finished = load_results(folder)
    if finished is not None:
        logger.info("The run in %s has already ended.", folder)
        return finished
    work = TASKS[task](chosen)
    # Several processes on CPUs must be told so to find each other.
    state = PartialState(cpu=not torch.accelerator.is_available())
    share = _share_of_batch(chosen, state)
    path = model_path(chosen.model)
    config = _load(AutoConfig, chosen.model, path)
    tokenizer = _load_tokenizer(chosen.model, path)
    max_length = _max_length(chosen, tokenizer, config)
    with state.main_process_first():
        columns = work.columns()
        table, held_out = load_table(chosen.data, columns, chosen.split), None
        if held_out_share(chosen.validation) is None:
            held_out = load_table([chosen.validation], columns, chosen.validation_split, "validation")
    encoded, encoded_held_out = work.prepare(tokenizer, max_length, table, held_out)
    arguments = _arguments(chosen, work, folder, share)
    set_seed(chosen.seed)
    model = _load_model(chosen, work, path)
    _require_room(chosen.model, model, tokenizer, max_length)
    try:
        trainer = _FinetuneTrainer(
            model,
            arguments,
            data_collator=work.collator(),
            train_dataset=encoded,
            eval_dataset=encoded_held_out,
            processing_class=tokenizer,
            compute_metrics=work.metrics,
            callbacks=_callbacks(chosen, folder),
        )
    except RuntimeError as error:
        raise ValueError(f"`log_with` ({', '.join(chosen.log_with)}): {error}") from None
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(_Progress)
    if trainer.is_world_process_zero():
        save_settings(folder, run_name, chosen)
    start = time.monotonic()
    with StopSignals() as signals:
        trainer.add_callback(_Stop(signals))
        trainer.train(resume_from_checkpoint=last_checkpoint(folder / CHECKPOINTS) if resume else None)
    logger.info("%s", best_of(trainer, chosen.patience))
    outcome = trainer.predict(encoded_held_out, metric_key_prefix="eval")
    if not math.isfinite((outcome.metrics or {})["eval_loss"]):
        logger.warning("The held-out loss is not a number: the training has diverged; try a lower `learning_rate`.")
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.is_world_process_zero():
        trained = _save_model(folder, trained, tokenizer, merge=bool(chosen.lora))
        save_predictions(folder, work, outcome.predictions)
        results = make_results(
            work, to_dict(chosen), trained, trainer, outcome.metrics or {}, time.monotonic() - start
        )
        save_results(folder, results)
    trainer.accelerator.wait_for_everyone()
    return load_results(folder) or {}


# Settings


def _share_of_batch(settings: FinetuneSettings, state: PartialState) -> int:
    """Returns the number of examples that a device takes at once."""
    devices = state.num_processes if state.num_processes > 1 else max(1, torch.cuda.device_count())
    parts = devices * settings.accumulation
    if settings.batch_size % parts:
        raise ValueError(
            f"`batch_size` ({settings.batch_size}) must be a multiple of {parts}, "
            f"`accumulation` ({settings.accumulation}) times the number of devices ({devices})"
        )
    return settings.batch_size // parts


def _arguments(settings: FinetuneSettings, task: FinetuneTask, folder: Path, share: int) -> TrainingArguments:
    metric = settings.metric or task.best_by
    if metric not in ("loss", *task.measured):
        raise ValueError(f"`metric` ({metric!r}) must be one of {', '.join((*task.measured, 'loss'))}")
    rate = settings.learning_rate or (5e-4 if settings.lora else 5e-5)
    # TensorBoard has a callback of its own, so that it writes to the same folder as in other runs.
    trackers = [name for name in settings.log_with if name not in ("none", "tensorboard")]
    return TrainingArguments(
        output_dir=str(folder / CHECKPOINTS),
        per_device_train_batch_size=share,
        per_device_eval_batch_size=share,
        gradient_accumulation_steps=settings.accumulation,
        num_train_epochs=settings.epochs,
        learning_rate=rate,
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        seed=settings.seed,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
        greater_is_better=metric not in ERRORS,
        restore_callback_states_from_checkpoint=True,
        label_names=list(task.label_inputs),
        logging_steps=settings.log_every,
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
        report_to=trackers or "none",
        disable_tqdm=False,
    )


def _callbacks(settings: FinetuneSettings, folder: Path) -> list[Any]:
    callbacks: list[Any] = []
    if settings.patience:
        callbacks.append(EarlyStoppingCallback(settings.patience))
    if "tensorboard" in settings.log_with:
        tensorboard = TensorBoardCallback()
        tensorboard.logging_dir = str(folder / LOGS)
        callbacks.append(tensorboard)
    return callbacks


# The model and its tokenizer


def _load(auto_class: Any, model: str, path: str, **options: Any) -> Any:
    with naming_the_model("model", model, path):
        return load_part(auto_class, path, f"`model` ({model})", **options)


def _load_tokenizer(model: str, path: str) -> PreTrainedTokenizerFast:
    tokenizer = _load(AutoTokenizer, model, path)
    if getattr(tokenizer, "add_prefix_space", None) is False:
        # Without a space before it, a word by itself would be encoded as the inside of one.
        tokenizer = _load(AutoTokenizer, model, path, add_prefix_space=True)
    return require_special_tokens(tokenizer, ("pad",), f"`model` ({model})")


def _max_length(settings: FinetuneSettings, tokenizer: PreTrainedTokenizerFast, config: Any) -> int:
    positions = getattr(config, "max_position_embeddings", None)
    limit = min(tokenizer.model_max_length, positions or tokenizer.model_max_length)
    if settings.max_length is None:
        return min(limit, USUAL_LENGTH)
    least = tokenizer.num_special_tokens_to_add(pair=True) + 2
    if not least <= settings.max_length <= limit:
        raise ValueError(f"`max_length` ({settings.max_length}) must be at least {least} and at most {limit}")
    return settings.max_length


def _load_model(settings: FinetuneSettings, task: FinetuneTask, path: str) -> Any:
    label = f"`model` ({settings.model})"
    try:
        with naming_the_model("model", settings.model, path):
            model, new = load_model_and_drawn(
                getattr(transformers, task.auto_class),
                path,
                label,
                # In the precision of the checkpoint, small steps would be lost.
                dtype=torch.float32,
                **task.config_fields(),
            )
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        kind = load_part(AutoConfig, path, label).model_type
        raise ValueError(
            f"`model` ({settings.model}) is a {kind!r}, which {task.auto_class} does not support"
        ) from None
    # The layer for the labels is new, as one for other labels would be of no use; the layers below must be there.
    own = f"{model.base_model_prefix}."
    require_weights((name for name in new if name.startswith(own) and not POOLER.search(name)), label)
    if settings.lora:
        return add_adapter(settings, model, {name.rpartition(".")[0] for name in new})
    return model


def _require_room(name: str, model: Any, tokenizer: PreTrainedTokenizerFast, max_length: int) -> None:
    """Raises a ValueError if the model lacks embeddings for ids or positions, before it fails on a batch."""
    largest, number = max(tokenizer.get_vocab().values()), model.get_input_embeddings().num_embeddings
    if largest >= number:
        raise ValueError(
            f"`model` ({name}) has a tokenizer with ids up to {largest}, but vectors for {number} tokens: "
            f"call its `resize_token_embeddings({largest + 1})` and save it"
        )
    for place, module in model.named_modules():
        if place.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            # As in RoBERTa, whose positions begin after the index of the padding.
            room = module.num_embeddings - module.padding_idx - 1
            if max_length > room:
                raise ValueError(f"`max_length` ({max_length}) must be at most {room}, the positions of {name}")


class _FinetuneTrainer(Trainer):
    """A Trainer that accumulates gradients exactly, whether or not the model takes `num_items_in_batch`.

    A model that does not take it returns the mean loss over the labels of one part of a batch. This mean is weighted
    by the part's share of the labels, so that the parts add up to the loss of the whole batch.
    """

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._counts_itself = "num_items_in_batch" in inspect.signature(inner.forward).parameters
        self.model_accepts_loss_kwargs = True

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if self._counts_itself or num_items_in_batch is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss * (inputs["labels"] != -100).sum() / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class _Progress(ProgressCallback):
    """The progress bar of Trainer; the metrics of evaluations go to the log instead."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        figures = figures_of(logs or {})
        if state.is_world_process_zero and figures:
            shown = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())
            logger.info("Epoch %.3g: %s", state.epoch or 0, shown)


class _Stop(TrainerCallback):
    """Saves a checkpoint and exits once a signal has asked one of the processes to end."""

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals
        self._is_asked = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        received = self._signals.received or 0
        if args.world_size > 1:
            received = int(reduce(torch.tensor([received], device=args.device), "sum"))
        self._is_asked = received > 0
        # After the last step of an epoch, a checkpoint is saved anyway, and must not be saved before the evaluation.
        is_last = float(state.epoch or 0).is_integer() or control.should_training_stop
        control.should_save = control.should_save or (self._is_asked and not is_last)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._is_asked or control.should_training_stop:
            return
        PartialState().wait_for_everyone()
        number = self._signals.received or signal.SIGTERM
        if state.is_world_process_zero:
            logger.warning(
                "Stopped by %s after step %d, whose checkpoint is saved: the same command with --resume goes on.",
                *(signal.Signals(number).name, state.global_step),
            )
        raise SystemExit(128 + number)


# Saving


def _save_model(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast, merge: bool) -> PreTrainedModel:
    # The tokenizer still has the padding and truncation of its last use.
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    partial = folder / f"{PARTIAL}{MODEL}"
    with writing("the trained model", folder):
        if merge:
            model.save_pretrained(folder / ADAPTER)
            model = model.merge_and_unload()
        delete_leftovers(folder, PARTIAL, MODEL)
        model.save_pretrained(partial)
        save_tokenizer(tokenizer, partial)
        rename_in(partial, folder / MODEL)
    return model
