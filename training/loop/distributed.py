"""Several processes: they find each other, take turns, share the weights out and bring them together again."""

from __future__ import annotations

import copy
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from itertools import groupby
from logging import getLogger
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from ...modeling.block import TransformerBlock
from ..run.settings import TrainingSettings, to_dict

logger = getLogger("regard.training")

# How long the first meeting may take, and how long one process may then prepare data while the others wait.
PATIENCE, WORK = timedelta(seconds=60), timedelta(days=1)
_LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@contextmanager
def meeting(settings: TrainingSettings) -> Iterator[None]:
    """Makes sure that the processes of a launch are all there, run the same and can talk, before they are joined.

    Joining them tells nothing of that for many minutes, and then not who is missing.

    Args:
        settings: of the run, which must be the same everywhere.

    Raises:
        ConnectionError: naming the processes that are missing, doubled, different or out of reach.
    """
    if not os.environ.keys() >= _LAUNCHED or int(os.environ["WORLD_SIZE"]) == 1 or dist.is_initialized():
        yield
        return
    rank, size, host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), socket.gethostname()
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    seconds = f"{PATIENCE.total_seconds():.0f} seconds"
    try:
        # A launcher's agent may serve the store itself, also to processes that it starts again.
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        served = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=rank == 0 and not by_agent,
            timeout=PATIENCE,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:  # the latter for a port that is none
        raise ConnectionError(
            f"process {rank} of {size} on {host} did not meet the first one at {place} within {seconds}: it must run, "
            f"and `MASTER_ADDR` and `MASTER_PORT` be the same for all ({_first_line(error)})"
        ) from None
    # The agent's store may remember those of earlier starts, whose ranks it gave them; another is new.
    start = served.add(f"meetings/{rank}", 1)
    if start > 1 and not by_agent:
        raise ConnectionError(f"two processes at {place} have the `RANK` {rank}: each needs its own, below {size}")
    store = dist.PrefixStore(f"meeting-{start}", served)
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")}
    problem = _roll_call(store, rank, size, place, {"host": host, **versions, **to_dict(settings)})
    if problem:
        raise ConnectionError(problem)
    with _told(
        f"process {rank} of {size} on {host} came to {place}, but did not reach the others within {seconds}: "
        "`GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` name the network interface to use"
    ):
        try:
            # On a group of its own, as only the making of one obeys a short time-out.
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
            dist.all_reduce(torch.ones(()))
        finally:
            if dist.is_initialized():
                drain()
                dist.destroy_process_group()
        if start > 1:
            _leave_the_agents_store(store, rank)
        # The first process serves the store to the others, so it must be there until they are joined.
        yield
        del served
        dist.all_reduce(torch.ones((), device=PartialState().device), async_op=True).wait(PATIENCE)
    logger.info("Process %d of %d on %s, joined at %s over %s.", rank, size, host, place, dist.get_backend())


def _leave_the_agents_store(store: dist.Store, rank: int) -> None:
    # After a restart the processes would find in it where those were that have ended.
    if rank == 0:
        with socket.create_server(("", 0)) as free:
            store.set("port", str(free.getsockname()[1]))
    os.environ |= {"MASTER_PORT": store.get("port").decode(), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def drain() -> None:
    """Lets PyTorch's threads let go of what they have sent, before their group is ended.

    For that they need Python's lock. Who ends the group holds it and waits for them: for ever, if they came too late.
    """
    time.sleep(0.2)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Tells in one line what an error of PyTorch's communication means."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"{what} ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _roll_call(store: dist.Store, rank: int, size: int, place: str, card: dict[str, Any]) -> str:
    """What is wrong with the processes, as the first of them finds it; nothing if all is well."""
    store.set(f"card/{rank}", json.dumps(card))
    end = time.monotonic() + PATIENCE.total_seconds()
    try:
        if rank:
            store.wait(["verdict"], 2 * PATIENCE)
            problem = store.get("verdict").decode()
            store.add("read", 1)
            return problem
        missing = list(range(size))
        while missing and time.monotonic() < end:
            time.sleep(0.05)
            missing = [other for other in missing if not store.check([f"card/{other}"])]
        cards = {each: json.loads(store.get(f"card/{each}")) for each in range(size) if each not in missing}
        problem = _differences(cards)
        if missing:
            problem = (
                f"{len(missing)} of {size} processes did not come to {place} within "
                f"{PATIENCE.total_seconds():.0f} seconds: rank {', '.join(map(str, missing))}; "
                "each must be launched, with the same address and port"
            )
        store.set("verdict", problem)
        # It serves the others until they know.
        while problem and store.add("read", 0) < len(cards) - 1 and time.monotonic() < end + 5:
            time.sleep(0.05)
    except RuntimeError as error:
        return f"process {rank} of {size} lost the first one at {place}: {_first_line(error)}"
    if not problem:
        runs = [(host, list(each)) for host, each in groupby(range(size), lambda each: cards[each]["host"])]
        hosts = ", ".join(f"{each[0]} to {each[-1]} on {host}" for host, each in runs)
        logger.info("%d processes met at %s: %s.", size, place, hosts)
    return problem


def _differences(cards: dict[int, dict[str, Any]]) -> str:
    for rank, card in cards.items():
        for name in (card.keys() | cards[0].keys()) - {"host"}:
            if card.get(name) != cards[0].get(name):
                return (
                    f"process {rank} on {card['host']} has another `{name}` ({card.get(name)!r}) "
                    f"than process 0 on {cards[0]['host']} ({cards[0].get(name)!r})"
                )
    return ""


@contextmanager
def rank_ordered(accelerator: Accelerator) -> Iterator[None]:
    """Lets the first process work alone, then the first of each other machine, then the rest.

    What the first one leaves on a disk that is shared, the others find there; what is cached on the machine's own, one
    process makes for all of that machine. None is given up, however long it takes.

    Raises:
        ConnectionError: if a process ends meanwhile.
    """
    if accelerator.num_processes == 1:
        yield
        return
    turn = 0 if accelerator.is_main_process else 1 if accelerator.is_local_main_process else 2
    with _told("another process has ended, and says why itself"):
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        for _ in range(turn):
            dist.monitored_barrier(group, WORK)
    yield
    with _told("another process has ended, and says why itself"):
        for _ in range(3 - turn):
            dist.monitored_barrier(group, WORK)
    drain()
    dist.destroy_process_group(group)


# Sharding


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether the weights are shared out over the processes."""
    return accelerator.distributed_type == DistributedType.FSDP


def sharding_plugin(settings: TrainingSettings) -> FullyShardedDataParallelPlugin | None:
    """What Accelerate needs for FSDP2, if the settings or `accelerate launch` ask for it.

    Raises:
        ValueError: if there is one process, and no launcher.
    """
    if settings.sharding == "none" and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    if "RANK" not in os.environ:
        raise ValueError(
            f"`sharding` ({settings.sharding!r}) shares the weights out over processes: launch them with `torchrun`"
        )
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    # Each process makes the same weights, from the seed.
    plugin.cpu_ram_efficient_loading = False
    return plugin


def shard_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Has Accelerate shard on CPUs, for which it has all that is needed but does not offer it."""
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        accelerator.state.fsdp_plugin = plugin
        # The second is what the first is read from anew.
        for state in (accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP


def shard(model: PreTrainedModel, accelerator: Accelerator) -> None:
    """Shares the weights out with FSDP2 (Zhao et al., 2023, https://arxiv.org/abs/2304.11277), a block at a time.

    All outside of the blocks stays one group. Accelerate would make others for embeddings and output layer, but
    weights that more than two layers share must be in one.
    """
    # Of every model's scores; nothing here changes them in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    plugin = accelerator.state.fsdp_plugin
    options = {
        "offload_policy": plugin.cpu_offload,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
    }
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            fully_shard(module, reshard_after_forward=plugin.reshard_after_forward, **options)
    fully_shard(model, **options)


def prepare(model: PreTrainedModel, optimizer: Any, accelerator: Accelerator) -> tuple[Any, Any]:
    """`Accelerator.prepare` for a model and its optimizer, made after `shard` if the model is sharded."""
    kept = [list(group["params"]) for group in optimizer.param_groups]
    model, optimizer = accelerator.prepare(model, optimizer)
    if is_sharded(accelerator):
        # It finds the weights by their place in memory, and those of which this process has no part have none.
        for group, weights in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = weights
    return model, optimizer


def whole(value: Tensor) -> Tensor:
    """A tensor of which each process may have a part."""
    return value.full_tensor() if isinstance(value, dist.tensor.DTensor) else value


def gather(prepared: nn.Module, accelerator: Accelerator) -> PreTrainedModel:
    """The trained model, whole and without what training put around it.

    Of a sharded one the first process alone gets it, on the CPU; the others get their part. All must call this.
    """
    model = accelerator.unwrap_model(prepared)
    if not is_sharded(accelerator):
        return model
    state = accelerator.get_state_dict(prepared)
    if not accelerator.is_main_process:
        return model
    gathered = type(model)(copy.deepcopy(model.config))
    gathered.generation_config = getattr(model, "generation_config", None)
    gathered.load_state_dict(state)
    return gathered
