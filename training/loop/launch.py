"""Several processes: checking that all of them can work together, joining them, and letting them take turns."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from itertools import groupby
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState

from ..run.settings import TrainingSettings, to_dict
from .sharding import shard_on_cpu, sharding_plugin

logger = getLogger("regard.training")

# The longest wait for another process to connect, and for one that prepares data while the others wait.
TIMEOUT, WORK_TIMEOUT = timedelta(seconds=60), timedelta(days=1)
_LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def make_accelerator(settings: TrainingSettings, folder: Path) -> Accelerator:
    """Makes the accelerator of a run, with its trackers, and joins the processes of the launch.

    Args:
        settings: settings of the run.
        folder: folder of the run, which gets the trackers' `logs`.

    Raises:
        ValueError: if the batch can't be split over the processes, or a device or tracker is not available.
        ConnectionError: if the processes don't find each other, or differ in versions or settings.
    """
    trackers = [name for name in settings.log_with if name != "none"] or None
    plugin = sharding_plugin(settings)
    with rendezvous_check(settings):
        accelerator = Accelerator(
            # Without this, processes on CPUs are not joined.
            cpu=not torch.accelerator.is_available(),
            mixed_precision=settings.precision,
            log_with=trackers,
            project_dir=str(folder / "logs"),
            fsdp_plugin=plugin,
        )
    if plugin is not None:
        shard_on_cpu(accelerator, plugin)
    for name in trackers or ():
        # Accelerate skips a tracker that is not installed, silently if there are others.
        if name != "all" and name not in map(str, accelerator.log_with):
            raise ValueError(f"`log_with` ({name!r}) is a tracker that is not installed")
    parts = accelerator.num_processes * settings.accumulation
    if settings.batch_size % parts:
        raise ValueError(
            f"`batch_size` ({settings.batch_size}) must be a multiple of {parts}: "
            f"{accelerator.num_processes} processes times `accumulation` ({settings.accumulation})"
        )
    return accelerator


@contextmanager
def rendezvous_check(settings: TrainingSettings) -> Iterator[None]:
    """Checks that all processes of a launch are running, agree and can communicate; the body must join them.

    PyTorch by itself waits for a missing process for many minutes, and does not say which one is missing.

    Args:
        settings: settings of the run, which must be the same in all processes.

    Raises:
        ConnectionError: naming the processes that are missing, duplicate, different or unreachable.
    """
    if not os.environ.keys() >= _LAUNCHER_VARIABLES or int(os.environ["WORLD_SIZE"]) == 1 or dist.is_initialized():
        yield
        return
    rank, size, host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), socket.gethostname()
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    seconds = f"{TIMEOUT.total_seconds():.0f} seconds"
    try:
        # The launcher's agent may serve the store itself, also to processes that it restarts.
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        served = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=rank == 0 and not by_agent,
            timeout=TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:  # a ValueError for an invalid port
        raise ConnectionError(
            f"process {rank} of {size} on {host} did not reach process 0 at {address} within {seconds}: process 0 "
            f"must be running, and `MASTER_ADDR` and `MASTER_PORT` be the same for all ({_first_line(error)})"
        ) from None
    # An agent's store also counts the starts before a restart; in another store, a second process has this rank.
    start = served.add(f"starts/{rank}", 1)
    if start > 1 and not by_agent:
        raise ConnectionError(f"two processes at {address} have the `RANK` {rank}: each needs its own, below {size}")
    store = dist.PrefixStore(f"start-{start}", served)
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")}
    problem = _exchange_rank_info(store, rank, size, address, {"host": host, **versions, **to_dict(settings)})
    if problem:
        raise ConnectionError(problem)
    with _explained(
        f"process {rank} of {size} on {host} connected to {address}, but did not reach the others within {seconds}: "
        "`GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` name the network interface to use"
    ):
        try:
            # A group of its own, as only the creation of a group obeys a short timeout.
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
            dist.all_reduce(torch.ones(()))
        finally:
            if dist.is_initialized():
                drain()
                dist.destroy_process_group()
        if start > 1:
            _leave_agent_store(store, rank)
        yield
        # Process 0 may serve the store to the others, so it must keep it until all are joined.
        del served
        dist.all_reduce(torch.ones((), device=PartialState().device), async_op=True).wait(TIMEOUT)
    logger.info("Process %d of %d on %s, joined at %s over %s.", rank, size, host, address, dist.get_backend())


def _leave_agent_store(store: dist.Store, rank: int) -> None:
    # After a restart, the agent's store still has the addresses of the processes that have ended.
    if rank == 0:
        with socket.create_server(("", 0)) as free:
            store.set("port", str(free.getsockname()[1]))
    os.environ |= {"MASTER_PORT": store.get("port").decode(), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _exchange_rank_info(store: dist.Store, rank: int, size: int, address: str, rank_info: dict[str, Any]) -> str:
    """Sends a process's host, versions and settings to process 0, which compares those of all processes.

    Returns:
        The problem that process 0 has found; empty if there is none.
    """
    store.set(f"rank_info/{rank}", json.dumps(rank_info))
    end = time.monotonic() + TIMEOUT.total_seconds()
    try:
        if rank:
            store.wait(["problem"], 2 * TIMEOUT)
            problem = store.get("problem").decode()
            store.add("read", 1)
            return problem
        missing = list(range(size))
        while missing and time.monotonic() < end:
            time.sleep(0.05)
            missing = [other for other in missing if not store.check([f"rank_info/{other}"])]
        found = {each: json.loads(store.get(f"rank_info/{each}")) for each in range(size) if each not in missing}
        problem = _first_difference(found)
        if missing:
            problem = (
                f"{len(missing)} of {size} processes did not connect to {address} within "
                f"{TIMEOUT.total_seconds():.0f} seconds: rank {', '.join(map(str, missing))}; "
                "each must be launched, with the same address and port"
            )
        store.set("problem", problem)
        # Process 0 serves the store, so it waits until the others have read the problem.
        while problem and store.add("read", 0) < len(found) - 1 and time.monotonic() < end + 5:
            time.sleep(0.05)
    except RuntimeError as error:
        return f"process {rank} of {size} lost the connection to process 0 at {address}: {_first_line(error)}"
    if not problem:
        runs = [(host, list(each)) for host, each in groupby(range(size), lambda each: found[each]["host"])]
        hosts = ", ".join(f"{each[0]} to {each[-1]} on {host}" for host, each in runs)
        logger.info("%d processes met at %s: %s.", size, address, hosts)
    return problem


def _first_difference(found: dict[int, dict[str, Any]]) -> str:
    for rank, rank_info in found.items():
        for name in (rank_info.keys() | found[0].keys()) - {"host"}:
            if rank_info.get(name) != found[0].get(name):
                return (
                    f"process {rank} on {rank_info['host']} has another `{name}` ({rank_info.get(name)!r}) "
                    f"than process 0 on {found[0]['host']} ({found[0].get(name)!r})"
                )
    return ""


@contextmanager
def rank_ordered(accelerator: Accelerator) -> Iterator[None]:
    """Runs the body in the first process, then in the first of each other machine, then in all others.

    So the first process makes what lies on a disk that all machines share, and one process of each machine makes what
    is cached on that machine alone. The others wait however long that takes.

    Raises:
        ConnectionError: if another process ends meanwhile.
    """
    if accelerator.num_processes == 1:
        yield
        return
    turn = 0 if accelerator.is_main_process else 1 if accelerator.is_local_main_process else 2
    with _explained("another process has ended, and says why itself"):
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        for _ in range(turn):
            dist.monitored_barrier(group, WORK_TIMEOUT)
    yield
    with _explained("another process has ended, and says why itself"):
        for _ in range(3 - turn):
            dist.monitored_barrier(group, WORK_TIMEOUT)
    drain()
    dist.destroy_process_group(group)


def drain() -> None:
    """Gives PyTorch's threads time to release what they have sent, before their process group is destroyed.

    Releasing it takes Python's lock. Destroying the group holds that lock while it waits for the threads, so a thread
    that has not released everything by then blocks it for ever.
    """
    time.sleep(0.2)


@contextmanager
def _explained(meaning: str) -> Iterator[None]:
    """Raises errors of PyTorch's communication as a ConnectionError of one line that says what they mean."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"{meaning} ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
