"""Estimates of a training run's memory, operations and time, made before it starts.

Parameters are counted; operations and memory are measured in a small trial step and extrapolated.
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

from ..families.recipes import recipe_of
from ..run.settings import make_settings
from .trial_step import TrialResult, TrialStep

TOKENS = 10**9

# A trial step has as many examples as this number of operations allows, but at least two.
_OPERATIONS = 2e11


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of a model. Parameters that two parts share count once, in the first part.

    Attributes:
        total: parameters of all parts.
        trainable: parameters that are trained.
        embeddings: parameters of the embeddings of tokens, positions and segments.
        backbone: parameters of a captioner's backbone.
        blocks: parameters of the layers between embeddings and heads.
        heads: parameters of the output layers.
    """

    total: int
    trainable: int
    embeddings: int
    backbone: int
    blocks: int
    heads: int


@dataclass(frozen=True)
class Memory:
    """Bytes in the memory of each device.

    Attributes:
        weights: the model's weights, which are in float32 with every precision.
        gradients: the gradients of the weights that are trained.
        communication: the buffers in which several devices exchange gradients; with sharding, the weights that are
            gathered at once and their gradients.
        optimizer: AdamW's two moments of each weight that is trained.
        activations: the tensors that the forward pass keeps for the backward pass.
        peak: the largest total at one moment. It may be less than the sum, because activations are freed while
            gradients are made, or more, because of intermediate results.
    """

    weights: int
    gradients: int
    communication: int
    optimizer: int
    activations: int
    peak: int


@dataclass(frozen=True)
class Plan:
    """The estimated memory, operations and time of a training run.

    Attributes:
        family: name of the model's family.
        architecture: name of the model's class.
        device: kind of the device that the run was planned on and for.
        devices: number of devices.
        sharding: "none" or "fsdp".
        precision: precision of the computation.
        batch_size: examples per step, over all devices.
        accumulation: number of parts in which each device computes its share.
        examples: number of examples that a device computes at once.
        max_length: length of the longest example, in tokens.
        vocab_size: number of tokens in the vocabulary.
        parameters: numbers of parameters.
        memory: memory of each device.
        flops_per_token: floating point operations of a step, forward and backward, for each of its tokens.
        tokens_per_step: tokens of a step, over all devices.
        tokens: number of tokens to train on.
        steps: number of steps for these tokens.
        flops: floating point operations for these tokens.
        speed: tokens per second of one device; None if neither given nor measured.
        measured: whether the speed was measured on this machine.
        efficiency: share of its speed that each of several devices keeps.
        seconds: time for these tokens; None without a speed.
        notes: the assumptions that were made.
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
        """Returns the plan as plain values."""
        return asdict(self)


def plan_training(
    family: str,
    settings: dict[str, Any] | None = None,
    *,
    devices: int = 1,
    tokens: float | None = None,
    speed: float | None = None,
    measure: bool = False,
    efficiency: float = 1.0,
) -> Plan:
    """Estimates the memory, operations and time of a training run on devices of the kind that this machine has.

    Args:
        family: name of the model's family.
        settings: fields of the family's settings by name.
        devices: number of devices that share each batch.
        tokens: number of tokens to train on, as training counts them; None: those of the settings' `steps`, or else a
            billion.
        speed: tokens per second of one device.
        measure: whether to measure the speed on this machine, with some steps on synthetic data.
        efficiency: share of the speed that each of several devices keeps.

    Raises:
        ValueError: if there is no such family, settings or arguments are out of range, or the model is too large to be
            tried out here.
    """
    _check(devices, tokens, speed, measure, efficiency)
    recipe = recipe_of(family)
    chosen: Any = make_settings(recipe.settings_class, settings or {})
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
        processor = recipe.make_processor(chosen, Dataset.from_dict({}))
    with torch.device("meta"):
        model = recipe.make_model(chosen, processor)
    tokens_per_step = recipe.synthetic_batch(chosen, model.config, 1)[1] * chosen.batch_size
    _require_room(model)

    trial = TrialStep(recipe, chosen, processor)
    small, large = _run_trial(trial, examples, again=chosen.accumulation > 1)
    flops_per_token = large.flops / large.tokens
    if measure:
        speed = trial.measure_speed(examples)
    if tokens is None:
        tokens = chosen.steps * tokens_per_step if chosen.steps else TOKENS
    return Plan(
        family=recipe.name,
        architecture=type(model).__name__,
        device=trial.device.type,
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
    """Returns the settings with the size of the vocabulary that will be trained, if they have one."""
    is_known = hasattr(settings, "vocab_size") and getattr(settings, "units", "pieces") == "pieces"
    if not is_known or "vocab_size" in settings.config:
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
    """Raises a ValueError if weights and gradients of the model don't fit into this machine's memory."""
    if torch.accelerator.is_available() or not hasattr(os, "sysconf"):
        return
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = 2 * sum(parameter.nbytes for parameter in model.parameters())
    if needed > room:
        raise ValueError(
            f"a model of {model.num_parameters():,} parameters can't be tried out here: it needs "
            f"{needed / 2**30:.1f} GiB for weights and gradients, and this machine has {room / 2**30:.1f}"
        )


def count_parameters(model: nn.Module) -> Parameters:
    """Counts the parameters of each part of a model; their names determine the part."""
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


def _run_trial(trial: TrialStep, examples: int, again: bool) -> tuple[TrialResult, TrialResult]:
    """Runs a small and a larger pass; if there are few examples, the larger one has all of them."""
    small = trial.run(min(examples, 2), again)
    number = min(examples, max(2 * small.rows, int(small.rows * _OPERATIONS / small.flops)))
    return small, trial.run(number, again) if number > small.rows else small


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
    # Memory is linear in the number of examples.
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
    """Yields the outermost modules whose classes have these names."""
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _blocks(child, names)


def _gathered_bytes(model: PreTrainedModel, precision: str) -> float:
    """Estimates the bytes of a sharded model's weights that are gathered at once, and of their gradients.

    These are all weights outside of blocks, one block that is computed, and one that is fetched meanwhile.
    """
    sizes = [
        sum(parameter.numel() for parameter in block.parameters())
        for block in _blocks(model, frozenset(model._no_split_modules or ()))
    ]
    rest, largest = model.num_parameters() - sum(sizes), max(sizes, default=0)
    return (4 if precision == "no" else 2) * (2 * rest + 3 * largest)
