"""The training loop of every family, on Accelerate."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..run.checkpoints import Progress
from ..run.settings import TrainingSettings
from .all_ranks import all_reduce_sum, same_on_all_ranks
from .batch_norm import share_batch_norms
from .nonfinite import Place, StepWatch, nonfinite_weights
from .objective import Epoch, Objective, evaluate, make_loader
from .run_keeper import Keeper
from .schedule import Budget, learning_rate_factor
from .sharding import full_tensor, is_sharded, prepare, shard
from .signals import StopSignals

logger = logging.getLogger("regard.training")


@dataclass
class Outcome:
    """The result of a training loop.

    Attributes:
        metrics: metrics of the final model on the held-out examples.
        progress: how far the run came.
        processes: number of processes that took part.
    """

    metrics: dict[str, float]
    progress: Progress
    processes: int


def steps_per_epoch(examples: Epoch, batch_size: int) -> int:
    """The number of whole batches in an epoch.

    Raises:
        ValueError: if the epoch has less than one batch.
    """
    if len(examples) < batch_size:
        raise ValueError(
            f"the data makes {len(examples)} examples, fewer than one batch (`batch_size` {batch_size}): "
            "give more data, or a smaller batch or `max_length`"
        )
    return len(examples) // batch_size


def make_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Makes AdamW (Loshchilov & Hutter, 2019, https://arxiv.org/abs/1711.05101); biases and norms do not decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    assert settings.learning_rate is not None  # a family's settings fill it in
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), eps=1e-6, fused=True)


class Loop:
    """Trains a model on an objective: takes steps, evaluates, logs and saves until the budget is spent.

    Args:
        objective: has the data, the loss and the metrics.
        model: the model, which is trained in place.
        settings: settings of the run.
        budget: length of the run.
        folder: folder of the run, which gets `checkpoints`, `logs` and `history.jsonl`.
        accelerator: result of `make_accelerator`.
    """

    def __init__(
        self,
        objective: Objective,
        model: PreTrainedModel,
        settings: TrainingSettings,
        budget: Budget,
        folder: Path,
        accelerator: Accelerator,
    ) -> None:
        self.objective, self.settings, self.budget, self.accelerator = objective, settings, budget, accelerator
        if settings.compile:
            # Batches differ in their number of tokens, and must not be compiled for each number.
            model.compile(dynamic=True)
        if accelerator.num_processes > 1:
            share_batch_norms(model)
        if is_sharded(accelerator):
            shard(model, accelerator)
        self.keeper = Keeper(folder, settings, accelerator)
        self.model, self.optimizer = prepare(model, make_optimizer(model, settings), accelerator)
        self._highest_rate = self.optimizer.param_groups[0]["lr"]
        self._signals, self._watch = StopSignals(), StepWatch()

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self.keeper.progress

    def run(self, resume: bool = False) -> Outcome:
        """Trains to the end of the budget, and evaluates.

        Args:
            resume: whether to go on from the last checkpoint, if there is one.

        Raises:
            ValueError: if the data makes no whole batch, or the checkpoint does not fit the model.
            FloatingPointError: if more steps than allowed had a loss or gradient that is not finite.
            OSError: if a checkpoint can't be written.
            SystemExit: after SIGINT or SIGTERM, once a checkpoint is saved.
        """
        # Dropout differs between processes; the weights, made before, do not.
        set_seed(self.settings.seed, device_specific=True)
        self.keeper.start(resume)
        return Outcome(self._train(), self.progress, self.accelerator.num_processes)

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
                    self._log(losses, norm, meter, bar)
                    losses.clear()
                if settings.evaluate_every and progress.step % settings.evaluate_every == 0:
                    metrics = self.evaluate()
                    meter = _Meter(progress.tokens)
                # Last, so that the checkpoint's history includes all records of this step.
                is_best = metrics is not None and progress.best_step == progress.step
                if is_best or (settings.save_every and progress.step % settings.save_every == 0):
                    self._save()
                    meter = _Meter(progress.tokens)
            bar.n = 1
            if self._signal_received():
                self._stop()
        self._require_finite_weights()
        metrics = metrics or self.evaluate()
        if self.keeper.load_best():
            return evaluate(self.objective, self.model, settings, self.accelerator)
        return metrics

    # Steps

    def _steps(self) -> Iterator[tuple[list[dict[str, Tensor]], float]]:
        """Yields this process's parts of each batch to come, and the share of the run that is done before it."""
        settings, progress = self.settings, self.progress
        started = time.monotonic() - progress.seconds
        while True:
            examples = self.objective.epoch(progress.epoch)
            steps = steps_per_epoch(examples, settings.batch_size)
            parts = iter(self._loader(examples, progress.step_in_epoch, steps, settings.workers))
            for step in range(progress.step_in_epoch, steps):
                progress.seconds = time.monotonic() - started
                share = self.budget.progress(progress.step, progress.epoch + step / steps, progress.seconds)
                if self.budget.minutes is not None:
                    # Clocks differ between processes, and all must stop at the same step.
                    share = same_on_all_ranks(share, self.accelerator)
                if share >= 1:
                    return
                try:
                    batches = [next(parts) for _ in range(settings.accumulation)]
                except Exception:
                    if not self._signals.received:
                        raise
                    # The signal has also ended the loader's workers, which may raise any error. An error that has
                    # another cause is raised again here.
                    parts = iter(self._loader(examples, step, steps, workers=0))
                    batches = [next(parts) for _ in range(settings.accumulation)]
                yield batches, share
            progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0

    def _loader(self, examples: Epoch, first_step: int, steps: int, workers: int) -> DataLoader:
        """Loads this process's parts of the batches. The global batch is the same for any number of processes."""
        settings, accelerator = self.settings, self.accelerator
        part = settings.batch_size // (accelerator.num_processes * settings.accumulation)
        begin = accelerator.process_index * part
        stride = accelerator.num_processes * part
        starts = range(first_step * settings.batch_size + begin, steps * settings.batch_size, stride)
        batches = [range(start, start + part) for start in starts]
        return make_loader(self.objective, examples, batches, workers, accelerator)

    def _step(self, batches: list[dict[str, Tensor]], share: float) -> tuple[Tensor, Tensor | float] | None:
        """Takes one optimizer step.

        Args:
            batches: this process's parts of the global batch.
            share: the share of the run that is done, which sets the learning rate.

        Returns:
            The loss over the global batch, and the norm of its gradient. None if a process has received a signal; then
            no step was taken.
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
                part = self.objective.forward(self.model, batch, **counts).loss
                # Gradients are averaged over the processes, but the parts of a mean must be added.
                accelerator.backward(part * accelerator.num_processes)
                loss += part.detach()
        norm = full_tensor(accelerator.clip_grad_norm_(self.model.parameters(), settings.clip or float("inf")))
        loss = accelerator.reduce(loss)
        skipped = ~loss.isfinite()
        if accelerator.scaler is None:
            skipped = skipped | ~torch.as_tensor(norm, device=loss.device).isfinite()
            # Makes AdamW leave the weights and its own state as they are. A gradient scaler does so by itself, and
            # expects gradients to overflow at times.
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
        """Counts the global batch.

        Returns:
            Whether a process has received a signal, the number of tokens, and the number of items of each loss.
        """
        each = [{"tokens": self.objective.tokens(batch), **self.objective.counts(batch)} for batch in batches]
        names = list(each[0])
        own = [self._signals.received or 0, *(sum(counts[name] for counts in each) for name in names)]
        totals = all_reduce_sum(own, self.accelerator)
        counts = dict(zip(names, totals[1:], strict=True))
        return bool(totals[0]), int(counts.pop("tokens")), counts

    # Evaluation and logs

    def evaluate(self) -> dict[str, float]:
        """Computes the metrics on the held-out examples, records and logs them."""
        self._require_finite()
        try:
            metrics = evaluate(self.objective, self.model, self.settings, self.accelerator)
        except Exception:
            if not self._signals.received:
                raise
            # As in `_steps`.
            without_workers = replace(self.settings, workers=0)
            metrics = evaluate(self.objective, self.model, without_workers, self.accelerator)
        self.keeper.record("evaluation", metrics)
        figures = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())
        logger.info("Step %d: %s", self.progress.step, figures)
        self.keeper.note_loss(metrics[self.objective.loss_name])
        return metrics

    def _log(self, losses: list[Tensor], norm: Tensor | float, meter: _Meter, bar: tqdm) -> None:
        """Records the figures of the steps since the last log, and shows them beside the progress bar."""
        self._require_finite()
        known = torch.stack(losses)
        loss, speed = known[known.isfinite()].mean().item(), meter.rate(self.progress.tokens)
        rate = self.optimizer.param_groups[0]["lr"]
        values = {"loss": loss, "gradient_norm": float(norm), "learning_rate": rate, "tokens_per_second": speed}
        self.keeper.record("train", values)
        bar.set_postfix_str(f"step {self.progress.step}, loss {loss:.3f}, {speed:,.0f} tokens/s")

    def _bar(self) -> tqdm:
        """Makes a progress bar with the share done and the time left; it is hidden if the output is not a terminal."""
        return tqdm(
            total=1,
            disable=None if self.accelerator.is_main_process else True,
            bar_format="{percentage:3.0f}% {bar} {elapsed} < {remaining} {postfix}",
        )

    # Saving and stopping

    def _save(self) -> None:
        """Saves a checkpoint, unless there is one of this step."""
        if self.keeper.saved_step != self.progress.step:
            self._require_finite_weights()
            self.keeper.save()

    def _signal_received(self) -> bool:
        """Whether any process has received a signal. Every process must call this."""
        return bool(all_reduce_sum([self._signals.received or 0], self.accelerator))

    def _stop(self) -> NoReturn:
        """Saves a checkpoint and ends the run, after a process has received a signal."""
        self._save()
        number = self._signals.received or signal.SIGTERM
        if self.accelerator.is_main_process:
            logger.warning(
                "Stopped by %s after step %d, whose checkpoint is saved: the same command with --resume goes on.",
                *(signal.Signals(number).name, self.progress.step),
            )
        raise SystemExit(128 + number)

    def _require_finite(self) -> None:
        """Records the steps that were skipped since the last call.

        Raises:
            FloatingPointError: if more steps were skipped than allowed.
        """
        for place in self._watch.skipped_steps():
            self.progress.skipped_steps += 1
            number, allowed = self.progress.skipped_steps, self.settings.skip_nonfinite
            if number > allowed:
                more = f"the {number} such steps are more than `skip_nonfinite` ({allowed}); " if allowed else ""
                raise FloatingPointError(
                    f"the loss or its gradient was not finite at {place}: {more}{self.keeper.last_checkpoint()}. "
                    "A lower `learning_rate` may help, or `skip_nonfinite`, the number of such steps to skip"
                )
            self.keeper.write_history("skipped", place._asdict())
            if self.accelerator.is_main_process:
                logger.warning("The loss or its gradient was not finite at %s, which changed no weights.", place)

    def _require_finite_weights(self) -> None:
        self._require_finite()
        if all_reduce_sum([int(nonfinite_weights(self.model))], self.accelerator):
            raise FloatingPointError(
                f"the weights are not finite after step {self.progress.step}: {self.keeper.last_checkpoint()}. "
                "A lower `learning_rate` may help"
            )


class _Meter:
    """Measures tokens per second since it was made or last read."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._time = tokens, time.monotonic()

    def rate(self, tokens: int) -> float:
        now = time.monotonic()
        rate = (tokens - self._tokens) / max(now - self._time, 1e-9)
        self._tokens, self._time = tokens, now
        return rate
