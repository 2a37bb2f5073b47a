"""Commands whose options are the fields of a settings dataclass.

Only a command that runs imports torch and transformers: help texts and wrong options need no more than the settings.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Container
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml

from ..families.family import resolve
from ..families.registry import FAMILIES
from ..training.finetuning.settings import TASK_SETTINGS, FinetuneSettings, belongs_to_some_tasks
from ..training.run.settings import DURATIONS, field_types
from ..training.run.settings_file import YAML_ERRORS, read_yaml, require_small


def _option(name: str, kind: Any, default: Any, help: str) -> inspect.Parameter:
    """The command-line option of a setting. It is None if not given, so that a settings file can decide."""
    optional = type(None) in get_args(kind)
    kind = next(option for option in get_args(kind) if option is not type(None)) if optional else kind
    flag = "--" + name.replace("_", "-")
    if kind is dict:
        kind, shown, metavar = list[str], None, "NAME=VALUE"
    else:
        shown = (", ".join(map(str, default)) or None) if isinstance(default, list) else default
        metavar = None
    if kind is bool:
        shown = "yes" if default else "no"
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    text = help if shown is None else f"{help} [default: {shown}]"
    return _parameter(name, kind | None, None, typer.Option(flag, help=text, metavar=metavar, show_default=False))


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def parse_field(text: str, option: str = "config", example: str = "hidden_size=256") -> tuple[str, Any]:
    """Splits NAME=VALUE, whose value is YAML.

    Args:
        text: the text to split.
        option: name of the option that gave it, for errors.
        example: a correct text, for errors.

    Raises:
        ValueError: if there is no "=", or the value is not YAML.
    """
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"`{option}` ({text!r}) must be NAME=VALUE, such as {example}")
    try:
        parsed = yaml.safe_load(value)
    except YAML_ERRORS:
        raise ValueError(f"`{option}` ({text!r}) has a value that is not YAML") from None
    require_small(parsed, f"`{option}`")
    return name, parsed


def settings_options(settings_class: type, names: Container[str] | None = None) -> list[inspect.Parameter]:
    """Makes the command-line options of a settings dataclass: a file, and one for each field.

    Args:
        settings_class: the dataclass.
        names: names of the fields that are options; None: all.
    """

    def default_of(setting: Any) -> Any:
        return setting.default if setting.default is not MISSING else setting.default_factory()

    help = "YAML file of settings, named as here with _ for -; options override it."
    file = _parameter("settings", Path | None, None, typer.Option(help=help))
    types = field_types(settings_class)
    return [file] + [
        _option(setting.name, types[setting.name], default_of(setting), setting.metadata["help"])
        for setting in fields(settings_class)
        if names is None or setting.name in names
    ]


def chosen_settings(settings: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a file, overridden by those that were given as options."""
    chosen = read_yaml(settings) if settings else {}
    flags = {name: value for name, value in given.items() if value is not None and name != "config"}
    if flags.keys() & set(DURATIONS):
        # An option that says how long to train replaces whatever says so in the file.
        chosen = {name: value for name, value in chosen.items() if name not in DURATIONS}
    chosen |= flags
    own = chosen.get("config", {})
    if given.get("config") and isinstance(own, dict):
        chosen["config"] = own | dict(map(parse_field, given["config"]))
    return chosen


def _with_options(command: Callable[..., None], options: list[inspect.Parameter]) -> Callable[..., None]:
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in options}
    return command


def settings_command(
    settings_class: type,
    run: Callable[..., Any],
    output: str,
    names: Container[str] | None = None,
    *,
    may_change: bool = False,
) -> Callable[..., None]:
    """Makes a command that trains.

    Args:
        settings_class: the dataclass of its settings.
        run: is called with the output folder, the settings that were given, and whether to resume.
        output: the default output folder.
        names: names of the settings that are options; None: all.
        may_change: whether a run may be resumed with other settings or data than it began with.
    """

    def command(output: Path, resume: bool, settings: Path | None, **given: Any) -> None:
        accepted = {"accept_changes": given.pop("accept_changes")} if may_change else {}
        run(output, chosen_settings(settings, given), resume=resume, **accepted)

    resume = typer.Option("--resume", help="Go on with the run in the output folder.")
    own = [
        _parameter("output", Path, Path(output), typer.Option(help="Folder of the run.")),
        _parameter("resume", bool, False, resume),
    ]
    if may_change:
        help = "With --resume: go on although settings, data, tokenizer or model have changed, and record it."
        own.append(_parameter("accept_changes", bool, False, typer.Option("--accept-changes", help=help)))
    return _with_options(command, own + settings_options(settings_class, names))


def train_command(family: str) -> Callable[..., None]:
    """Makes the command that trains a model of a family."""

    def run(*arguments: Any, **options: Any) -> None:
        from .train import train_model

        train_model(family, *arguments, **options)

    return settings_command(resolve(FAMILIES[family].settings), run, f"runs/{family}", may_change=True)


def finetune_command(task: str) -> Callable[..., None]:
    """Makes the command that fine-tunes a model for a task; its options are the settings that the task has."""

    def run(*arguments: Any, **options: Any) -> None:
        from .finetune import finetune

        finetune(task, *arguments, **options)

    names = [
        each.name
        for each in fields(FinetuneSettings)
        if each.name in TASK_SETTINGS[task] or not belongs_to_some_tasks(each.name)
    ]
    return settings_command(FinetuneSettings, run, f"runs/{task}", names)


def plan_command(family: str) -> Callable[..., None]:
    """Makes the command that plans a training run; its options are the settings that change what the run takes."""

    def command(
        *,
        devices: Annotated[int, typer.Option(help="Number of devices that share each batch.")] = 1,
        tokens: Annotated[
            float | None, typer.Option(help="Tokens to train on; without it those of --steps, or else 1e9.")
        ] = None,
        speed: Annotated[float | None, typer.Option(help="Tokens per second of one device.")] = None,
        measure: Annotated[
            bool, typer.Option("--measure", help="Measure the speed on this machine, which takes some seconds.")
        ] = False,
        efficiency: Annotated[
            float, typer.Option(help="Share of its speed that each of several devices keeps.")
        ] = 1.0,
        as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
        settings: Path | None,
        **given: Any,
    ) -> None:
        from ..training.planning.plan import plan_training
        from .plan import plan_lines

        made = plan_training(
            family,
            chosen_settings(settings, given),
            devices=devices,
            tokens=tokens,
            speed=speed,
            measure=measure,
            efficiency=efficiency,
        )
        typer.echo(json.dumps(made.to_dict(), indent=2) if as_json else "\n".join(plan_lines(made)))

    own = inspect.signature(command, eval_str=True).parameters.values()
    options = [option for option in own if option.name not in ("settings", "given")]
    settings_class = resolve(FAMILIES[family].settings)
    return _with_options(command, options + settings_options(settings_class, settings_class.planned))
