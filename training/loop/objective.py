"""What the training of a model is about, and its evaluation."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..run.settings import TrainingSettings


class Examples(Protocol):
    """A `torch.utils.data.Dataset` that knows its length."""

    def __len__(self) -> int:
        """The number of examples."""

    def __getitem__(self, index: int) -> Any:
        """One example."""


class Objective(Protocol):
    """What one family's training differs in from another's.

    Attributes:
        loss_name: which of the metrics is the lower the better the model is, to tell the best one by.
    """

    loss_name: str

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


def make_loader(
    task: Objective, examples: Examples, batches: list[range], workers: int, accelerator: Accelerator
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
def evaluate(
    task: Objective, model: nn.Module, settings: TrainingSettings, accelerator: Accelerator
) -> dict[str, float]:
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
