"""Sharded training: distribution of the weights over the processes, and their gathering afterwards."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from ...modeling.block import TransformerBlock
from ..run.settings import TrainingSettings


def is_sharded(accelerator: Accelerator) -> bool:
    """Returns whether the weights are distributed over the processes."""
    return accelerator.distributed_type == DistributedType.FSDP


def sharding_plugin(settings: TrainingSettings) -> FullyShardedDataParallelPlugin | None:
    """Makes Accelerate's plugin for FSDP2; None unless the settings or `accelerate launch` enable sharding.

    Raises:
        ValueError: if the process was not started by a launcher.
    """
    if settings.sharding == "none" and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    if "RANK" not in os.environ:
        raise ValueError(
            f"`sharding` ({settings.sharding!r}) distributes the weights over processes: launch them with `torchrun`"
        )
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    # Every process makes the same weights, from the seed.
    plugin.cpu_ram_efficient_loading = False
    return plugin


def shard_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Makes Accelerate shard on CPUs, for which it has no option."""
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        accelerator.state.fsdp_plugin = plugin
        # Accelerate copies the state of a new accelerator from the partial state, so both must be changed.
        for state in (accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP


def shard(model: PreTrainedModel, accelerator: Accelerator) -> None:
    """Shards a model with FSDP2 (Zhao et al., 2023, https://arxiv.org/abs/2304.11277), one block at a time.

    All weights outside the blocks form one group. Accelerate would make separate groups of the embeddings and the
    output layer, but a weight that they share must be in one group.
    """
    # The scores of every model are such a view; nothing here changes them in place.
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
    """Calls `Accelerator.prepare` for a model and its optimizer, which must be made after `shard`."""
    kept = [list(group["params"]) for group in optimizer.param_groups]
    model, optimizer = accelerator.prepare(model, optimizer)
    if is_sharded(accelerator):
        # Accelerate matches weights by their address, but weights of which this process has no part have no address.
        for group, weights in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = weights
    return model, optimizer


def full_tensor(value: Tensor) -> Tensor:
    """Gathers a tensor if it is distributed over the processes."""
    return value.full_tensor() if isinstance(value, dist.tensor.DTensor) else value


def gather_model(prepared: nn.Module, accelerator: Accelerator) -> PreTrainedModel:
    """Unwraps the trained model. Every process must call this function.

    Returns:
        The model. If it is sharded, the main process gets a full copy on the CPU, and each other process its own part.
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
