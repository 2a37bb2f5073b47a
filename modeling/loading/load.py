"""Loading what others may have made: it is whole and runs no code of its own, or is refused in one line.

transformers trusts the files that it loads. It draws weights that are missing, takes an empty tokenizer for one, asks
whether to run code, and lets errors of every kind through where a file holds something else than it should.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from .folder import check_model_folder

# A pooler is no part of a model that predicts tokens, and what is read from the others needs none.
POOLER = re.compile(r"(^|\.)pooler\.")
# A character that no text has.
_UNKNOWN = "\U0010ffff"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_LENGTHS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens")


def load_part(auto_class: Any, path: str | Path, label: str, **options: Any) -> Any:
    """Loads a configuration, a tokenizer or a processor.

    Args:
        auto_class: with `from_pretrained`.
        path: a folder, or an id on the Hub.
        label: what errors call it.
        options: of `from_pretrained`.

    Raises:
        ValueError: if it can't be loaded, needs code of its own, or is a tokenizer without a vocabulary.
        OSError: if it is not there.
    """
    with _plain_errors(label):
        part = auto_class.from_pretrained(path, trust_remote_code=False, **options)
    tokenizer = getattr(part, "tokenizer", part)
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        _check_tokenizer(tokenizer, label)
    return part


def load_model(
    model_class: Any, path: str | Path, label: str, may_lack: re.Pattern[str] | None = None, **options: Any
) -> Any:
    """Loads a model from safetensors, with all of its weights; see `load_model_and_drawn`.

    Args:
        model_class: with `from_pretrained`; an Auto class or one of a model.
        path: a folder, or an id on the Hub.
        label: what errors call it.
        may_lack: matches names of weights that may be missing, or of another shape, and are then drawn.
        options: of `from_pretrained`.

    Raises:
        ValueError: if it lacks weights.
    """
    model, drawn = load_model_and_drawn(model_class, path, label, **options)
    require_weights((name for name in drawn if not (may_lack and may_lack.search(name))), label)
    return model


def load_model_and_drawn(model_class: Any, path: str | Path, label: str, **options: Any) -> tuple[Any, set[str]]:
    """Loads a model from safetensors.

    Args:
        model_class: see `load_model`, as for the others.
        path: see there.
        label: see there.
        options: see there.

    Returns:
        The model, and the names of its weights that were missing or of another shape, and were drawn.

    Raises:
        ValueError: if it can't be loaded, needs code of its own, or has weights that are not finite.
        OSError: if it is not there.
    """
    with _plain_errors(label):
        model, told = model_class.from_pretrained(
            path,
            trust_remote_code=False,
            use_safetensors=True,
            # They are told of here, by their names.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    # Outputs are read by their names, and those that cost more are asked for, whatever the configuration says.
    model.config.return_dict, model.config.output_attentions = True, False
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"{label} is an adapter of another model: merge it into that one and save the whole")
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ValueError(f"{label} has weights that are not finite: {name!r}")
    if model.can_generate():
        _check_generation(model.generation_config, label)
    return model, {*told["missing_keys"], *(name for name, *_ in told["mismatched_keys"])}


def require_weights(drawn: Iterable[str], label: str) -> None:
    """Refuses a model some of whose weights had to be drawn.

    Raises:
        ValueError: naming one of them.
    """
    names = sorted(drawn)
    if names:
        raise ValueError(
            f"{label} lacks {len(names)} of the weights that it needs, such as {names[0]}, or has them in another "
            "shape"
        )


@contextmanager
def _plain_errors(label: str) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of any kind, where a file holds something else than is taken for granted
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            raise ValueError(
                f"{label} needs custom code, which is not run here: if you trust it, load it in Python with "
                "`trust_remote_code=True`"
            ) from None
        if not isinstance(error, (ValueError, StrictDataclassError, SafetensorError)):
            # What these say is meant for a reader.
            reason = f"{type(error).__name__}: {reason}"
        raise ValueError(f"{label} can't be loaded: {reason}") from error


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, label: str) -> None:
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise ValueError(f"{label} has no tokenizer, or one without a vocabulary")
    names: Any = tokenizer.model_input_names
    if not isinstance(names, list) or "input_ids" not in names:
        raise ValueError(f"{label} has a tokenizer whose `model_input_names` ({names!r}) do not name 'input_ids'")
    try:
        tokenizer(_UNKNOWN)
    except Exception as error:  # it has no class of its own
        raise ValueError(f"{label} has a tokenizer that fails on a character it does not know: {error}") from None
    limit = tokenizer.model_max_length
    # Where there is no limit, it is a number beyond any length, and not always a whole one.
    is_number = isinstance(limit, int) or (isinstance(limit, float) and limit >= 2**53)
    if isinstance(limit, bool) or not is_number or limit < 1:
        raise ValueError(f"{label} has a tokenizer whose `model_max_length` ({limit!r}) is not a number from 1 on")


def _check_generation(config: Any, label: str) -> None:
    for name in (*_TOKEN_IDS, *_LENGTHS):
        value = getattr(config, name, None)
        numbers = value if name == "eos_token_id" and isinstance(value, list) else [value]
        for number in numbers:
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
                raise ValueError(f"{label} has a generation configuration with `{name}` {value!r}, no whole number")


MODEL = "model"


def model_path(model: str | Path) -> str:
    """The model of a run, if `model` is the folder of one; else `model` itself, a folder or a Hub id.

    Raises:
        ValueError: if it is a folder that holds no model, such as a run that has not ended, or one that can't be read
            or is not to be trusted; see `check_model_folder`.
    """
    folder = Path(model)
    if (folder / MODEL / "config.json").is_file():
        folder = folder / MODEL
    elif not folder.is_dir():
        if folder.exists():
            raise ValueError(f"`model` ({model}) must be a folder, or an id on the Hub: it is a file")
        return str(model)
    elif not (folder / "config.json").is_file():
        raise ValueError(f"`model` ({model}) holds no model: the run may not have ended (`--resume` goes on with it)")
    check_model_folder(folder, f"`model` ({model})")
    return str(folder)


def require_text(text: str, argument: str) -> None:
    """Refuses what no tokenizer takes for a text.

    Raises:
        ValueError: if it holds half a surrogate pair, as an argument that is not UTF-8 does.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"`{argument}` ({text!r}) is no text: it holds bytes that are not UTF-8")


@contextmanager
def naming_the_model(argument: str, model: str | Path, path: str) -> Iterator[None]:
    """Says in one line that there is no such model, where transformers says what it tried.

    Args:
        argument: what named the model.
        model: as the user named it.
        path: that it is loaded from.

    Raises:
        ValueError: for an OSError of what is neither a folder here nor a model of the Hub.
    """
    try:
        yield
    except OSError as error:
        if Path(path).exists():
            raise
        raise ValueError(f"`{argument}` ({model}) is no folder here, and the Hub did not give it: {error}") from None
