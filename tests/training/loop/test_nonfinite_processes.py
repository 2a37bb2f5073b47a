"""A loss or gradient that is not finite in one process alone is left out, or ends the run, in all of them."""

import math
import os

import pytest
import torch
from torch import Tensor

from regard.training.families.bert import BERT, BertObjective
from regard.training.families.train import train
from regard.training.loop.loop import Loop
from regard.training.run.checkpoints import list_checkpoints
from tests.support.forked import fork
from tests.support.thorough import slow_except
from tests.training.conftest import TINY

# One step may be left out, and two are spoilt: each in the first part of the second process's share.
SPOILT = (2, 4)
SETTINGS = {
    **TINY,
    "steps": 6,
    "accumulation": 2,
    "warmup": 0.0,
    "learning_rate": 0.005,
    "evaluate_every": 0,
    "log_every": 1,
    "save_every": 2,
    "skip_nonfinite": 1,
}


def of_the_loss(output, embedded: Tensor) -> None:
    output.loss = output.loss * math.nan


def of_the_loss_alone(output, embedded: Tensor) -> None:
    output.loss = output.loss + math.inf


def of_the_gradient(output, embedded: Tensor) -> None:
    # The slope of a root is infinite at zero.
    output.loss = output.loss + (output.loss - output.loss.detach()).sqrt()


def of_the_gradient_of_one_token(output, embedded: Tensor) -> None:
    """Of which one process has a part, where weights are shared out."""
    embedded.register_hook(lambda gradient: gradient.index_fill(1, torch.tensor([0]), math.nan))


def state_of(loop: Loop) -> list[Tensor]:
    """This process's part of the weights and of the optimizer's state."""
    tensors = list(loop.model.parameters())
    for state in loop.optimizer.state.values():
        tensors += state.values()
    return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in tensors]


def work(folder, settings: dict, spoil) -> tuple[str, dict[int, bool]]:
    """Trains; tells how it ended, and of each step whether it changed anything."""
    torch.set_num_threads(1)
    changed: dict[int, bool] = {}
    parts = [0]
    step, forward = Loop._step, BertObjective.forward

    def watched(self, *args):
        before, number = state_of(self), self.progress.step + 1
        parts[0] = 0
        result = step(self, *args)
        after = state_of(self)
        changed[number] = len(before) != len(after) or not all(map(torch.equal, before, after))
        return result

    def spoilt(self, model, batch, **counts):
        embedded = []
        (tokens,) = (module for name, module in model.named_modules() if name.endswith("embeddings.tokens"))
        handle = tokens.register_forward_hook(lambda module, given, output: embedded.append(output))
        output = forward(self, model, batch, **counts)
        handle.remove()
        parts[0] += 1
        # The steps before this one are in `changed`.
        if os.environ["RANK"] == "1" and parts[0] == 1 and len(changed) + 1 in SPOILT:
            spoil(output, embedded[0])
        return output

    Loop._step, BertObjective.forward = watched, spoilt
    try:
        train(BERT, folder, settings)
    except FloatingPointError as error:
        return str(error), changed
    return "ended", changed


SPOILERS = [of_the_loss, of_the_loss_alone, of_the_gradient, of_the_gradient_of_one_token]
SHARDED = [(spoil, sharding) for spoil in SPOILERS for sharding in ("none", "fsdp")]


@pytest.mark.parametrize(("spoil", "sharding"), slow_except([*SHARDED[::2], (of_the_gradient, "fsdp")], SHARDED))
def test_all_processes_leave_it_out_or_stop(corpus_folder, tmp_path, history_of, sharding, spoil):
    settings = {**SETTINGS, "data": [corpus_folder], "sharding": sharding}
    told = fork(lambda: work(tmp_path / "run", settings, spoil), 2, patience=200)
    assert told.keys() == {0, 1}
    for message, changed in told.values():
        assert "not finite at step 4 (epoch 1, examples 0 to 11): the 2 such steps are more than" in message
        assert changed == {1: True, 2: False, 3: True, 4: False}
    # A step that was left out may be saved; the one that ends the run is not.
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-2"]
    records = history_of(tmp_path / "run")
    assert [step for step, kind, _ in records if kind == "skipped"] == [2]
    losses = [values["loss"] for _, kind, values in records if kind == "train"]
    assert [loss is not None for loss in losses] == [True, "gradient" in spoil.__name__, True]
