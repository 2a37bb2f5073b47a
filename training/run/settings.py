"""Settings of a run: the fields of one dataclass are the keys of a YAML file and the options of a command."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ...families.seeds import require_seed

Settings = TypeVar("Settings")


# The settings that give the length of a run; at most one of them may be set.
DURATIONS = ("steps", "epochs", "minutes")
# More worker processes would only overload the machine.
MOST_WORKERS = 512
# The longest sequence whose positions fit into 32 bits.
MOST_TOKENS = 2**31 - 1
# Each beam takes as much memory as a text.
MOST_BEAMS = 1000


@dataclass(frozen=True)
class Bounds:
    """The values that a setting may have.

    Args:
        above: number that the value must exceed.
        least: smallest allowed value.
        most: largest allowed value.
        below: number that the value must be less than.
        choices: allowed words; if empty, all are allowed.
    """

    above: float | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    def require(self, name: str, value: Any) -> None:
        """Raises a ValueError if a value is not None and out of bounds.

        Args:
            name: name of the setting or argument, for the error.
            value: the value.
        """
        if value is None:
            return
        if self.choices and value not in self.choices:
            raise ValueError(f"`{name}` ({value!r}) must be one of {', '.join(self.choices)}")
        limits = [
            ("more than", self.above, operator.gt),
            ("at least", self.least, operator.ge),
            ("at most", self.most, operator.le),
            ("less than", self.below, operator.lt),
        ]
        if not all(holds(value, limit) for _, limit, holds in limits if limit is not None):
            allowed = " and ".join(f"{words} {limit}" for words, limit, _ in limits if limit is not None)
            raise ValueError(f"`{name}` ({value}) must be {allowed}")


def option(default: Any, help: str, **bounds: Any) -> Any:
    """A field of a settings dataclass.

    Args:
        default: the default value.
        help: explains the setting on the command line.
        **bounds: fields of its `Bounds`.
    """
    metadata = {"help": help, "bounds": Bounds(**bounds)}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class RunSettings:
    """The settings of every run, whether of training or of fine-tuning."""

    data: list[str] = option([], "Data to train on; several sources are joined.")
    split: str = option("train", "The split of a Hub data set to train on.")
    validation: str = option("0.05", "Held-out data: a share of the rows, or another source like --data.")
    batch_size: int = option(32, "Examples per step, over all processes and accumulation.", least=1)
    accumulation: int = option(
        1, "Number of parts in which each process computes its share of a batch, to save memory.", least=1
    )
    learning_rate: float | None = option(None, "Highest learning rate.", above=0)
    warmup: float = option(0.1, "Share of the training in which the learning rate rises.", least=0, most=1)
    weight_decay: float = option(0.01, "Decoupled weight decay, of matrices only.", least=0)
    precision: str = option("no", "Mixed precision: 'no' (float32), 'bf16' or 'fp16'.", choices=("no", "bf16", "fp16"))
    seed: int = option(0, "Seed of new weights, data and dropout.")
    log_every: int = option(10, "Steps between logged values.", least=1)
    log_with: list[str] = option(
        ["tensorboard"], "Trackers to log to, by Accelerate's names; 'none' turns logging to trackers off."
    )

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Checks the settings as far as possible before any data is read.

        Raises:
            ValueError: if a setting is out of bounds; the error names the setting, its value and the allowed values.
        """
        for setting in dataclasses.fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"`{setting.name}` ({value}) must be a finite number")
            setting.metadata["bounds"].require(setting.name, value)
        require_seed(self.seed)
        held_out_share(self.validation)


@dataclass
class TrainingSettings(RunSettings):
    """The settings of training in every family.

    Attributes:
        planned: names of the settings that change what a run takes in memory or time.
    """

    planned: ClassVar[tuple[str, ...]] = ("max_length", "batch_size", "accumulation", "precision", "sharding", "steps")

    bad_records: str = option(
        "stop",
        "What to do with a record that can't be read: 'stop' with an error, or 'skip' and count it.",
        choices=("stop", "skip"),
    )
    max_length: int = option(64, "Longest training example, in tokens.", least=1, most=MOST_TOKENS)
    steps: int | None = option(None, "Train for this many steps.", above=0)
    epochs: float | None = option(None, "Train for this many passes over the data.", above=0)
    minutes: float | None = option(
        None, "Train for this many minutes; such a run is not exactly reproducible.", above=0
    )
    learning_rate: float | None = option(
        None, "Highest learning rate; derived from the model's width if not given.", above=0
    )
    schedule: str = option(
        "linear",
        "How the learning rate falls after the warm-up: 'linear', 'cosine' or 'constant'.",
        choices=("linear", "cosine", "constant"),
    )
    clip: float = option(1.0, "Largest norm of the gradient; 0 turns clipping off.", least=0)
    sharding: str = option(
        "none", "Distribute the weights over the processes: 'fsdp' (FSDP2), or 'none'.", choices=("none", "fsdp")
    )
    compile: bool = option(False, "Compile the model with torch.compile. On a CPU that makes training slower.")
    workers: int = option(
        0,
        "Number of processes that prepare batches during training; it does not change the batches.",
        least=0,
        most=MOST_WORKERS,
    )
    evaluate_every: int = option(200, "Steps between evaluations; 0 evaluates only at the end.", least=0)
    evaluation_batches: int | None = option(
        None, "Batches per evaluation; all of the held-out data if not given.", least=1
    )
    save_every: int = option(200, "Steps between checkpoints; 0 saves none.", least=0)
    keep_last: int = option(2, "Number of checkpoints to keep.", least=1)
    keep_best: bool = option(
        False, "Also keep the checkpoint with the lowest held-out loss; its model becomes the final one."
    )
    skip_nonfinite: int = option(
        0, "Most steps to skip because their loss or gradient is not finite; one more such step ends the run.", least=0
    )

    def check(self) -> None:
        super().check()
        given = [name for name in DURATIONS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"`{given[0]}` and `{given[1]}` both give the length of the run: set one of them")
        if self.keep_best and not self.evaluate_every:
            raise ValueError("`keep_best` needs evaluations to choose by: `evaluate_every` must be more than 0")


def held_out_share(validation: str) -> float | None:
    """The share of the rows to hold out; None if `validation` names a source instead.

    Raises:
        ValueError: if `validation` is a number, but not between 0 and 1.
    """
    try:
        share = float(validation)
    except ValueError:
        return None
    if not 0 < share < 1:
        raise ValueError(f"`validation` ({validation}) must be a share between 0 and 1, or a source")
    return share


def require_source(data: str) -> None:
    """Raises a ValueError if `data` is a number, which `held_out_share` would take for a share of the rows."""
    try:
        float(data)
    except ValueError:
        return
    raise ValueError(f"`data` ({data}) must be a source, not a number")


def field_types(settings_class: type) -> dict[str, Any]:
    """The type of each setting, by name."""
    hints = typing.get_type_hints(settings_class)
    return {setting.name: hints[setting.name] for setting in dataclasses.fields(settings_class)}


def make_settings(settings_class: type[Settings], values: dict[str, Any]) -> Settings:
    """Makes settings from values by name, such as those of a YAML file.

    Raises:
        ValueError: if a name is not a setting (the error names the nearest setting), or a value has another type.
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
    """Converts a value to the type of its setting: a whole number to a float, or a single word to a list."""
    options = typing.get_args(expected) if type(None) in typing.get_args(expected) else (expected,)
    if value is None and type(None) in options:
        return None
    kind = next(option for option in options if option is not type(None))
    origin = typing.get_origin(kind) or kind
    if origin is list and isinstance(value, str):
        return [value]
    if origin is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        # YAML reads 1e-4, which has no dot, as text.
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    if origin is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if origin is str and value is False:
        # YAML reads the bare word no as false.
        return "no"
    fits = isinstance(value, origin) and (origin is bool or not isinstance(value, bool))
    if fits and origin in (list, dict):
        # The elements of a list and the keys of a mapping are text.
        fits = all(isinstance(part, str) for part in value)
    if not fits:
        raise ValueError(f"`{name}` ({value!r}) must be {_described(origin)}")
    if origin is int and not -(2**63) <= value < 2**63:
        # Other libraries would fail on a number of this size.
        raise ValueError(f"`{name}` ({value}) must be a whole number of at most 64 bits")
    return value


def _described(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list of text"}.get(
        kind, "a mapping"
    )


def to_dict(settings: Any) -> dict[str, Any]:
    """The settings as plain values, in the order of their fields."""
    return dataclasses.asdict(settings)
