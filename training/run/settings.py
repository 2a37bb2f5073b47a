"""Settings of a run: the fields of one dataclass are the keys of a YAML file and the options of a command."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...configuration.seeds import require_seed

Settings = TypeVar("Settings")


# The settings that tell how long to train; at most one is given.
DURATIONS = ("steps", "epochs", "minutes")
# More processes than that would only take the machine down.
MOST_WORKERS = 512


def option(default: Any, help: str) -> Any:
    """A field of a settings dataclass, with the text that explains it on the command line."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class TrainingSettings:
    """What every family's training run can set."""

    data: list[str] = option([], "What to train on; several sources are joined.")
    split: str = option("train", "The split of a Hub data set to train on.")
    validation: str = option("0.05", "Held-out data: a share of the rows, or another source like --data.")
    bad_records: str = option(
        "stop", "What to do with a record that can't be read: 'stop' there, or 'skip' and count it."
    )
    max_length: int = option(64, "Longest training example, in tokens.")
    steps: int | None = option(None, "Train for this many steps.")
    epochs: float | None = option(None, "Train for this many passes over the data.")
    minutes: float | None = option(None, "Train for this long; such a run can't be repeated to the bit.")
    batch_size: int = option(32, "Examples per step, over all processes and accumulation.")
    accumulation: int = option(1, "Parts in which each process computes its share of a batch, to save memory.")
    learning_rate: float | None = option(None, "Highest learning rate; by the model's width if not given.")
    warmup: float = option(0.1, "Share of the training in which the learning rate rises.")
    schedule: str = option("linear", "How the learning rate falls afterwards: 'linear', 'cosine' or 'constant'.")
    weight_decay: float = option(0.01, "Decoupled weight decay, on matrices alone.")
    clip: float = option(1.0, "Largest norm of the gradient; 0 does not clip.")
    precision: str = option("no", "Mixed precision: 'no' (float32), 'bf16' or 'fp16'.")
    sharding: str = option("none", "Share the weights out over the processes: 'fsdp' (FSDP2), or 'none'.")
    compile: bool = option(False, "Compile the model with torch.compile. On a CPU that makes training slower.")
    seed: int = option(0, "Seeds weights, data and dropout.")
    workers: int = option(0, "Processes that prepare batches beside the training; the batches don't depend on it.")
    evaluate_every: int = option(200, "Steps between evaluations; 0 evaluates at the end alone.")
    evaluation_batches: int | None = option(None, "Batches per evaluation; all of the held-out data if not given.")
    log_every: int = option(10, "Steps between logged values.")
    log_with: list[str] = option(["tensorboard"], "Trackers to log to, as Accelerate names them; 'none' for none.")
    save_every: int = option(200, "Steps between checkpoints; 0 saves none.")
    keep_last: int = option(2, "Checkpoints to keep.")
    keep_best: bool = option(
        False, "Keep the checkpoint with the lowest held-out loss as well; the final model is that one's."
    )
    skip_nonfinite: int = option(
        0, "Steps that may be skipped, in all, because their loss or gradient is not finite; one more ends the run."
    )

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Checks what can be told before anything is read.

        Raises:
            ValueError: naming the setting, what it got and what is allowed.
        """
        for name, value in to_dict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"`{name}` ({value}) must be a finite number")
        given = [name for name in DURATIONS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"`{given[0]}` and `{given[1]}` both tell how long to train: give one of them")
        for name in ("steps", "epochs", "minutes", "learning_rate"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"`{name}` ({getattr(self, name)}) must be more than 0")
        for name in ("max_length", "batch_size", "accumulation", "log_every", "keep_last", "evaluation_batches"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"`{name}` ({getattr(self, name)}) must be at least 1")
        for name in ("workers", "evaluate_every", "save_every", "weight_decay", "clip", "skip_nonfinite"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` ({getattr(self, name)}) must be at least 0")
        if self.workers > MOST_WORKERS:
            raise ValueError(f"`workers` ({self.workers}) must be at most {MOST_WORKERS}")
        if self.max_length >= 2**31:
            raise ValueError(f"`max_length` ({self.max_length}) must be less than 2**31")
        require_seed(self.seed)
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"`warmup` ({self.warmup}) must be at least 0 and at most 1")
        if self.keep_best and not self.evaluate_every:
            raise ValueError("`keep_best` needs evaluations to choose by: `evaluate_every` must be more than 0")
        self.require_choice("schedule", ("linear", "cosine", "constant"))
        self.require_choice("precision", ("no", "bf16", "fp16"))
        self.require_choice("sharding", ("none", "fsdp"))
        self.require_choice("bad_records", ("stop", "skip"))

    def require_choice(self, name: str, allowed: typing.Iterable[str]) -> None:
        """Raises a ValueError if a setting is none of the allowed words."""
        if getattr(self, name) not in allowed:
            raise ValueError(f"`{name}` ({getattr(self, name)!r}) must be one of {', '.join(allowed)}")


def held_out_share(validation: str) -> float | None:
    """The share of the rows to hold out; None if `validation` names a source instead.

    Raises:
        ValueError: if it is a number that is no share.
    """
    try:
        share = float(validation)
    except ValueError:
        return None
    if not 0 < share < 1:
        raise ValueError(f"`validation` ({validation}) must be a share between 0 and 1, or a source")
    return share


def require_source(data: str) -> None:
    """Refuses what `held_out_share` takes for a share, where there are no rows to take one of.

    Raises:
        ValueError: if it is a number.
    """
    try:
        float(data)
    except ValueError:
        return
    raise ValueError(f"`data` ({data}) must be a source, which a number is not")


def field_types(settings_class: type) -> dict[str, Any]:
    """The type of each setting, by name."""
    hints = typing.get_type_hints(settings_class)
    return {setting.name: hints[setting.name] for setting in dataclasses.fields(settings_class)}


def make_settings(settings_class: type[Settings], values: dict[str, Any]) -> Settings:
    """Builds settings from named values, such as a YAML file holds.

    Raises:
        ValueError: for a name that is no setting (with the nearest one that is), or a value of another type.
    """
    types = field_types(settings_class)
    for name in values:
        if name not in types:
            nearest = difflib.get_close_matches(str(name), types, n=1)
            hint = f"did you mean `{nearest[0]}`?" if nearest else f"the settings are {', '.join(sorted(types))}"
            shown = str(name) if str(name).isprintable() else repr(name)
            raise ValueError(f"there is no setting `{shown}`: {hint}")
    return settings_class(**{name: _converted(name, value, types[name]) for name, value in values.items()})


def _converted(name: str, value: Any, expected: Any) -> Any:
    """Takes a value as the type that a setting has; whole numbers and single words widen."""
    options = typing.get_args(expected) if type(None) in typing.get_args(expected) else (expected,)
    if value is None and type(None) in options:
        return None
    kind = next(option for option in options if option is not type(None))
    origin = typing.get_origin(kind) or kind
    if origin is list and isinstance(value, str):
        return [value]
    if origin is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        # YAML reads 1e-4, without a dot, as text.
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    if origin is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if origin is str and value is False:
        # YAML reads the bare word as false.
        return "no"
    fits = isinstance(value, origin) and (origin is bool or not isinstance(value, bool))
    if fits and origin in (list, dict):
        # The elements of a list and the keys of a mapping are text.
        fits = all(isinstance(part, str) for part in value)
    if not fits:
        raise ValueError(f"`{name}` ({value!r}) must be {_described(origin)}")
    if origin is int and not -(2**63) <= value < 2**63:
        # What would be a number to every library below, but for its size.
        raise ValueError(f"`{name}` ({value}) must be a whole number of at most 64 bits")
    return value


def _described(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list of text"}.get(
        kind, "a mapping"
    )


def to_dict(settings: Any) -> dict[str, Any]:
    """The settings as plain values, in the order of their fields."""
    return dataclasses.asdict(settings)
