"""Several processes stop together, and a run goes on in another number of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState

from regard.training.families.bert import BERT
from regard.training.families.train import train
from regard.training.loop.loop import Loop
from regard.training.run.checkpoints import list_checkpoints
from tests.support.forked import fork

ROOT = Path(__file__).parents[3]
SETTINGS = {
    "steps": 7,
    "batch_size": 6,
    "dropout": 0.0,
    "learning_rate": 0.005,
    "evaluate_every": 0,
    "save_every": 2,
}


class Killed(BaseException):
    """What no code catches."""


def launch(folder: Path, settings: dict, last: int | None = None) -> None:
    """Runs, or goes on with, a run in two processes; after the last step both end as if the machine had failed."""

    def work() -> None:
        torch.set_num_threads(1)
        # That of the test's own process, which trained alone.
        AcceleratorState._reset_state(reset_partial_state=True)
        whole = Loop._step

        def until(self, *args):
            result = whole(self, *args)
            if self.progress.step == last:
                self.accelerator.wait_for_everyone()
                os._exit(9)
            return result

        Loop._step = until
        train(BERT, folder, settings, resume=True)

    told = fork(work, 2, killed=0 if last is None else 2, patience=120)
    assert told == ({0: None, 1: None} if last is None else {})


def names_of(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


def kill_after(patch, step: int) -> None:
    whole = Loop._step

    def until(self, *args):
        result = whole(self, *args)
        if self.progress.step == step:
            raise Killed
        return result

    patch.setattr(Loop, "_step", until)


def begin_alone(pretrain, folder: Path, settings: dict) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, 5)
        with pytest.raises(Killed):
            pretrain(folder, **settings)


def close(weights: dict, others: dict) -> bool:
    return all(torch.allclose(weights[name], others[name], rtol=0, atol=1e-5) for name in weights)


def test_from_one_process_to_two_and_back(pretrain, tmp_path, weights_of):
    """The batches are the same ones, so the weights differ by rounding alone."""
    straight = pretrain(tmp_path / "straight", **SETTINGS)
    expected = weights_of(tmp_path / "straight")
    settings = straight["settings"]

    begin_alone(pretrain, tmp_path / "more", SETTINGS)
    assert names_of(tmp_path / "more") == ["step-2", "step-4"]
    launch(tmp_path / "more", settings)
    assert close(weights_of(tmp_path / "more"), expected)

    launch(tmp_path / "fewer", settings, last=5)
    assert names_of(tmp_path / "fewer") == ["step-2", "step-4"]
    resumed = pretrain(tmp_path / "fewer", resume=True, **SETTINGS)
    assert (resumed["processes"], resumed["tokens"]) == (1, straight["tokens"])
    assert close(weights_of(tmp_path / "fewer"), expected)


def test_two_processes_go_on_to_the_bit(pretrain, tmp_path, weights_of):
    """Each with the dropout that it would have had."""
    settings = {**pretrain(tmp_path / "one", steps=1)["settings"], **SETTINGS, "dropout": 0.2}
    launch(tmp_path / "straight", settings)
    launch(tmp_path / "cut", settings, last=5)
    assert names_of(tmp_path / "cut") == ["step-2", "step-4"]
    launch(tmp_path / "cut", settings)
    weights, expected = weights_of(tmp_path / "cut"), weights_of(tmp_path / "straight")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    # Dropout does something here, and with another number of processes something else.
    begin_alone(pretrain, tmp_path / "more", {**SETTINGS, "dropout": 0.2})
    launch(tmp_path / "more", settings)
    assert not close(weights_of(tmp_path / "more"), expected)


def workers_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children if b"regard" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_stops_all_processes_at_the_same_step(pretrain, tmp_path, to_all):
    """Be it to one of them alone, or to the launcher, which passes it on."""
    settings = {**pretrain(tmp_path / "one", steps=1)["settings"], **SETTINGS, "steps": 100_000, "save_every": 5}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "regard"]
    command += ["train", "bert", "--settings", str(tmp_path / "settings.yaml"), "--output", str(tmp_path / "run")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not names_of(tmp_path / "run"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    workers = workers_of(process.pid)
    assert len(workers) == 2
    os.kill(process.pid if to_all else workers[1], signal.SIGTERM)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    step = names_of(tmp_path / "run")[-1].removeprefix("step-")
    assert printed.count(f"Stopped by SIGTERM after step {step}, whose checkpoint is saved") == 1, (printed, errors)
    if not to_all:
        # What the launcher says of its workers.
        assert errors.count("exitcode  : 143") + errors.count("exitcode: 143") >= 1, errors
    assert not list((tmp_path / "run" / "checkpoints").glob("partial-*"))
    states = (tmp_path / "run" / "checkpoints" / f"step-{step}").glob("random_states_*")
    assert len(list(states)) == 2
