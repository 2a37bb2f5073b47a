import math

import pytest

from regard.training.loop.schedule import Budget, learning_rate_factor


def test_progress_by_steps_passes_and_time():
    assert Budget(steps=40).progress(10, epoch=3.5, seconds=1e9) == 0.25
    assert Budget(epochs=2).progress(10_000, epoch=0.5, seconds=1e9) == 0.25
    assert Budget(minutes=2).progress(10_000, epoch=3.5, seconds=30) == 0.25


@pytest.mark.parametrize("budget", [Budget(steps=3), Budget(epochs=3), Budget(minutes=3)])
def test_the_end_is_reached(budget):
    assert budget.progress(2, 2, 2 * 60) < 1
    assert budget.progress(3, 3, 3 * 60) == 1


def test_a_budget_needs_one_of_them():
    with pytest.raises(ValueError, match="`steps`, `epochs` or `minutes`"):
        Budget().progress(0, 0, 0)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0.1, 0.5])
def test_the_rate_rises_in_a_line(schedule, warmup):
    assert learning_rate_factor(0, warmup, schedule) == 0
    assert learning_rate_factor(warmup / 4, warmup, schedule) == pytest.approx(0.25)
    assert learning_rate_factor(warmup, warmup, schedule) == 1


@pytest.mark.parametrize(
    ("schedule", "quarter", "half", "end"),
    [("linear", 0.75, 0.5, 0), ("cosine", (1 + math.sqrt(0.5)) / 2, 0.5, 0), ("constant", 1, 1, 1)],
)
@pytest.mark.parametrize("warmup", [0, 0.2])
def test_the_rate_falls_by_its_schedule(schedule, quarter, half, end, warmup):
    for share, expected in ((0, 1), (0.25, quarter), (0.5, half), (1, end)):
        factor = learning_rate_factor(warmup + share * (1 - warmup), warmup, schedule)
        assert factor == pytest.approx(expected, abs=1e-12)
    # The clock may run over.
    assert learning_rate_factor(1.5, warmup, schedule) == pytest.approx(end, abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_warm_up_alone(schedule):
    assert learning_rate_factor(0.5, 1, schedule) == 0.5
    assert learning_rate_factor(0.999, 1, schedule) == 0.999
