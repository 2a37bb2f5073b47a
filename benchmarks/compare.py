"""Two sides or more do the same work in turns: first they must agree, then they are timed."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np

from .sides import Work, Worker

# OpenMP's threads spin for a while when there is nothing left to do, in the other side's time.
PAUSE = 0.05


@dataclass(frozen=True)
class Case:
    """One piece of work that the sides of a benchmark do.

    Attributes:
        work: what it is, a line of the results.
        parameters: what each side is given; plain JSON.
        quick: those that `--quick` replaces; None: left out there.
        units: what is counted.
        warm_up: turns that are not timed.
        repetitions: turns that are.
        tolerance: how much figures of the check may differ, as a share of the larger one.
        sides: which of the benchmark's sides take part, ours first; None: all.
        figures: for each peer, the least times its `speed` and the most times its `memory` that are asked for.
        share: the least share of the machine's sgemm peak that is asked of our side.
        beyond: another case, and how many times its ratio of speeds this case's should be.
    """

    work: str
    parameters: Mapping[str, Any]
    quick: Mapping[str, Any] | None = None
    units: str = "tokens"
    warm_up: int = 2
    repetitions: int = 9
    tolerance: float = 1e-4
    sides: Sequence[str] | None = None
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    share: float | None = None
    beyond: tuple[str, float] | None = None


class Disagreement(ValueError):
    """The sides of a comparison don't compute the same."""


def agree(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two figures are the same: see `sides.Side.check`."""
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return False
    if "f" not in one.dtype.kind + other.dtype.kind:
        return bool((one == other).all())
    # What is not a number agrees with nothing.
    largest = np.maximum(abs(one), abs(other)).max(initial=0)
    return bool((abs(one - other) <= tolerance * largest).all())


def check_agreement(case: str, figures: Mapping[str, Mapping[str, Any]], tolerance: float) -> None:
    """Compares what the sides computed.

    Args:
        case: its name.
        figures: each side's, ours first.
        tolerance: see `Case`.

    Raises:
        Disagreement: if a side has other figures than ours, or there are none.
    """
    (ours, expected), *others = figures.items()
    if not expected:
        raise Disagreement(f"{case}: side {ours!r} has no figures to check")
    for side, found in others:
        if found.keys() != expected.keys():
            raise Disagreement(f"{case}: {ours!r} checks {sorted(expected)}, {side!r} checks {sorted(found)}")
        for name, value in expected.items():
            if not agree(value, found[name], tolerance):
                raise Disagreement(
                    f"{case}: `{name}` is {value} for {ours!r} and {found[name]} for {side!r}, "
                    f"which differ by more than {tolerance:g} of the larger"
                )


def _summary(works: list[Work], memory: int | None) -> dict[str, Any]:
    return {
        "speed": float(np.median([work.units / work.seconds for work in works])),
        "flops_per_second": float(np.median([work.flops / work.seconds for work in works])),
        "seconds": [work.seconds for work in works],
        "units": [work.units for work in works],
        "memory": memory,
    }


def _ratios(ours: list[Work], theirs: list[Work], memory: int | None, their_memory: int | None) -> dict[str, Any]:
    ratios = [
        (one.units / one.seconds) / (other.units / other.seconds) for one, other in zip(ours, theirs, strict=True)
    ]
    low, median, high = np.percentile(ratios, [25, 50, 75]).tolist()
    return {
        "speed": median,
        "speed_quartiles": [low, high],
        "memory": memory / their_memory if memory and their_memory else None,
    }


def compare(benchmark: ModuleType, name: str, threads: int, quick: bool = False) -> dict[str, Any]:
    """Has the sides of a case do their work, and compares them.

    Args:
        benchmark: see the package.
        name: of the case.
        threads: of each side.
        quick: see `Case`; takes two turns.

    Returns:
        The row of the results: the case; for each of `sides` its median `speed`, `flops_per_second`, the `seconds` and
        `units` of each turn and its peak `memory` in bytes; for each of `peers` the median of the ratios of speeds,
        turn by turn, with its quartiles, and the ratio of memories; what was `checked`; and who was `skipped`, why.

    Raises:
        Disagreement: if they don't compute the same; then nothing is timed.
        SideFailed: if one fails.
    """
    case: Case = benchmark.CASES[name]
    parameters = {**case.parameters, **(case.quick or {} if quick else {})}
    warm_up, repetitions = (1, 2) if quick else (case.warm_up, case.repetitions)
    sides = case.sides or list(benchmark.SIDES)
    missing = {side: benchmark.SIDES[side].missing() for side in sides}
    skipped = {side: f"{', '.join(names)} is not installed" for side, names in missing.items() if names}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        if hasattr(benchmark, "write_inputs"):
            benchmark.write_inputs(parameters, Path(folder))
        workers = {
            side: stack.enter_context(closing(Worker(benchmark.__name__, side, threads)))
            for side in sides
            if side not in skipped
        }
        for worker in workers.values():
            worker.send("prepare", parameters, folder)
        for worker in workers.values():
            worker.receive()
        checked = {side: worker.ask("check") for side, worker in workers.items()}
        check_agreement(name, checked, case.tolerance)
        works: dict[str, list[Work]] = {side: [] for side in workers}
        for turn in range(warm_up + repetitions):
            for side, worker in workers.items():
                time.sleep(PAUSE)
                work = Work(*worker.ask("run", turn))
                if turn >= warm_up:
                    works[side].append(work)
        memory = {side: worker.ask("memory") for side, worker in workers.items()}
    ours, *peers = workers
    return {
        "name": name,
        "work": case.work,
        "units": case.units,
        "parameters": parameters,
        "quick": quick,
        "figures": {peer: dict(case.figures.get(peer, {})) for peer in peers},
        "share": case.share,
        "beyond": case.beyond,
        "sides": {side: _summary(works[side], memory[side]) for side in workers},
        "peers": {peer: _ratios(works[ours], works[peer], memory[ours], memory[peer]) for peer in peers},
        "checked": checked,
        "skipped": skipped,
    }
