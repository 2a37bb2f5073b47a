"""Planning a training run: what `regard plan` does."""

from __future__ import annotations

from typing import Any

import torch

from ..training.families.registry import TRAINABLE
from ..training.planning.plan import Plan, plan

# The settings of training that change what it takes.
PLANNED = frozenset(
    {
        "size",
        "config",
        "dropout",
        "max_length",
        "batch_size",
        "accumulation",
        "precision",
        "sharding",
        "steps",
        "tokenizer",
        "vocab_size",
        "units",
        "mask_rate",
        "next_sentence",
        "alignment",
        "rnn_type",
        "image_size",
        "backbone",
        "freeze_backbone",
        "decoder_type",
        "attention_regularization",
    }
)

_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


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
    """Tells what a training run takes: parameters, memory of each device, operations and time.

    The result and the errors are those of `training.planning.plan`.

    Args:
        family: name of the model's family.
        settings: fields of the family's settings by name.
        devices: how many share each batch.
        tokens: to train on, as training counts them; those of the settings' `steps` if None, or a billion.
        speed: of one device, in tokens per second.
        measure: whether to measure the speed here.
        efficiency: share of its speed that each of several devices keeps.

    Raises:
        ValueError: if there is no such family.
    """
    if family not in TRAINABLE:
        raise ValueError(f"`family` ({family!r}) must be one of {', '.join(TRAINABLE)}")
    return plan(
        TRAINABLE[family],
        settings,
        devices=devices,
        tokens=tokens,
        speed=speed,
        measure=measure,
        efficiency=efficiency,
    )


def plan_lines(made: Plan) -> list[str]:
    """A plan for people."""
    parameters, memory = made.parameters, made.memory
    parts = {name: getattr(parameters, name) for name in ("embeddings", "backbone", "blocks", "heads")}
    named = ", ".join(f"{name} {number:,}" for name, number in parts.items() if number)
    frozen = parameters.total - parameters.trainable
    counted = "examples" if made.family != "captioner" else "images"
    devices = f"{made.devices} {made.device} device{'s' if made.devices > 1 else ''}"
    rows = [
        ("Model", f"{made.architecture}, {made.vocab_size:,} tokens in its vocabulary"),
        ("Parameters", f"{parameters.total:,}: {named}" + (f"; {frozen:,} are not trained" if frozen else "")),
        ("Batch", f"{made.batch_size:,} {counted}, {made.tokens_per_step:,} tokens a step; {_shares(made)}"),
        ("", ""),
        ("Memory", f"of each of {devices}" if made.devices > 1 else f"of {devices}"),
        ("  weights", _size(memory.weights)),
        ("  gradients", _size(memory.gradients)),
        ("  communication", _size(memory.communication)),
        ("  optimizer", _size(memory.optimizer)),
        ("  activations", _size(memory.activations)),
        ("  at most at once", _size(memory.peak)),
        ("", ""),
        ("Operations", f"{_flops(made.flops_per_token)} a token"),
        ("Training", f"{made.tokens:,} tokens, {made.steps:,} steps, {_flops(made.flops)}"),
        *_time_rows(made),
    ]
    rows = [(name, text) for name, text in rows if name != "  communication" or memory.communication]
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {text}".rstrip() for name, text in rows] + [f"Note: {note}." for note in made.notes]


def _shares(made: Plan) -> str:
    whose = "a device" if made.devices > 1 else "the device"
    return f"{whose} computes {made.examples:,} at once in {made.precision.replace('no', 'float32')}"


def _time_rows(made: Plan) -> list[tuple[str, str]]:
    if made.speed is None or made.seconds is None:
        return [("Time", "give the --speed of a device, or --measure that of this one")]
    threads = torch.get_num_threads()
    source = "given"
    if made.measured:
        source = "measured here" + (f" with {threads} thread{'s' * (threads > 1)}" if made.device == "cpu" else "")
    speed = f"{made.speed:,.0f} tokens a second ({source}), {_flops(made.speed * made.flops_per_token)} a second"
    rows = [("Speed", f"{speed}, of each device" if made.devices > 1 else speed)]
    told = _duration(made.seconds)
    if made.devices > 1:
        kept = "all of it" if made.efficiency == 1 else f"{made.efficiency:.0%} of it"
        told += f", if each of the {made.devices} devices keeps {kept}"
    return [*rows, ("Time", told)]


def _size(number: int) -> str:
    """Bytes for people."""
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if number >= 2**power:
            return f"{number / 2**power:9,.2f} {unit}"
    return f"{number / 2**10:9,.2f} KiB"


def _flops(number: float) -> str:
    """A number of operations for people."""
    for power, prefix in ((24, "Y"), (21, "Z"), (18, "E"), (15, "P"), (12, "T"), (9, "G")):
        if number >= 10**power:
            return f"{number / 10**power:,.2f} {prefix}FLOP"
    return f"{number / 10**6:,.2f} MFLOP"


def _duration(seconds: float) -> str:
    """A time for people."""
    length, name = next((unit for unit in _UNITS if seconds >= unit[0]), _UNITS[-1])
    return f"{seconds / length:,.1f} {name}"
