"""A run that is asked to end finishes its step, saves and says how to go on."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from regard.training.loop import signals
from regard.training.loop.loop import Loop
from regard.training.loop.signals import StopSignals
from regard.training.run.checkpoints import list_checkpoints

ROOT = Path(__file__).parents[3]
SETTINGS = {"steps": 7, "save_every": 3, "evaluate_every": 2, "log_every": 1, "dropout": 0.2, "accumulation": 2}
SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(scope="module")
def straight(pretrain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    return folder, pretrain(folder, **SETTINGS)


@pytest.fixture
def same_as_straight(straight, weights_of, history_of):
    def check(folder: Path, results: dict) -> None:
        expected_folder, expected = straight
        for name in ("metrics", "filled", "step", "epoch", "tokens"):
            assert results[name] == expected[name]
        weights, expected_weights = weights_of(folder), weights_of(expected_folder)
        assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
        assert history_of(folder) == history_of(expected_folder)

    return check


@pytest.fixture(autouse=True)
def as_on_a_terminal():
    """A shell has what it runs in the background ignore SIGINT, and so do those that this starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def handlers():
    """The handlers that a run must leave as they were."""
    before = [signal.getsignal(number) for number in (*SIGNALS, signal.SIGCHLD)]
    yield
    assert [signal.getsignal(number) for number in (*SIGNALS, signal.SIGCHLD)] == before


def signal_at(patch, step: int, *numbers: int) -> None:
    """Sends signals while a step is computed."""
    whole = Loop._count

    def interrupted(self, batches):
        found = whole(self, batches)
        if self.progress.step == step - 1:
            for number in numbers:
                signal.raise_signal(number)
        return found

    patch.setattr(Loop, "_count", interrupted)


def names_of(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_a_signal_in_a_step(pretrain, tmp_path, same_as_straight, caplog, number, step):
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, step, number)
        with pytest.raises(SystemExit) as raised:
            pretrain(tmp_path / "run", **SETTINGS)
    assert raised.value.code == 128 + number
    assert names_of(tmp_path / "run")[-1] == f"step-{step}"
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    (message,) = told
    assert message.startswith(f"Stopped by {number.name} after step {step}, whose checkpoint is saved: ")
    assert message.endswith("the same command with --resume goes on.")
    same_as_straight(tmp_path / "run", pretrain(tmp_path / "run", resume=True, **SETTINGS))


@pytest.mark.usefixtures("handlers")
def test_a_signal_before_the_first_step(pretrain, tmp_path, same_as_straight):
    with pytest.MonkeyPatch.context() as patch:
        whole = Loop._loader
        patch.setattr(Loop, "_loader", lambda *args, **options: signal.raise_signal(15) or whole(*args, **options))
        with pytest.raises(SystemExit):
            pretrain(tmp_path / "run", **SETTINGS)
    assert names_of(tmp_path / "run") == ["step-0"]
    same_as_straight(tmp_path / "run", pretrain(tmp_path / "run", resume=True, **SETTINGS))


@pytest.mark.usefixtures("handlers")
def test_a_signal_while_a_checkpoint_is_saved_or_the_model_evaluated(pretrain, tmp_path, same_as_straight):
    for number, moment in enumerate(["accelerate.Accelerator.save_state", "regard.training.loop.loop.evaluate"]):
        folder = tmp_path / str(number)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moment, _signalling(moment))
            with pytest.raises(SystemExit):
                pretrain(folder, **SETTINGS)
        assert names_of(folder) == [["step-3"], ["step-2"]][number]
        same_as_straight(folder, pretrain(folder, resume=True, **SETTINGS))


def _signalling(moment: str):
    import accelerate

    from regard.training.loop import loop

    whole = accelerate.Accelerator.save_state if moment.startswith("accelerate") else loop.evaluate
    sent = []

    def call(*args, **options):
        if not sent:
            sent.append(signal.raise_signal(signal.SIGTERM))
        return whole(*args, **options)

    return call


@pytest.mark.usefixtures("handlers")
def test_it_saves_where_no_checkpoints_are_asked_for(pretrain, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, 2, signal.SIGTERM)
        with pytest.raises(SystemExit):
            pretrain(tmp_path / "run", **{**SETTINGS, "save_every": 0})
    assert names_of(tmp_path / "run") == ["step-2"]


@pytest.mark.usefixtures("handlers")
def test_a_later_signal_ends_it_at_once(pretrain, tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "TOGETHER", 0.0)
    signal_at(monkeypatch, 2, signal.SIGTERM, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        pretrain(tmp_path / "run", **SETTINGS)
    assert names_of(tmp_path / "run") == []


@pytest.mark.usefixtures("handlers")
def test_signals_close_to_each_other_are_one(pretrain, tmp_path, monkeypatch):
    """As of a terminal, and of the launcher that got it too."""
    monkeypatch.setattr(signals, "TOGETHER", 1000.0)
    signal_at(monkeypatch, 2, signal.SIGINT, signal.SIGTERM, signal.SIGINT)
    with pytest.raises(SystemExit) as raised:
        pretrain(tmp_path / "run", **SETTINGS)
    assert raised.value.code == 130
    assert names_of(tmp_path / "run") == ["step-2"]


def test_handlers_are_set_while_it_trains_alone(pretrain, tmp_path, monkeypatch, handlers):
    seen = {}

    def watch(name: str) -> None:
        whole = getattr(Loop, name)

        def call(self, *args):
            seen.setdefault(name, []).append(signal.getsignal(signal.SIGTERM) == self._signals._receive)
            return whole(self, *args)

        monkeypatch.setattr(Loop, name, call)

    watch("_step")
    watch("evaluate")
    pretrain(tmp_path / "run", **{**SETTINGS, "steps": 3})
    # The last evaluation is after the training.
    assert seen == {"_step": [True] * 3, "evaluate": [True, False]}


def test_the_end_of_a_child_is_no_error_once_a_signal_came():
    """PyTorch has set a handler that raises one."""

    def raising(number, frame):
        raise RuntimeError("a child has ended")

    before = signal.signal(signal.SIGCHLD, raising)
    try:
        with StopSignals():
            assert signal.getsignal(signal.SIGCHLD) is raising
            signal.raise_signal(signal.SIGTERM)
            assert signal.getsignal(signal.SIGCHLD) is not raising
            signal.raise_signal(signal.SIGCHLD)
        assert signal.getsignal(signal.SIGCHLD) is raising
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_child_may_end_at_the_same_moment(monkeypatch):
    """Python prints what went wrong with a signal that it finds without a handler, and goes on."""
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    both = {signal.SIGTERM, signal.SIGCHLD}
    before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        with StopSignals() as stop:
            signal.pthread_sigmask(signal.SIG_BLOCK, both)
            for number in both:
                os.kill(os.getpid(), number)
            # Python sees both at once.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
            assert stop.received == signal.SIGTERM
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert not printed


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("step", "error"),
    [
        (1, RuntimeError("DataLoader worker exited unexpectedly")),
        (2, ConnectionResetError("while a batch's memory was handed over")),
        (3, EOFError()),
    ],
)
def test_a_signal_that_ends_what_prepares_batches(pretrain, tmp_path, same_as_straight, step, error):
    """At any place in an epoch, its last step among them."""

    def ended(self, parts, place):
        for number, batch in enumerate(parts):
            if self.progress.step == step and number == 2 * place:
                signal.raise_signal(signal.SIGTERM)
                raise error
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        whole = Loop._loader

        def loader(self, examples, first_step, steps, workers):
            parts = whole(self, examples, first_step, steps, workers)
            return parts if self._signals.received else ended(self, parts, step - self.progress.step)

        patch.setattr(Loop, "_loader", loader)
        with pytest.raises(SystemExit):
            pretrain(tmp_path / "run", **SETTINGS)
    assert names_of(tmp_path / "run")[-1] == f"step-{step}"
    same_as_straight(tmp_path / "run", pretrain(tmp_path / "run", resume=True, **SETTINGS))


def test_in_another_thread_signals_are_left_alone(pretrain, tmp_path, handlers):
    seen = []

    def work() -> None:
        with StopSignals() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.received))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(signal.getsignal(signal.SIGTERM), None)]


def test_what_is_ignored_stays_so(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.received is None
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# As a process


def start(folder: Path, settings: Path, *options: str) -> subprocess.Popen:
    """Starts a run in a group of processes of its own."""
    command = [sys.executable, "-m", "regard", "train", "bert", "--settings", str(settings), "--output", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *options], cwd=ROOT, start_new_session=True, **pipes)


def wait_for_a_checkpoint(process: subprocess.Popen, folder: Path) -> None:
    until = time.monotonic() + 120
    while not names_of(folder):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def long_run(straight, tmp_path):
    """Settings of a run that lasts until it is ended."""
    text = (straight[0] / "settings.yaml").read_text().replace("family: bert\n", "")
    text = text.replace("steps: 7", "steps: 100000").replace("save_every: 3", "save_every: 5")
    (tmp_path / "settings.yaml").write_text(text)
    return tmp_path / "settings.yaml"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "workers", "whole_group"), [(15, 0, False), (2, 0, True), (15, 2, True), (2, 2, True)]
)
def test_the_command_line(long_run, tmp_path, number, workers, whole_group):
    """The signal may go to the processes that prepare batches as well."""
    process = start(tmp_path / "run", long_run, "--workers", str(workers))
    wait_for_a_checkpoint(process, tmp_path / "run")
    (os.killpg if whole_group else os.kill)(process.pid, number)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number, (printed, errors)
    step = names_of(tmp_path / "run")[-1].removeprefix("step-")
    assert f"Stopped by {signal.Signals(number).name} after step {step}, whose checkpoint is saved" in printed
    assert "Traceback" not in printed + errors
    assert not list((tmp_path / "run" / "checkpoints").glob("partial-*"))
