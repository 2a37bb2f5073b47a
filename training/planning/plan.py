"""Planning a training run: what a model's training takes in memory, operations and time, before it is started.

Parameters are counted; what a step computes and keeps is found out by running a small one, see `rehearsal`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel

from ..families.base import Recipe
from ..run.settings import make_settings
from .trial_step import TrialResult, TrialStep

TOKENS = 10**9

# A step is tried out on as many examples as need no more operations than this, but on two at least.
_OPERATIONS = 2e11


@dataclass(frozen=True)
class Parameters:
    """How many parameters a model has; those that two parts share are counted once, with the first of them.

    Attributes:
        total: of all parts.
        trainable: those that are trained.
        embeddings: of tokens, positions and segments.
        backbone: of a captioner's encoder.
        blocks: of what lies between.
        heads: of what predicts.
    """

    total: int
    trainable: int
    embeddings: int
    backbone: int
    blocks: int
    heads: int


@dataclass(frozen=True)
class Memory:
    """What lies in the memory of each device, in bytes.

    Attributes:
        weights: the model's, in float32, whatever the precision.
        gradients: as large as the weights that are trained.
        communication: of several devices: what gradients are exchanged in, or with sharding the weights that are whole
            at once and their gradients.
        optimizer: AdamW's two moments of each weight.
        activations: what the forward pass keeps for the backward pass.
        peak: the most there is at once. Gradients come as activations go, so it may be less than the sum; and there
            are intermediate results, so it may be more.
    """

    weights: int
    gradients: int
    communication: int
    optimizer: int
    activations: int
    peak: int


@dataclass(frozen=True)
class Plan:
    """What a training run takes.

    Attributes:
        family: name of the model's family.
        architecture: the model's class.
        device: the kind of device that it was planned on, and for.
        devices: how many there are.
        sharding: "none" or "fsdp".
        precision: of the computation.
        batch_size: examples per step, over all devices.
        accumulation: parts in which each device computes its share.
        examples: that a device computes at once.
        max_length: of an example, in tokens.
        vocab_size: number of tokens.
        parameters: of the model.
        memory: of each device.
        flops_per_token: floating point operations of a step for each of its tokens, forward and backward.
        tokens_per_step: over all devices.
        tokens: to train on.
        steps: for so many tokens.
        flops: for so many tokens.
        speed: of one device in tokens per second; None if neither given nor measured.
        measured: whether the speed was measured here.
        efficiency: share of that speed that each of several devices keeps.
        seconds: for so many tokens; None without a speed.
        notes: what was assumed.
    """

    family: str
    architecture: str
    device: str
    devices: int
    sharding: str
    precision: str
    batch_size: int
    accumulation: int
    examples: int
    max_length: int
    vocab_size: int
    parameters: Parameters
    memory: Memory
    flops_per_token: float
    tokens_per_step: int
    tokens: int
    steps: int
    flops: float
    speed: float | None
    measured: bool
    efficiency: float
    seconds: float | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def plan(
    family: Recipe,
    settings: dict[str, Any] | None = None,
    *,
    devices: int = 1,
    tokens: float | None = None,
    speed: float | None = None,
    measure: bool = False,
    efficiency: float = 1.0,
) -> Plan:
    """Tells what a training run takes, for devices of the kind that it would run on here.

    Args:
        family: of the model.
        settings: fields of the family's settings by name.
        devices: how many share each batch.
        tokens: to train on, as training counts them; those of the settings' `steps` if None, or a billion.
        speed: of one device, in tokens per second.
        measure: whether to measure the speed here, with some steps on made-up data.
        efficiency: share of the speed that each of several devices keeps.

    Raises:
        ValueError: for settings or arguments that won't do, or a model that is too large to be tried out here.
    """
    _check(devices, tokens, speed, measure, efficiency)
    chosen: Any = make_settings(family.settings_class, settings or {})
    examples, rest = divmod(chosen.batch_size, devices * chosen.accumulation)
    if rest:
        raise ValueError(
            f"`batch_size` ({chosen.batch_size}) must be a multiple of {devices * chosen.accumulation}: "
            f"{devices} devices times `accumulation` ({chosen.accumulation})"
        )
    processor = None
    if chosen.tokenizer is None:
        chosen = _with_vocabulary(chosen)
    else:
        processor = family.make_processor(chosen, Dataset.from_dict({}))
    with torch.device("meta"):
        model = family.make_model(chosen, processor)
    tokens_per_step = family.synthetic_batch(chosen, model.config, 1)[1] * chosen.batch_size
    _require_room(model)

    rehearsal = TrialStep(family, chosen, processor)
    small, large = _run_trial(rehearsal, examples, again=chosen.accumulation > 1)
    flops_per_token = large.flops / large.tokens
    if measure:
        speed = rehearsal.measure_speed(examples)
    if tokens is None:
        tokens = chosen.steps * tokens_per_step if chosen.steps else TOKENS
    return Plan(
        family=family.name,
        architecture=type(model).__name__,
        device=rehearsal.device.type,
        devices=devices,
        sharding=chosen.sharding,
        precision=chosen.precision,
        batch_size=chosen.batch_size,
        accumulation=chosen.accumulation,
        examples=examples,
        max_length=chosen.max_length,
        vocab_size=model.config.vocab_size,
        parameters=count_parameters(model),
        memory=_memory(model, small, large, examples, devices, chosen.sharding, chosen.precision),
        flops_per_token=flops_per_token,
        tokens_per_step=tokens_per_step,
        tokens=round(tokens),
        steps=ceil(tokens / tokens_per_step),
        flops=flops_per_token * tokens,
        speed=speed,
        measured=measure,
        efficiency=efficiency,
        seconds=None if speed is None else tokens / (speed * devices * efficiency),
        notes=tuple(_notes(chosen, model)),
    )


def _check(devices: int, tokens: float | None, speed: float | None, measure: bool, efficiency: float) -> None:
    if devices < 1:
        raise ValueError(f"`devices` ({devices}) must be at least 1")
    for name, value in (("tokens", tokens), ("speed", speed)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"`{name}` ({value:g}) must be more than 0")
    if not 0 < efficiency <= 1:
        raise ValueError(f"`efficiency` ({efficiency:g}) must be more than 0 and at most 1")
    if measure and speed is not None:
        raise ValueError(f"`speed` ({speed:g}) is given, and `measure` asks to find it out: choose one of them")


def _with_vocabulary(settings: Any) -> Any:
    """The settings with the size of the vocabulary that is to be trained, where they tell it."""
    told = hasattr(settings, "vocab_size") and getattr(settings, "units", "pieces") == "pieces"
    if not told or "vocab_size" in settings.config:
        return settings
    return replace(settings, config={**settings.config, "vocab_size": settings.vocab_size})


def _notes(settings: Any, model: PreTrainedModel) -> Iterator[str]:
    if settings.tokenizer is None and "vocab_size" not in settings.config:
        yield (
            f"the tokenizer is made from the data; a vocabulary of {model.config.vocab_size:,} tokens is assumed, and "
            "vocab_size in `config` plans for another"
        )
    if settings.compile:
        yield "planned without `compile`, which saves some of the memory and time"


def _require_room(model: PreTrainedModel) -> None:
    """Refuses a model whose weights and gradients don't fit into this machine's memory."""
    if torch.accelerator.is_available() or not hasattr(os, "sysconf"):
        return
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = 2 * sum(parameter.nbytes for parameter in model.parameters())
    if needed > room:
        raise ValueError(
            f"a model of {model.num_parameters():,} parameters can't be tried out here: it needs "
            f"{needed / 2**30:.1f} GiB for weights and gradients, and there are {room / 2**30:.1f}"
        )


def count_parameters(model: nn.Module) -> Parameters:
    """Counts a model's parameters by the part that they belong to, as their names tell it."""
    counts = dict.fromkeys(("embeddings", "backbone", "blocks", "heads"), 0)
    for name, parameter in model.named_parameters():
        counts[_part(name.split("."))] += parameter.numel()
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Parameters(total=sum(counts.values()), trainable=trainable, **counts)


def _part(names: list[str]) -> str:
    if "backbone" in names:
        return "backbone"
    if "embeddings" in names or "tokens" in names:
        return "embeddings"
    if names[0].endswith("head") or "pooler" in names:
        return "heads"
    return "blocks"


def _run_trial(rehearsal: TrialStep, examples: int, again: bool) -> tuple[TrialResult, TrialResult]:
    """A small and a larger pass; the larger has all examples, where these are few."""
    small = rehearsal.run(min(examples, 2), again)
    number = min(examples, max(2 * small.rows, int(small.rows * _OPERATIONS / small.flops)))
    return small, rehearsal.run(number, again) if number > small.rows else small


def _extrapolated(small: float, large: float, share: float) -> float:
    return large + (large - small) * share


def _memory(
    model: PreTrainedModel,
    small: TrialResult,
    large: TrialResult,
    examples: int,
    devices: int,
    sharding: str,
    precision: str,
) -> Memory:
    # What is made for each example grows with their number, and nothing grows faster.
    further = (examples - large.rows) / max(1, large.rows - small.rows)
    parts = devices if sharding == "fsdp" else 1
    weights = sum(parameter.nbytes for parameter in model.parameters()) / parts
    weights += sum(buffer.nbytes for buffer in model.buffers())
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad) / parts
    optimizer = 2 * gradients
    communication = 0.0
    if devices > 1:
        communication = _gathered_bytes(model, precision) if sharding == "fsdp" else gradients
    highest = max(
        _extrapolated(few, more, further) + held / parts
        for few, more, held in zip(small.peaks, large.peaks, large.gradients, strict=True)
    )
    return Memory(
        weights=round(weights),
        gradients=round(gradients),
        communication=round(communication),
        optimizer=round(optimizer),
        activations=round(_extrapolated(small.saved, large.saved, further)),
        peak=round(weights + optimizer + communication + highest),
    )


def _blocks(module: nn.Module, names: frozenset[str]) -> Iterator[nn.Module]:
    """The outermost modules of classes with these names."""
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _blocks(child, names)


def _gathered_bytes(model: PreTrainedModel, precision: str) -> float:
    """Of a sharded model, the weights that are whole at once, and their gradients.

    These are what belongs to no block, one block that is computed and one that is fetched meanwhile.
    """
    sizes = [
        sum(parameter.numel() for parameter in block.parameters())
        for block in _blocks(model, frozenset(model._no_split_modules or ()))
    ]
    rest, largest = model.num_parameters() - sum(sizes), max(sizes, default=0)
    return (4 if precision == "no" else 2) * (2 * rest + 3 * largest)
