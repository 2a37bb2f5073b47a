"""The objective of a training run (its data, loss and metrics), and its evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..run.settings import TrainingSettings


class Epoch(Protocol):
    """The examples of one epoch, in order: a `torch.utils.data.Dataset` that knows its length."""

    def __len__(self) -> int:
        """The number of examples."""

    def __getitem__(self, index: int) -> Any:
        """One example."""


class Objective(Protocol):
    """The data that a run trains on, the loss that it minimises, and the metrics that it reports.

    Attributes:
        loss_name: name of the metric that is lowest for the best model.
        collate: makes a batch of examples.
    """

    loss_name: str
    collate: Callable[[list[Any]], dict[str, Tensor]]

    def epoch(self, number: int) -> Epoch:
        """The training examples of an epoch; each is a function of the seed, the epoch and its index."""

    def held_out(self) -> Epoch:
        """The examples to evaluate on, the same at every call."""

    def tokens(self, batch: dict[str, Tensor]) -> int:
        """The number of tokens in a batch, without padding."""

    def counts(self, batch: dict[str, Tensor]) -> dict[str, int]:
        """The number of items that each loss of a batch is a mean over, by the name of the model's argument for it."""

    def forward(self, model: nn.Module, batch: dict[str, Tensor], **counts: Tensor) -> Any:
        """Calls the model.

        Args:
            model: the model to train or evaluate.
            batch: result of `collate`, or of a share of the batch.
            **counts: as `counts` gives them, summed over the whole batch; without them the loss is the mean over this
                batch.

        Returns:
            The model's output; its `loss` is this batch's share of the loss over all items.
        """

    def sums(self, output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The quantities that an evaluation adds up over batches."""

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """The metrics of an evaluation, from the sums over all of its batches."""


def make_loader(
    objective: Objective, examples: Epoch, batches: list[range], workers: int, accelerator: Accelerator
) -> DataLoader:
    """Makes a loader of the given batches, each a range of the indices of its examples."""
    return DataLoader(
        examples,  # type: ignore[arg-type]
        batch_sampler=batches,  # type: ignore[arg-type]
        collate_fn=objective.collate,
        num_workers=workers,
        # Without its own generator it would draw a number from the one that dropout uses.
        generator=torch.Generator(),
        pin_memory=accelerator.device.type == "cuda",
    )


@torch.no_grad()
def evaluate(
    objective: Objective, model: nn.Module, settings: TrainingSettings, accelerator: Accelerator
) -> dict[str, float]:
    """The metrics of a model on the held-out examples, each of which is counted once over all processes.

    Args:
        objective: has the examples and the metrics.
        model: the model to evaluate; its mode (training or evaluation) stays as it was.
        settings: settings of the run; those for batches and workers are used.
        accelerator: result of `make_accelerator`. Every process must call this.
    """
    examples = objective.held_out()
    size, total = settings.batch_size, len(examples)
    batches = [range(start, min(start + size, total)) for start in range(0, total, size)]
    batches = batches[: settings.evaluation_batches]
    own = batches[accelerator.process_index :: accelerator.num_processes]
    # Sharded weights are gathered at each batch, so every process must take the same number of batches: the weight of
    # a surplus one is 0.
    spare = -(-len(batches) // accelerator.num_processes) - len(own)
    weights = [1.0] * len(own) + [0.0] * spare
    loader = make_loader(objective, examples, own + batches[:1] * spare, settings.workers, accelerator)
    sums: dict[str, Tensor] = {}
    was_training = model.training
    model.eval()
    for weight, batch in zip(weights, loader, strict=True):
        batch = send_to_device(batch, accelerator.device)
        for name, value in objective.sums(objective.forward(model, batch), batch).items():
            sums[name] = sums.get(name, 0) + weight * value.to(accelerator.device).double()
    model.train(was_training)
    return objective.metrics({name: float(accelerator.reduce(value)) for name, value in sums.items()})
