"""Describing the plan of a training run: what `regard plan` prints."""

from __future__ import annotations

import torch

from ..training.planning.plan import Plan

_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def plan_lines(made: Plan) -> list[str]:
    """Describes a plan."""
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
    time = _duration(made.seconds)
    if made.devices > 1:
        kept = "all of it" if made.efficiency == 1 else f"{made.efficiency:.0%} of it"
        time += f", if each of the {made.devices} devices keeps {kept}"
    return [*rows, ("Time", time)]


def _size(number: int) -> str:
    """Formats a number of bytes."""
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if number >= 2**power:
            return f"{number / 2**power:9,.2f} {unit}"
    return f"{number / 2**10:9,.2f} KiB"


def _flops(number: float) -> str:
    """Formats a number of operations."""
    for power, prefix in ((24, "Y"), (21, "Z"), (18, "E"), (15, "P"), (12, "T"), (9, "G")):
        if number >= 10**power:
            return f"{number / 10**power:,.2f} {prefix}FLOP"
    return f"{number / 10**6:,.2f} MFLOP"


def _duration(seconds: float) -> str:
    """Formats a time."""
    length, name = next((unit for unit in _UNITS if seconds >= unit[0]), _UNITS[-1])
    return f"{seconds / length:,.1f} {name}"
