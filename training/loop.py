"""The training loop of every family, on Accelerate."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, send_to_device, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .batch_norm import share_batch_norms
from .checkpoints import Progress, last_whole_checkpoint, load_checkpoint, save_checkpoint
from .distributed import is_sharded, meeting, prepare, shard, shard_on_cpu, sharding_plugin, whole
from .schedule import Budget, learning_rate_factor
from .settings import TrainingSettings, to_dict

logger = logging.getLogger("regard.training")


class Examples(Protocol):
    """A `torch.utils.data.Dataset` that knows its length."""

    def __len__(self) -> int:
        """The number of examples."""

    def __getitem__(self, index: int) -> Any:
        """One example."""


class Task(Protocol):
    """What one family's training differs in from another's."""

    def epoch(self, number: int) -> Examples:
        """The examples of an epoch, in its order; each depends on the seed, the epoch and its index alone."""

    def held_out(self) -> Examples:
        """The examples to evaluate on, always the same."""

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        """Examples to a padded batch."""

    def tokens(self, batch: dict[str, Tensor]) -> int:
        """The number of tokens in a batch, padding not counted."""

    def counts(self, batch: dict[str, Tensor]) -> dict[str, int]:
        """Over how many items the losses of a batch are means, by the name of the model's argument for it."""

    def forward(self, model: nn.Module, batch: dict[str, Tensor], **counts: Tensor) -> Any:
        """The model's output, whose `loss` is the batch's share of the mean over `counts`, if they are given."""

    def sums(self, output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What an evaluation adds up over batches."""

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """The figures of an evaluation, from those sums."""


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


def make_loader(
    task: Task, examples: Examples, batches: list[range], workers: int, accelerator: Accelerator
) -> DataLoader:
    """Loads batches of examples, each given by the indices of its examples."""
    return DataLoader(
        examples,  # type: ignore[arg-type]
        batch_sampler=batches,  # type: ignore[arg-type]
        collate_fn=task.collate,
        num_workers=workers,
        # Without one of its own it would draw a number from the generator that dropout uses.
        generator=torch.Generator(),
        pin_memory=accelerator.device.type == "cuda",
    )


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, settings: TrainingSettings, accelerator: Accelerator) -> dict[str, float]:
    """A task's figures on its held-out examples, each of them counted once over all processes.

    Args:
        task: gives the examples, and the figures.
        model: is evaluated; its mode (training or evaluation) is left as it was.
        settings: give the size of a batch, and how many to take.
        accelerator: what `make_accelerator` gave.
    """
    examples = task.held_out()
    size, total = settings.batch_size, len(examples)
    batches = [range(start, min(start + size, total)) for start in range(0, total, size)]
    batches = batches[: settings.evaluation_batches]
    own = batches[accelerator.process_index :: accelerator.num_processes]
    # Sharded weights are brought together at each batch, so all processes take as many; some have one that counts for
    # nothing.
    spare = -(-len(batches) // accelerator.num_processes) - len(own)
    weights = [1.0] * len(own) + [0.0] * spare
    loader = make_loader(task, examples, own + batches[:1] * spare, settings.workers, accelerator)
    sums: dict[str, Tensor] = {}
    was_training = model.training
    model.eval()
    for weight, batch in zip(weights, loader, strict=True):
        batch = send_to_device(batch, accelerator.device)
        for name, value in task.sums(task.forward(model, batch), batch).items():
            sums[name] = sums.get(name, 0) + weight * value.to(accelerator.device).double()
    model.train(was_training)
    return task.metrics({name: float(accelerator.reduce(value)) for name, value in sums.items()})


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
        task: Task,
        model: PreTrainedModel,
        settings: TrainingSettings,
        budget: Budget,
        folder: Path,
        accelerator: Accelerator,
    ) -> None:
        self.task, self.settings, self.budget, self.accelerator = task, settings, budget, accelerator
        self.checkpoints, self.history = folder / "checkpoints", folder / "history.jsonl"
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

    def run(self, resume: bool = False) -> Outcome:
        """Trains to the end of the budget, and evaluates.

        Args:
            resume: go on from the last checkpoint, if there is one.

        Raises:
            ValueError: if the data makes no whole batch.
        """
        settings, accelerator = self.settings, self.accelerator
        # Dropout differs between processes; the weights, made before, do not.
        set_seed(settings.seed, device_specific=True)
        saved = last_whole_checkpoint(self.checkpoints) if resume else None
        if saved:
            self.progress = load_checkpoint(accelerator, saved)
            logger.info("Going on from step %d.", self.progress.step)
        if accelerator.is_main_process:
            self._keep_history_to(self.progress.step)
        accelerator.init_trackers("regard", {name: str(value) for name, value in to_dict(settings).items()})
        return Outcome(self._train(), self.progress, accelerator.num_processes)

    def _train(self) -> dict[str, float]:
        settings, progress = self.settings, self.progress
        losses: list[Tensor] = []
        metrics: dict[str, float] | None = None
        with self._bar() as bar:
            meter = _Meter(progress.tokens)
            for batches, share in self._steps():
                metrics = None
                loss, norm = self._step(batches, share)
                losses.append(loss)
                bar.n = share
                if progress.step % settings.log_every == 0:
                    values = {
                        "loss": torch.stack(losses).mean().item(),
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
                if settings.save_every and progress.step % settings.save_every == 0:
                    save_checkpoint(self.accelerator, self.checkpoints, progress, settings.keep_last)
                    meter = _Meter(progress.tokens)
            bar.n = 1
        return metrics or self.evaluate()

    def _steps(self) -> Iterator[tuple[list[dict[str, Tensor]], float]]:
        """This process's parts of each batch still to come, and the share of the run that is done before it."""
        settings, progress = self.settings, self.progress
        started = time.monotonic() - progress.seconds
        while True:
            examples = self.task.epoch(progress.epoch)
            steps = steps_per_epoch(examples, settings.batch_size)
            parts = iter(self._loader(examples, progress.step_in_epoch, steps))
            for step in range(progress.step_in_epoch, steps):
                progress.seconds = time.monotonic() - started
                share = self._agreed(
                    self.budget.progress(progress.step, progress.epoch + step / steps, progress.seconds)
                )
                if share >= 1:
                    return
                progress.step_in_epoch = step + 1
                yield [next(parts) for _ in range(settings.accumulation)], share
            progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0

    def _agreed(self, share: float) -> float:
        # Clocks differ between processes, and all must stop at the same step.
        if self.budget.minutes is None or self.accelerator.num_processes == 1:
            return share
        return float(broadcast(torch.tensor([share], device=self.accelerator.device))[0])

    def _loader(self, examples: Examples, first_step: int, steps: int) -> DataLoader:
        """Loads this process's parts of the batches. The global batch is the same however many processes share it."""
        settings, accelerator = self.settings, self.accelerator
        part = settings.batch_size // (accelerator.num_processes * settings.accumulation)
        begin = accelerator.process_index * part
        stride = accelerator.num_processes * part
        starts = range(first_step * settings.batch_size + begin, steps * settings.batch_size, stride)
        batches = [range(start, start + part) for start in starts]
        return make_loader(self.task, examples, batches, settings.workers, accelerator)

    def _step(self, batches: list[dict[str, Tensor]], share: float) -> tuple[Tensor, Tensor | float]:
        """One optimizer step: its loss over the global batch, and the norm of its gradient."""
        settings, accelerator = self.settings, self.accelerator
        factor = learning_rate_factor(share, settings.warmup, settings.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = self._highest_rate * factor
        tokens, counts = self._count(batches)
        loss = torch.zeros((), device=accelerator.device)
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                batch = send_to_device(batch, accelerator.device, non_blocking=True)
                part = self.task.forward(self.model, batch, **counts).loss
                # Distributed training averages the gradients; the parts of a mean must be added.
                accelerator.backward(part * accelerator.num_processes)
                loss += part.detach()
        norm = accelerator.clip_grad_norm_(self.model.parameters(), settings.clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.step += 1
        self.progress.tokens += tokens
        return accelerator.reduce(loss), whole(norm)

    def _count(self, batches: list[dict[str, Tensor]]) -> tuple[int, dict[str, Tensor]]:
        """Tokens, and the items of each loss, in the global batch."""
        each = [{"tokens": self.task.tokens(batch), **self.task.counts(batch)} for batch in batches]
        names = list(each[0])
        totals = torch.tensor([sum(counts[name] for counts in each) for name in names])
        if self.accelerator.num_processes > 1:
            totals = self.accelerator.reduce(totals.to(self.accelerator.device))
        counts = dict(zip(names, totals, strict=True))
        return int(counts.pop("tokens")), counts

    def evaluate(self) -> dict[str, float]:
        """The task's figures on the held-out examples, which are recorded and logged."""
        metrics = evaluate(self.task, self.model, self.settings, self.accelerator)
        self._record("evaluation", metrics)
        figures = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())
        logger.info("Step %d: %s", self.progress.step, figures)
        return metrics

    def _record(self, kind: str, values: dict[str, float]) -> None:
        self.accelerator.log({f"{kind}/{name}": value for name, value in values.items()}, step=self.progress.step)
        if self.accelerator.is_main_process:
            with self.history.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.progress.step, "kind": kind, **values}) + "\n")

    def _keep_history_to(self, step: int) -> None:
        """Drops what was recorded after the checkpoint that the run goes on from."""
        lines = self.history.read_text(encoding="utf-8").splitlines() if self.history.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        self.history.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

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
