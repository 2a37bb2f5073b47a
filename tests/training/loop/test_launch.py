"""Processes that don't find each other say so in a line, and soon; those that do take turns."""

import os
import signal
import time
from datetime import timedelta

import pytest

from regard.training.loop import launch
from regard.training.loop.launch import make_accelerator
from regard.training.run.settings import TrainingSettings
from tests.support.forked import fork
from tests.training.loop.test_distributed import free_port


@pytest.fixture
def processes(monkeypatch):
    """Has processes do some work, with a short timeout; see `fork`."""
    monkeypatch.setattr(launch, "TIMEOUT", timedelta(seconds=4))
    return fork


def meet(**settings) -> str:
    with launch.rendezvous_check(TrainingSettings(**settings)):
        return "met"


def test_processes_meet(processes):
    assert processes(meet, 3) == {0: "met", 1: "met", 2: "met"}


def test_one_process_meets_no_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert meet() == "met"


def test_the_missing_are_named(processes):
    told = processes(meet, 4, ranks=[0, 2])
    assert told.keys() == {0, 2}
    for line in told.values():
        assert line.startswith("ConnectionError: 2 of 4 processes did not connect to 127.0.0.1:")
        assert "within 4 seconds: rank 1, 3;" in line
        assert "\n" not in line


def test_a_wrong_port_is_told_on_both_sides(processes):
    told = processes(meet, 2, MASTER_PORT={1: str(free_port())})
    assert "1 of 2 processes did not connect" in told[0]
    assert ": rank 1;" in told[0]
    assert told[1].startswith("ConnectionError: process 1 of 2 on ")
    assert "`MASTER_PORT`" in told[1]
    assert "\n" not in told[0] + told[1]


def test_a_rank_is_no_ones_twice(processes):
    told = processes(meet, 3, RANK={2: "1"})
    assert sum("two processes" in line and "have the `RANK` 1" in line for line in told.values()) == 1
    assert ": rank 2;" in told[0]


def test_what_differs_is_named(processes):
    def with_seed() -> str:
        return meet(seed=int(os.environ["RANK"]) // 2)

    told = processes(with_seed, 3)
    for line in told.values():
        assert line.startswith("ConnectionError: process 2 on ")
        assert "another `seed` (1) than process 0" in line


def test_the_others_stop_when_one_is_killed(processes, tmp_path):
    def work() -> str:
        accelerator = make_accelerator(TrainingSettings(log_with=["none"]), tmp_path)
        if accelerator.process_index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with launch.rank_ordered(accelerator):
            return "done"

    told = processes(work, 4, killed=1)
    assert told.keys() == {0, 1, 3}
    for line in told.values():
        assert line.startswith("ConnectionError: another process has ended")


def test_machines_take_turns(processes, tmp_path):
    """Of two machines with two processes each: the first process, the first of the other machine, then the rest."""

    def work() -> tuple[float, float]:
        accelerator = make_accelerator(TrainingSettings(log_with=["none"]), tmp_path)
        with launch.rank_ordered(accelerator):
            begun = time.monotonic()
            time.sleep(0.2)
            return begun, time.monotonic()

    times = processes(work, 4, LOCAL_RANK={2: "0", 3: "1"}, LOCAL_WORLD_SIZE=dict.fromkeys(range(4), "2"))
    assert times[0][1] < times[2][0]
    assert times[2][1] < min(times[1][0], times[3][0])
    # The last two need not wait for each other.
    assert max(times[1][0], times[3][0]) < min(times[1][1], times[3][1])
