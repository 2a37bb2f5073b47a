"""Processes that are launched together, forked from the test's own: importing takes far longer than what they do."""

import os
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

from tests.training.loop.test_distributed import free_port


def _process(work: Callable[[], Any], environment: dict[str, str], told: Any, rank: int) -> None:
    os.environ.update(environment)
    try:
        told.put((rank, work()))
    except (OSError, ValueError, ArithmeticError) as error:
        told.put((rank, f"{type(error).__name__}: {error}"))


def fork(
    work: Callable[[], Any],
    number: int,
    ranks: list[int] | None = None,
    killed: int = 0,
    patience: float = 30,
    **changes: dict[int, str],
) -> dict[int, Any]:
    """Has processes do some work, and gives what came of it by rank.

    Args:
        work: gives what is told; of an error its name and message are.
        number: of the processes of the launch.
        ranks: of those that are started; None: all.
        killed: how many of them tell nothing.
        patience: seconds to wait for what each of them tells.
        changes: of the environment, by name and rank.
    """
    context = get_context("fork")
    told = context.Queue()
    shared = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for rank in range(number) if ranks is None else ranks:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(number), **shared}
        own |= {name: value[rank] for name, value in changes.items() if rank in value}
        started.append(context.Process(target=_process, args=(work, own, told, rank)))
        started[-1].start()
    results = dict(told.get(timeout=patience) for _ in started[killed:])
    for process in started:
        process.join()
    return results
