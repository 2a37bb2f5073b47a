"""The training loop of every family, on Accelerate."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, send_to_device, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..run.checkpoints import (
    Progress,
    checkpoint_of,
    is_whole,
    last_whole_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    tidy,
)
from ..run.files import write_text
from ..run.folder import json_safe, writing
from ..run.settings import TrainingSettings, to_dict
from .batch_norm import share_batch_norms
from .distributed import is_sharded, meeting, prepare, shard, shard_on_cpu, sharding_plugin, whole
from .nonfinite import Place, StepWatch, nonfinite_weights
from .objective import Examples, Objective, evaluate, make_loader
from .schedule import Budget, learning_rate_factor
from .signals import StopSignals

logger = logging.getLogger("regard.training")

CHECKPOINTS, HISTORY_FILE = "checkpoints", "history.jsonl"


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        metrics: figures of the last evaluation.
        progress: where the run ended.
        processes: how many took part.
    """

    metrics: dict[str, float]
    progress: Progress
    processes: int


def make_accelerator(settings: TrainingSettings, folder: Path) -> Accelerator:
    """Builds the accelerator of a run, with its trackers.

    Raises:
        ValueError: if the batch can't be shared out over the processes, or the device or a tracker is not there.
        ConnectionError: if the processes don't find each other.
    """
    trackers = [name for name in settings.log_with if name != "none"] or None
    plugin = sharding_plugin(settings)
    with meeting(settings):
        accelerator = Accelerator(
            # Processes on CPUs find each other only where this is said.
            cpu=not torch.accelerator.is_available(),
            mixed_precision=settings.precision,
            log_with=trackers,
            project_dir=str(folder / "logs"),
            fsdp_plugin=plugin,
        )
    if plugin is not None:
        shard_on_cpu(accelerator, plugin)
    for name in trackers or ():
        # Accelerate leaves it out, and says nothing if there are others.
        if name != "all" and name not in map(str, accelerator.log_with):
            raise ValueError(f"`log_with` ({name!r}) is a tracker that is not installed")
    shares = accelerator.num_processes * settings.accumulation
    if settings.batch_size % shares:
        raise ValueError(
            f"`batch_size` ({settings.batch_size}) must be a multiple of {shares}: "
            f"{accelerator.num_processes} processes times `accumulation` ({settings.accumulation})"
        )
    return accelerator


def steps_per_epoch(examples: Examples, batch_size: int) -> int:
    """The number of whole batches in an epoch.

    Raises:
        ValueError: if there is none.
    """
    if len(examples) < batch_size:
        raise ValueError(
            f"the data makes {len(examples)} examples, fewer than one batch (`batch_size` {batch_size}): "
            "give more data, or a smaller batch or `max_length`"
        )
    return len(examples) // batch_size


def make_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter, 2019, https://arxiv.org/abs/1711.05101); biases and norms do not decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    assert settings.learning_rate is not None  # a family's settings fill it in
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), eps=1e-6, fused=True)


class Loop:
    """One run of one task.

    Args:
        task: gives data, loss and figures.
        model: is trained in place.
        settings: of the run.
        budget: tells when it ends.
        folder: gets `checkpoints`, `logs` and `history.jsonl`.
        accelerator: what `make_accelerator` gave.
    """

    def __init__(
        self,
        task: Objective,
        model: PreTrainedModel,
        settings: TrainingSettings,
        budget: Budget,
        folder: Path,
        accelerator: Accelerator,
    ) -> None:
        self.task, self.settings, self.budget, self.accelerator = task, settings, budget, accelerator
        self.checkpoints, self.history = folder / CHECKPOINTS, folder / HISTORY_FILE
        if settings.compile:
            # Batches differ in their number of tokens, and must not be compiled for each of them.
            model.compile(dynamic=True)
        if accelerator.num_processes > 1:
            share_batch_norms(model)
        if is_sharded(accelerator):
            shard(model, accelerator)
        else:
            accelerator.register_save_state_pre_hook(_drop_tied_weights)
        self.model, self.optimizer = prepare(model, make_optimizer(model, settings), accelerator)
        self._highest_rate = self.optimizer.param_groups[0]["lr"]
        self.progress = Progress()
        self._saved_step: int | None = None
        self._signals, self._watch = StopSignals(), StepWatch()

    def run(self, resume: bool = False) -> Outcome:
        """Trains to the end of the budget, and evaluates.

        Args:
            resume: go on from the last checkpoint, if there is one.

        Raises:
            ValueError: if the data makes no whole batch, or the checkpoint won't do.
            FloatingPointError: if more steps than are allowed had a loss or gradient that is not finite.
            OSError: if a checkpoint can't be written.
            SystemExit: after SIGINT or SIGTERM, once a checkpoint is saved.
        """
        settings, accelerator = self.settings, self.accelerator
        # Dropout differs between processes; the weights, made before, do not.
        set_seed(settings.seed, device_specific=True)
        saved = last_whole_checkpoint(self.checkpoints) if resume else None
        if saved:
            self.progress = load_checkpoint(accelerator, saved)
            self._saved_step = self.progress.step
            logger.info("Going on from step %d.", self.progress.step)
        if accelerator.is_main_process:
            if saved:
                tidy(self.checkpoints, self.progress.step, settings.keep_last)
            self._keep_history_to(self.progress.step)
        accelerator.init_trackers("regard", {name: str(value) for name, value in to_dict(settings).items()})
        return Outcome(self._train(), self.progress, accelerator.num_processes)

    def _train(self) -> dict[str, float]:
        settings, progress = self.settings, self.progress
        losses: list[Tensor] = []
        metrics: dict[str, float] | None = None
        with self._bar() as bar, self._signals:
            meter = _Meter(progress.tokens)
            for batches, share in self._steps():
                metrics = None
                done = self._step(batches, share)
                if done is None:
                    self._stop()
                loss, norm = done
                losses.append(loss)
                bar.n = share
                if progress.step % settings.log_every == 0:
                    self._require_finite()
                    known = torch.stack(losses)
                    values = {
                        "loss": known[known.isfinite()].mean().item(),
                        "gradient_norm": float(norm),
                        "learning_rate": self.optimizer.param_groups[0]["lr"],
                        "tokens_per_second": meter.rate(progress.tokens),
                    }
                    losses.clear()
                    self._record("train", values)
                    rate = f"{values['tokens_per_second']:,.0f} tokens/s"
                    bar.set_postfix_str(f"step {progress.step}, loss {values['loss']:.3f}, {rate}")
                if settings.evaluate_every and progress.step % settings.evaluate_every == 0:
                    metrics = self.evaluate()
                    meter = _Meter(progress.tokens)
                # Last, so that a resumed run does not lack what was recorded at this step.
                is_best = metrics is not None and progress.best_step == progress.step
                if is_best or (settings.save_every and progress.step % settings.save_every == 0):
                    self._save()
                    meter = _Meter(progress.tokens)
            bar.n = 1
            if self._sum(self._signals.received or 0):
                self._stop()
        self._require_finite_weights()
        metrics = metrics or self.evaluate()
        return self._load_best() or metrics

    def _save(self) -> None:
        """Saves a checkpoint, unless there is one of this step."""
        if self._saved_step != self.progress.step:
            self._require_finite_weights()
            save_checkpoint(self.accelerator, self.checkpoints, self.progress, self.settings.keep_last)
            self._saved_step = self.progress.step

    def _stop(self) -> NoReturn:
        """Ends the run as a signal to one of the processes asked for."""
        self._save()
        number = self._signals.received or signal.SIGTERM
        if self.accelerator.is_main_process:
            logger.warning(
                "Stopped by %s after step %d, whose checkpoint is saved: the same command with --resume goes on.",
                *(signal.Signals(number).name, self.progress.step),
            )
        raise SystemExit(128 + number)

    def _sum(self, number: int) -> int:
        """The sum of each process's number."""
        if self.accelerator.num_processes == 1:
            return number
        return int(self.accelerator.reduce(torch.tensor([number], device=self.accelerator.device))[0])

    def _require_finite(self) -> None:
        """Records the steps that were skipped since the last look.

        Raises:
            FloatingPointError: if they are more than may be skipped.
        """
        for place in self._watch.look():
            self.progress.skipped_steps += 1
            number, allowed = self.progress.skipped_steps, self.settings.skip_nonfinite
            if number > allowed:
                more = f"the {number} such steps are more than `skip_nonfinite` ({allowed}); " if allowed else ""
                raise FloatingPointError(
                    f"the loss or its gradient was not finite at {place}: {more}{self._last_good()}. A lower "
                    "`learning_rate` may help, or `skip_nonfinite`, which lets so many such steps be left out"
                )
            self._write_history("skipped", place._asdict())
            if self.accelerator.is_main_process:
                logger.warning("The loss or its gradient was not finite at %s, which changed no weights.", place)

    def _require_finite_weights(self) -> None:
        self._require_finite()
        if self._sum(int(nonfinite_weights(self.model))):
            raise FloatingPointError(
                f"the weights are not finite after step {self.progress.step}: {self._last_good()}. A lower "
                "`learning_rate` may help"
            )

    def _last_good(self) -> str:
        found = list_checkpoints(self.checkpoints)
        return f"the last checkpoint is {found[-1]}" if found else "there is no checkpoint"

    def _load_best(self) -> dict[str, float] | None:
        """Loads the model of the best evaluation, if that is to be kept and was not the last; gives its figures."""
        progress, best = self.progress, self.progress.best_step
        if not self.settings.keep_best or best in (None, progress.step):
            return None
        checkpoint = checkpoint_of(self.checkpoints, best)
        if not (checkpoint.is_dir() and is_whole(checkpoint)):
            logger.warning("There is no whole checkpoint of step %d, the best: the model is the last one.", best)
            progress.best_step = progress.best_loss = None
            return None
        load_checkpoint(self.accelerator, checkpoint)
        logger.info("The best evaluation was that at step %d, and the model is the one of that step.", best)
        return evaluate(self.task, self.model, self.settings, self.accelerator)

    def _steps(self) -> Iterator[tuple[list[dict[str, Tensor]], float]]:
        """This process's parts of each batch still to come, and the share of the run that is done before it."""
        settings, progress = self.settings, self.progress
        started = time.monotonic() - progress.seconds
        while True:
            examples = self.task.epoch(progress.epoch)
            steps = steps_per_epoch(examples, settings.batch_size)
            parts = iter(self._loader(examples, progress.step_in_epoch, steps, settings.workers))
            for step in range(progress.step_in_epoch, steps):
                progress.seconds = time.monotonic() - started
                share = self._same_on_all_ranks(
                    self.budget.progress(progress.step, progress.epoch + step / steps, progress.seconds)
                )
                if share >= 1:
                    return
                try:
                    batches = [next(parts) for _ in range(settings.accumulation)]
                except Exception:
                    if not self._signals.received:
                        raise
                    # The signal has ended the processes that prepare batches too: torch says so, or what was being
                    # read from one breaks off. Other errors come again.
                    parts = iter(self._loader(examples, step, steps, workers=0))
                    batches = [next(parts) for _ in range(settings.accumulation)]
                yield batches, share
            progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0

    def _same_on_all_ranks(self, share: float) -> float:
        # Clocks differ between processes, and all must stop at the same step.
        if self.budget.minutes is None or self.accelerator.num_processes == 1:
            return share
        return float(broadcast(torch.tensor([share], device=self.accelerator.device))[0])

    def _loader(self, examples: Examples, first_step: int, steps: int, workers: int) -> DataLoader:
        """Loads this process's parts of the batches. The global batch is the same however many processes share it."""
        settings, accelerator = self.settings, self.accelerator
        part = settings.batch_size // (accelerator.num_processes * settings.accumulation)
        begin = accelerator.process_index * part
        stride = accelerator.num_processes * part
        starts = range(first_step * settings.batch_size + begin, steps * settings.batch_size, stride)
        batches = [range(start, start + part) for start in starts]
        return make_loader(self.task, examples, batches, workers, accelerator)

    def _step(self, batches: list[dict[str, Tensor]], share: float) -> tuple[Tensor, Tensor | float] | None:
        """One optimizer step: its loss over the global batch, and the norm of its gradient.

        Returns:
            None, with nothing done, if a process was asked to end.
        """
        settings, accelerator, progress = self.settings, self.accelerator, self.progress
        stop, tokens, counts = self._count(batches)
        if stop:
            return None
        factor = learning_rate_factor(share, settings.warmup, settings.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = self._highest_rate * factor
        loss = torch.zeros((), device=accelerator.device)
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                batch = send_to_device(batch, accelerator.device, non_blocking=True)
                part = self.task.forward(self.model, batch, **counts).loss
                # Distributed training averages the gradients; the parts of a mean must be added.
                accelerator.backward(part * accelerator.num_processes)
                loss += part.detach()
        norm = whole(accelerator.clip_grad_norm_(self.model.parameters(), settings.clip or float("inf")))
        loss = accelerator.reduce(loss)
        skipped = ~loss.isfinite()
        if accelerator.scaler is None:
            skipped = skipped | ~torch.as_tensor(norm, device=loss.device).isfinite()
            # So AdamW leaves the weights and its own state as they are. A gradient scaler does this by itself, and an
            # overflow of its gradient is nothing amiss.
            if self.optimizer.defaults["fused"]:
                self.optimizer.optimizer.found_inf = skipped.float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        first = progress.step_in_epoch * settings.batch_size
        progress.step += 1
        progress.step_in_epoch += 1
        progress.tokens += tokens
        place = Place(progress.step, progress.epoch, first, first + settings.batch_size - 1)
        self._watch.note(place, skipped)
        return loss, norm

    def _count(self, batches: list[dict[str, Tensor]]) -> tuple[bool, int, dict[str, Tensor]]:
        """Whether a process is to stop; tokens, and the items of each loss, in the global batch."""
        each = [{"tokens": self.task.tokens(batch), **self.task.counts(batch)} for batch in batches]
        names = list(each[0])
        totals = torch.tensor([self._signals.received or 0, *(sum(counts[name] for counts in each) for name in names)])
        if self.accelerator.num_processes > 1:
            totals = self.accelerator.reduce(totals.to(self.accelerator.device))
        counts = dict(zip(names, totals[1:], strict=True))
        return bool(totals[0]), int(counts.pop("tokens")), counts

    def evaluate(self) -> dict[str, float]:
        """The task's figures on the held-out examples, which are recorded and logged."""
        self._require_finite()
        try:
            metrics = evaluate(self.task, self.model, self.settings, self.accelerator)
        except Exception:
            if not self._signals.received:
                raise
            # As in `_steps`.
            metrics = evaluate(self.task, self.model, replace(self.settings, workers=0), self.accelerator)
        self._record("evaluation", metrics)
        figures = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())
        logger.info("Step %d: %s", self.progress.step, figures)
        loss, best = metrics[self.task.loss_name], self.progress.best_loss
        if not math.isfinite(loss):
            if self.accelerator.is_main_process:
                logger.warning("The held-out loss at step %d is not finite.", self.progress.step)
        elif self.settings.keep_best and (best is None or loss < best):
            self.progress.best_step, self.progress.best_loss = self.progress.step, loss
        return metrics

    def _record(self, kind: str, values: dict[str, float]) -> None:
        self.accelerator.log({f"{kind}/{name}": value for name, value in values.items()}, step=self.progress.step)
        self._write_history(kind, {"step": self.progress.step, **values})

    def _write_history(self, kind: str, values: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            record = json_safe({"step": values["step"], "kind": kind, **values})
            with writing(f"a line of {HISTORY_FILE}", self.history.parent), self.history.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def _keep_history_to(self, step: int) -> None:
        """Drops what was recorded after the checkpoint that the run goes on from, and a line that was torn."""
        kept = []
        text = self.history.read_text(encoding="utf-8", errors="replace") if self.history.exists() else ""
        for line in text.splitlines():
            # Whatever else stands there is no record.
            with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
                if json.loads(line)["step"] <= step:
                    kept.append(line)
        with writing(HISTORY_FILE, self.history.parent):
            write_text(self.history, "".join(line + "\n" for line in kept))

    def _bar(self) -> tqdm:
        """A bar of the share done, with the time left; none where no one watches."""
        return tqdm(
            total=1,
            disable=None if self.accelerator.is_main_process else True,
            bar_format="{percentage:3.0f}% {bar} {elapsed} < {remaining} {postfix}",
        )


def _drop_tied_weights(models: list[PreTrainedModel], weights: list[dict[str, Tensor]], folder: str) -> None:
    # Safetensors holds each tensor once. Accelerate would drop them too, but warns of it at each checkpoint.
    for model, state in zip(models, weights, strict=True):
        for name in model.all_tied_weights_keys:
            state.pop(name, None)


class _Meter:
    """Tokens per second since it was made or last read."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._time = tokens, time.monotonic()

    def rate(self, tokens: int) -> float:
        now = time.monotonic()
        rate = (tokens - self._tokens) / max(now - self._time, 1e-9)
        self._tokens, self._time = tokens, now
        return rate
