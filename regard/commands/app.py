"""The command line: each command is a function of the library with the same arguments.

A command imports what it runs when it runs, so that help texts and wrong options are answered at once.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from .. import __version__
from ..families.family import Family
from ..families.registry import FAMILIES
from ..importing import when_imported
from .inspect import inspect_app
from .lazy import add_lazy_command

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
app.add_typer(inspect_app, name="inspect")


def without_secrets(text: str) -> str:
    """Hides the Hub's token, and in addresses the user's name, the password and the signed query."""
    text = re.sub(r"(\w+://)[^\s/@'\"]+@", r"\1***@", text)
    text = re.sub(r"(\w+://[^\s?'\"]*\?)[^\s'\")]+", r"\1***", text)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(name, "").strip():
            text = text.replace(token, "***")
    return text


class _Console(logging.Handler):
    """Prints what the package logs, above a progress bar if there is one, and without secrets."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm.auto import tqdm

        text = without_secrets(self.format(record))
        tqdm.write(f"Warning: {text}" if record.levelno >= logging.WARNING else text)


def _silence_transformers() -> None:
    # What it says while it loads and saves is meant for those who call it themselves.
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {__version__}")
        raise typer.Exit


@app.callback()
def _setup(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    logger = logging.getLogger("regard")
    # Of several processes only the first prints.
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    logger.handlers = [_Console()]
    when_imported("transformers", _silence_transformers)


FINETUNE_HELP = {
    "classification": "Classify texts, or pairs of texts.",
    "regression": "Predict a number for each text or pair of texts.",
    "multi-label": "Predict any number of labels for each text.",
    "tokens": "Tag the words of texts, for example with names of people and places.",
    "question-answering": "Find the answers to questions in texts.",
    "multiple-choice": "Choose among continuations of texts.",
}


def _made(factory: str, *arguments: str) -> Callable[..., None]:
    # The settings' modules import torch.
    from . import settings_options

    return getattr(settings_options, factory)(*arguments)


def add_family(family: Family) -> None:
    """Adds the commands that train a family and plan its training."""
    add_lazy_command(train_app, family.name, family.help, partial(_made, "train_command", family.name))
    plan_help = f"Plan a run of `regard train {family.name}`."
    add_lazy_command(plan_app, family.name, plan_help, partial(_made, "plan_command", family.name))


for _family in FAMILIES.values():
    add_family(_family)
for _task, _help in FINETUNE_HELP.items():
    add_lazy_command(finetune_app, _task, _help, partial(_made, "finetune_command", _task))


Model = Annotated[str, typer.Argument(help="Folder of a run or a model, or a Hub id.")]


@app.command()
def fill(
    text: Annotated[str, typer.Argument(help="Text with one or more [MASK].")],
    model: Annotated[str, typer.Option(help="Folder of a run or a model, or a Hub id.")] = "runs/bert",
    top: Annotated[int, typer.Option(help="Number of guesses for each mask.")] = 5,
) -> None:
    """Fill the masks in a text."""
    from .fill import fill_masks

    for number, guesses in enumerate(fill_masks(text, model, top), start=1):
        typer.echo(f"[MASK] {number}")
        for guess in guesses:
            typer.echo(f"  {guess.probability:7.2%}  {guess.token}")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue, text to rewrite, or file of an image.")],
    model: Annotated[str, typer.Option(help="Folder of a run or a model, or a Hub id.")] = "runs/decoder",
    max_new_tokens: Annotated[int | None, typer.Option(help="Largest number of tokens to generate.")] = None,
    sample: Annotated[bool, typer.Option(help="Whether a decoder draws its tokens.")] = True,
    temperature: Annotated[float, typer.Option(help="Temperature: below 1 sharper, above 1 flatter.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw among this many of the most probable tokens; 0: among all.")] = 50,
    top_p: Annotated[float, typer.Option(help="Draw among the tokens with this share of the probability.")] = 0.9,
    beams: Annotated[int, typer.Option(help="Search with this many beams instead of drawing.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Seed of the draw; without it each text is another one.")] = None,
) -> None:
    """Generate: continue a text, rewrite one, or caption an image."""
    from .generate import generate_text

    generated = generate_text(
        prompt,
        model,
        max_new_tokens=max_new_tokens,
        sample=sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        beams=beams,
        seed=seed,
    )
    typer.echo(generated)


@app.command()
def evaluate(
    model: Model,
    data: Annotated[
        str | None, typer.Option(help="Source to evaluate on, all of it; without it what the run held out.")
    ] = None,
    batches: Annotated[int | None, typer.Option(help="Number of batches to evaluate on; all if not given.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting of `train` to change, with _ for -.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures and the generated texts.")] = None,
) -> None:
    """Evaluate a trained model: the figures that its training ended with, or those on other data."""
    from ..loading import require_file_name
    from ..training.families.evaluate import evaluate_model
    from .settings_options import parse_field
    from .train import figure_lines

    changed = dict(parse_field(text, "setting", "batch_size=8") for text in setting or ())
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
    model: Model,
    output: Annotated[Path, typer.Argument(help="Folder to write to; it must be empty or not exist.")],
    to: Annotated[str, typer.Option(help="Format to export to: only 'transformers' so far.")] = "transformers",
) -> None:
    """Export a model to a stock architecture, which loads without regard."""
    from ..modeling.loading.load import model_path, naming_the_model
    from ..sharing.export import export_model

    if to != "transformers":
        raise ValueError(f"`to` ({to!r}) must be 'transformers'")
    path = model_path(model)
    with naming_the_model("model", model, path):
        typer.echo(f"Exported to {export_model(path, output)}")


@app.command()
def push(
    run: Annotated[str, typer.Argument(help="Folder of a run or a model.")],
    repo: Annotated[str, typer.Argument(help="Repository on the Hub: NAME or ORGANISATION/NAME.")],
    private: Annotated[bool, typer.Option("--private", help="Make a repository that others can't see.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to, made if it does not exist.")] = None,
    bundle: Annotated[bool, typer.Option(help="Whether to push the code too, for users without regard.")] = True,
    license: Annotated[str | None, typer.Option(help="License of the model, as the Hub names it: apache-2.0.")] = None,
    language: Annotated[
        list[str] | None,
        typer.Option(help="Language of the texts, as the Hub names it: en. Repeat the option for several."),
    ] = None,
) -> None:
    """Push a model to the Hub: weights, tokenizer, card, and the code that loads them."""
    from .push import push as push_run

    address = push_run(
        run, repo, private=private, revision=revision, bundle=bundle, license=license, language=language
    )
    typer.echo(address)


def main() -> None:
    """Runs the command line. A user's mistake, or what ends a run, is one line of text and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal has no byte for must not end a run.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except Exception as error:
        message = _message_for_users(error)
        if message is None:
            raise
        _exit_with(message)


def _message_for_users(error: Exception) -> str | None:
    """Returns the message for an error of the user's; None for a defect of the program, which needs its traceback."""
    from accelerate.utils.memory import should_reduce_batch_size
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    if isinstance(error, (ValueError, OSError, FloatingPointError, StrictDataclassError, SafetensorError)):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and should_reduce_batch_size(error)):
        return f"the memory does not suffice ({str(error) or type(error).__name__})"
    return None


def _exit_with(message: str) -> NoReturn:
    from tqdm.auto import tqdm

    # Above a progress bar, which an error leaves where it was.
    tqdm.write(f"regard: {without_secrets(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(2) from None
