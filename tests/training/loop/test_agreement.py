"""Two processes of a run agree: on what the global batch is, when to end, and whether a checkpoint was saved."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from regard.training.families.bert import BERT
from regard.training.families.train import train
from regard.training.loop import loop
from regard.training.loop.loop import Loop
from regard.training.run.checkpoints import list_checkpoints
from tests.support.forked import fork
from tests.training.conftest import TINY

SETTINGS = {**TINY, "steps": 4, "accumulation": 2, "dropout": 0.0, "warmup": 0.0, "learning_rate": 0.005}
SETTINGS |= {"evaluate_every": 0, "log_every": 1, "save_every": 0}


@pytest.fixture
def two(corpus_folder, tmp_path):
    """Trains in two processes, and gives what each tells; `change` is called in each before."""

    def run(change=lambda rank: None, tell=lambda results: results, **given) -> dict[int, object]:
        def work():
            torch.set_num_threads(1)
            change(int(os.environ["RANK"]))
            try:
                return tell(train(BERT, tmp_path / "two", {**SETTINGS, "data": [corpus_folder], **given}))
            except SystemExit as ended:
                return ended.code

        return fork(work, 2, patience=60)

    return run


def test_they_train_as_one(two, pretrain, tmp_path, weights_of, history_of):
    told = two()
    one = pretrain(tmp_path / "one", **SETTINGS)
    assert told[0] == told[1]
    assert told[0]["tokens"] == one["tokens"]
    for record, expected in zip(history_of(tmp_path / "two"), history_of(tmp_path / "one"), strict=True):
        assert record[2] == pytest.approx(expected[2], rel=1e-4)
    weights = weights_of(tmp_path / "two")
    for name, expected in weights_of(tmp_path / "one").items():
        assert torch.allclose(weights[name], expected, rtol=0, atol=1e-5), name


def test_dropout_is_each_ones_own(two):
    drawn = []

    def change(rank: int) -> None:
        whole = Loop._train
        Loop._train = lambda self: drawn.append(torch.rand(3).tolist()) or whole(self)

    told = two(change, lambda results: drawn[0], steps=1)
    assert told[0] != told[1]


def test_a_signal_to_one_stops_both(two, tmp_path):
    def change(rank: int) -> None:
        # What is ignored here would stay so.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        whole = Loop._step

        def signalled(self, *args):
            if rank == 1 and self.progress.step == 2:
                signal.raise_signal(signal.SIGTERM)
            return whole(self, *args)

        Loop._step = signalled

    assert two(change) == {0: 143, 1: 143}
    (checkpoint,) = list_checkpoints(tmp_path / "two" / "checkpoints")
    assert checkpoint.name == "step-2"
    assert len(list(checkpoint.glob("random_states_*.pkl"))) == 2


def test_the_clock_is_the_first_ones(two):
    """That of the second runs three times as fast."""

    def change(rank: int) -> None:
        seconds = [0.0]

        def read() -> float:
            seconds[0] += 1 + 2 * rank
            return seconds[0]

        loop.time = SimpleNamespace(monotonic=read)

    told = two(change, lambda results: (results["step"], results["seconds"]), steps=None, minutes=0.5)
    assert told[0] == told[1]
    assert told[0][0] > 5
    assert 30 <= told[0][1] < 40


@pytest.mark.parametrize("failing", [0, 1])
def test_a_part_of_a_checkpoint_that_is_not_written_fails_in_both(two, tmp_path, failing):
    def change(rank: int) -> None:
        whole = Accelerator.save_state

        def save(self, folder, *args, **options):
            whole(self, folder, *args, **options)
            if rank == failing and folder.endswith("partial-4"):
                raise OSError(28, "No space left on device")

        Accelerator.save_state = save

    told = two(change, save_every=2)
    for rank, message in told.items():
        reason = "No space left on device" if rank == failing else "another process failed to write its part"
        assert message.startswith("OSError: the checkpoint of step 4 could not be written to ")
        assert message.endswith(f": {reason}; that of step 2 is kept")
    assert [path.name for path in (tmp_path / "two" / "checkpoints").iterdir()] == ["step-2"]
