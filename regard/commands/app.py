"""The command line: each command is a function of the library with the same arguments."""

from __future__ import annotations

import inspect
import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Container
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

import typer
import yaml
from accelerate.utils.memory import should_reduce_batch_size
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

from .. import __version__
from ..loading import require_file_name
from ..modeling.loading.load import model_path, naming_the_model
from ..sharing.export import export_model
from ..training.families.evaluate import evaluate_model
from ..training.families.registry import TRAINABLE
from ..training.finetuning.finetune import TASKS
from ..training.finetuning.settings import FinetuneSettings
from ..training.finetuning.task import belongs_to_some_tasks
from ..training.run.settings import DURATIONS, field_types
from ..training.run.settings_file import YAML_ERRORS, read_yaml, require_small
from .fill import fill_masks
from .finetune import finetune
from .generate import generate_text
from .inspect import inspect_app
from .inspect_senses import app as inspection_senses_app
from .inspect_steps import app as inspection_steps_app
from .plan import PLANNED, plan_lines, plan_training
from .push import push as push_run
from .train import figure_lines, train_model

app = typer.Typer(
    help="Attention models for the Hugging Face ecosystem: train, try and share them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
train_app = typer.Typer(help="Train a model.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(train_app, name="train")
finetune_app = typer.Typer(help="Fine-tune a model for a task.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(finetune_app, name="finetune")
plan_app = typer.Typer(help="Plan a training: memory, operations, time.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(plan_app, name="plan")
inspect_app.add_typer(inspection_steps_app)
inspect_app.add_typer(inspection_senses_app)
app.add_typer(inspect_app, name="inspect")


def without_secrets(text: str) -> str:
    """Takes out the token of the Hub, and of addresses the user's name with the password and what is signed."""
    text = re.sub(r"(\w+://)[^\s/@'\"]+@", r"\1***@", text)
    text = re.sub(r"(\w+://[^\s?'\"]*\?)[^\s'\")]+", r"\1***", text)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(name, "").strip():
            text = text.replace(token, "***")
    return text


class _Console(logging.Handler):
    """Prints what the package logs, above a progress bar if there is one, without what is secret."""

    def emit(self, record: logging.LogRecord) -> None:
        text = without_secrets(self.format(record))
        tqdm.write(f"Warning: {text}" if record.levelno >= logging.WARNING else text)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {__version__}")
        raise typer.Exit


@app.callback()
def _setup(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    logger = logging.getLogger("regard")
    # Of several processes the first speaks for all.
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    logger.handlers = [_Console()]
    # What transformers says of loading and saving is for those who call it themselves.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _option_for(name: str, kind: Any, default: Any, help: str) -> inspect.Parameter:
    """The command-line option of a setting. It is None if not given, so that a settings file can have its say."""
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
    annotation = Annotated[kind | None, typer.Option(flag, help=text, metavar=metavar, show_default=False)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _parse_field(text: str, option: str = "config", example: str = "hidden_size=256") -> tuple[str, Any]:
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
    """The command-line options of a settings dataclass: a file, and its fields or those of the names given."""

    def default_of(setting: Any) -> Any:
        return setting.default if setting.default is not MISSING else setting.default_factory()

    file = inspect.Parameter(
        "settings",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None,
            typer.Option(help="YAML file of settings, named as here with _ for -; options go before it."),
        ],
    )
    types = field_types(settings_class)
    return [file] + [
        _option_for(setting.name, types[setting.name], default_of(setting), setting.metadata["help"])
        for setting in fields(settings_class)
        if names is None or setting.name in names
    ]


def chosen_settings(settings: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a file, and those given as options, which go before them."""
    chosen = read_yaml(settings) if settings else {}
    flags = {name: value for name, value in given.items() if value is not None and name != "config"}
    if flags.keys() & set(DURATIONS):
        # One way of saying how long goes before another in the file.
        chosen = {name: value for name, value in chosen.items() if name not in DURATIONS}
    chosen |= flags
    own = chosen.get("config", {})
    if given.get("config") and isinstance(own, dict):
        chosen["config"] = own | dict(map(_parse_field, given["config"]))
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
    """Makes a training command whose options are the fields of a settings dataclass.

    Args:
        settings_class: the dataclass, see `training.settings`.
        run: is called with the output folder, the settings that were given, and whether to resume.
        output: the folder that is written to by default.
        names: the fields that are options, if not all are.
        may_change: whether a run can be told to go on with other settings or data than it began with.
    """

    def command(output: Path, resume: bool, settings: Path | None, **given: Any) -> None:
        accepted = {"accept_changes": given.pop("accept_changes")} if may_change else {}
        run(output, chosen_settings(settings, given), resume=resume, **accepted)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [
        inspect.Parameter(
            "output",
            keyword,
            default=Path(output),
            annotation=Annotated[Path, typer.Option(help="Folder of the run.")],
        ),
        inspect.Parameter(
            "resume",
            keyword,
            default=False,
            annotation=Annotated[bool, typer.Option("--resume", help="Go on with the run in the output folder.")],
        ),
    ]
    if may_change:
        text = "With --resume: go on though settings, data, tokenizer or model have changed, and record it."
        own.append(
            inspect.Parameter(
                "accept_changes",
                keyword,
                default=False,
                annotation=Annotated[bool, typer.Option("--accept-changes", help=text)],
            )
        )
    return _with_options(command, own + settings_options(settings_class, names))


TRAIN_HELP = {
    "bert": "Pretrain a BERT: masked language modeling and next sentence prediction.",
    "decoder": "Train a decoder-only language model: each token from those before it.",
    "transformer": "Train an encoder-decoder Transformer on pairs of texts.",
    "recurrent": "Train a recurrent encoder-decoder with attention on pairs of texts.",
    "captioner": "Train an image captioner that attends to the places of an image.",
}
for _name, _family in TRAINABLE.items():
    train_app.command(_name, help=TRAIN_HELP[_name], short_help=TRAIN_HELP[_name].partition(":")[0].rstrip("."))(
        settings_command(_family.settings_class, partial(train_model, _name), f"runs/{_name}", may_change=True)
    )


def plan_command(family: str) -> Callable[..., None]:
    """Makes the command that plans the training of a family; it has those options of the training that matter."""

    def command(
        *,
        devices: Annotated[int, typer.Option(help="Devices that share each batch.")] = 1,
        tokens: Annotated[
            float | None, typer.Option(help="Tokens to train on, such as 1e9, which it is without --steps.")
        ] = None,
        speed: Annotated[float | None, typer.Option(help="Tokens per second of one device.")] = None,
        measure: Annotated[bool, typer.Option("--measure", help="Measure the speed here, for some seconds.")] = False,
        efficiency: Annotated[
            float, typer.Option(help="Share of its speed that each of several devices keeps.")
        ] = 1.0,
        as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
        settings: Path | None,
        **given: Any,
    ) -> None:
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
    return _with_options(command, options + settings_options(TRAINABLE[family].settings_class, PLANNED))


for _name in TRAINABLE:
    plan_app.command(_name, help=f"Plan a run of `regard train {_name}`.")(plan_command(_name))


FINETUNE_HELP = {
    "classification": "Tell texts, or pairs of texts, into classes.",
    "regression": "Give texts, or pairs of texts, a number.",
    "multi-label": "Give texts any number of labels.",
    "tokens": "Tag the words of texts, with names of people and places for example.",
    "question-answering": "Find the answers to questions in texts.",
    "multiple-choice": "Choose among continuations of texts.",
}
for _task, _kind in TASKS.items():
    _names = [
        each.name
        for each in fields(FinetuneSettings)
        if each.name in _kind.own_settings or not belongs_to_some_tasks(each.name)
    ]
    finetune_app.command(_task, help=FINETUNE_HELP[_task])(
        settings_command(FinetuneSettings, partial(finetune, _task), f"runs/{_task}", _names)
    )


@app.command()
def fill(
    text: Annotated[str, typer.Argument(help="Text with one or more [MASK].")],
    model: Annotated[str, typer.Option(help="Folder of a run or a model, or a Hub id.")] = "runs/bert",
    top: Annotated[int, typer.Option(help="Number of guesses for each mask.")] = 5,
) -> None:
    """Fill the masks in a text."""
    for number, guesses in enumerate(fill_masks(text, model, top), start=1):
        typer.echo(f"[MASK] {number}")
        for guess in guesses:
            typer.echo(f"  {guess.probability:7.2%}  {guess.token}")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from, text to rewrite, or an image's file.")],
    model: Annotated[str, typer.Option(help="Folder of a run or a model, or a Hub id.")] = "runs/decoder",
    max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    sample: Annotated[bool, typer.Option(help="Whether a decoder draws its tokens.")] = True,
    temperature: Annotated[float, typer.Option(help="Of the draw: below 1 sharper, above 1 flatter.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw among so many tokens; 0: among all.")] = 50,
    top_p: Annotated[float, typer.Option(help="Draw among tokens with this share of the probability.")] = 0.9,
    beams: Annotated[int, typer.Option(help="Search with so many beams instead of drawing.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Of the draw; another text each time if not given.")] = None,
) -> None:
    """Generate: go on from a text, rewrite one, or caption an image."""
    options: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "beams": beams,
        "seed": seed,
    }
    typer.echo(generate_text(prompt, model, max_new_tokens=max_new_tokens, sample=sample, **options))


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="Folder of a run or a model, or a Hub id.")],
    data: Annotated[str | None, typer.Option(help="Source to evaluate on, whole; else what the run held out.")] = None,
    batches: Annotated[int | None, typer.Option(help="Batches to evaluate on; all if not given.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting of `train`, with _ for -, to change.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures and what was generated.")] = None,
) -> None:
    """Evaluate a trained model: the figures that its training ended with, or those on other data."""
    changed = dict(_parse_field(text, "setting", "batch_size=8") for text in setting or ())
    if batches is not None:
        changed["evaluation_batches"] = batches
    if output is not None:
        require_file_name(output)
    results = evaluate_model(model, data, changed)
    if output is not None:
        output.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    typer.echo("\n".join(figure_lines(results)))


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Folder of a run or a model, or a Hub id.")],
    output: Annotated[Path, typer.Argument(help="Folder to write to; it must be empty or not be there.")],
    to: Annotated[str, typer.Option(help="What to export to; there is 'transformers'.")] = "transformers",
) -> None:
    """Export a model to a stock architecture, which loads without regard."""
    if to != "transformers":
        raise ValueError(f"`to` ({to!r}) must be 'transformers'")
    path = model_path(model)
    with naming_the_model("model", model, path):
        typer.echo(f"Exported to {export_model(path, output)}")


@app.command()
def push(
    run: Annotated[str, typer.Argument(help="Folder of a run or a model.")],
    repo: Annotated[str, typer.Argument(help="Where to on the Hub: NAME or ORGANISATION/NAME.")],
    private: Annotated[bool, typer.Option("--private", help="Make a repository that others don't see.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to; made if it is not there.")] = None,
    bundle: Annotated[bool, typer.Option(help="Whether the code goes along, for those without regard.")] = True,
    license: Annotated[str | None, typer.Option(help="Of the model, as the Hub names it: apache-2.0.")] = None,
    language: Annotated[
        list[str] | None, typer.Option(help="Of the texts, as the Hub names it: en. Repeat it for several.")
    ] = None,
) -> None:
    """Push a model to the Hub: weights, tokenizer, card, and the code that loads them."""
    address = push_run(
        run, repo, private=private, revision=revision, bundle=bundle, license=license, language=language
    )
    typer.echo(address)


def main() -> None:
    """Runs the command line. A user's mistake, or what ends a run, is told in one line, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal has no byte for must not end a run.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except (ValueError, OSError, FloatingPointError, StrictDataclassError, SafetensorError) as error:
        _refuse(str(error))
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or should_reduce_batch_size(error)):
            raise
        _refuse(f"the memory does not suffice ({str(error) or type(error).__name__})")


def _refuse(message: str) -> NoReturn:
    # Above a progress bar, which an error leaves where it was.
    tqdm.write(f"regard: {without_secrets(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(2) from None
