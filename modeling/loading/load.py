"""Loading models that others may have made: they are complete and run no code of their own, or raise a one-line error.

transformers trusts the files that it loads. It initializes missing weights at random, accepts an empty tokenizer, asks
whether to run code, and raises errors of every kind for a file with unexpected content.
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

# A model that predicts tokens has no pooler, and those that have one are not read through it.
POOLER = re.compile(r"(^|\.)pooler\.")
# A character that occurs in no text.
_UNKNOWN = "\U0010ffff"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_LENGTHS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens")


def load_part(auto_class: Any, path: str | Path, label: str, **options: Any) -> Any:
    """Loads a configuration, a tokenizer or a processor.

    Args:
        auto_class: a class with `from_pretrained`.
        path: a folder, or an id on the Hub.
        label: its name in errors.
        options: options of `from_pretrained`.

    Raises:
        ValueError: if it cannot be loaded, needs code of its own, or is a tokenizer without a vocabulary.
        OSError: if it does not exist.
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
    """Loads a model from safetensors, with all of its weights.

    Args:
        model_class: a class with `from_pretrained`, an Auto class or that of a model.
        path: a folder, or an id on the Hub.
        label: the model's name in errors.
        may_lack: matches names of weights that may be missing or have another shape, and are then initialized.
        options: options of `from_pretrained`.

    Raises:
        ValueError: if weights are missing, and for the reasons of `load_model_and_drawn`.
        OSError: if the model does not exist.
    """
    model, drawn = load_model_and_drawn(model_class, path, label, **options)
    require_weights((name for name in drawn if not (may_lack and may_lack.search(name))), label)
    return model


def load_model_and_drawn(model_class: Any, path: str | Path, label: str, **options: Any) -> tuple[Any, set[str]]:
    """Loads a model from safetensors, and initializes the weights that are missing.

    Args:
        model_class: a class with `from_pretrained`, an Auto class or that of a model.
        path: a folder, or an id on the Hub.
        label: the model's name in errors.
        options: options of `from_pretrained`.

    Returns:
        The model, and the names of its weights that were missing or had another shape, and were drawn at random.

    Raises:
        ValueError: if the model cannot be loaded, needs code of its own, or has weights that are not finite.
        OSError: if the model does not exist.
    """
    with _plain_errors(label):
        model, info = model_class.from_pretrained(
            path,
            trust_remote_code=False,
            use_safetensors=True,
            # Their names are returned here.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    # Outputs are read by name, and expensive ones are requested for each call, whatever the configuration says.
    model.config.return_dict, model.config.output_attentions = True, False
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"{label} is an adapter of another model: merge it into that model and save the result")
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ValueError(f"{label} has weights that are not finite: {name!r}")
    if model.can_generate():
        _check_generation(model.generation_config, label)
    return model, {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}


def require_weights(drawn: Iterable[str], label: str) -> None:
    """Checks that no weights of a model had to be drawn at random.

    Raises:
        ValueError: if some were, naming one of them.
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
    except Exception as error:  # of any class, since transformers does not check the content of files
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            raise ValueError(
                f"{label} needs custom code, which is not run here: if you trust it, load it in Python with "
                "`trust_remote_code=True`"
            ) from None
        if not isinstance(error, (ValueError, StrictDataclassError, SafetensorError)):
            # The messages of those three are meant for users; others need the name of their class.
            reason = f"{type(error).__name__}: {reason}"
        raise ValueError(f"{label} cannot be loaded: {reason}") from error


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, label: str) -> None:
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise ValueError(f"{label} has no tokenizer, or one without a vocabulary")
    names: Any = tokenizer.model_input_names
    if not isinstance(names, list) or "input_ids" not in names:
        raise ValueError(f"{label} has a tokenizer whose `model_input_names` ({names!r}) do not name 'input_ids'")
    try:
        tokenizer(_UNKNOWN)
    except Exception as error:  # `tokenizers` raises this class itself
        raise ValueError(f"{label} has a tokenizer that fails on an unknown character: {error}") from None
    limit = tokenizer.model_max_length
    # Without a limit it is a number larger than any length, and not always an integer.
    is_number = isinstance(limit, int) or (isinstance(limit, float) and limit >= 2**53)
    if isinstance(limit, bool) or not is_number or limit < 1:
        raise ValueError(
            f"{label} has a tokenizer whose `model_max_length` ({limit!r}) must be a number of at least 1"
        )


def _check_generation(config: Any, label: str) -> None:
    for name in (*_TOKEN_IDS, *_LENGTHS):
        value = getattr(config, name, None)
        numbers = value if name == "eos_token_id" and isinstance(value, list) else [value]
        for number in numbers:
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
                raise ValueError(
                    f"{label} has a generation configuration with `{name}` {value!r}, which must be a whole number"
                )


MODEL = "model"


def model_path(model: str | Path) -> str:
    """Returns the path of a run's model if `model` is the folder of a run, or else `model` itself.

    Args:
        model: folder of a run, folder of a model, or id on the Hub.

    Raises:
        ValueError: if it is a folder without a model, such as that of an unfinished run, or if the model fails
            `check_model_folder`.
    """
    folder = Path(model)
    if (folder / MODEL / "config.json").is_file():
        folder = folder / MODEL
    elif not folder.is_dir():
        if folder.exists():
            raise ValueError(f"`model` ({model}) must be a folder, or an id on the Hub: it is a file")
        return str(model)
    elif not (folder / "config.json").is_file():
        raise ValueError(f"`model` ({model}) holds no model: the run may not have ended (`--resume` continues it)")
    check_model_folder(folder, f"`model` ({model})")
    return str(folder)


def require_text(text: str, argument: str) -> None:
    """Checks that a tokenizer can read a text.

    Raises:
        ValueError: if the text contains half a surrogate pair, which Python makes of an argument that is not UTF-8.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"`{argument}` ({text!r}) is no text: it holds bytes that are not UTF-8")


@contextmanager
def naming_the_model(argument: str, model: str | Path, path: str) -> Iterator[None]:
    """Turns transformers' error for a model that does not exist into an error that names the user's argument.

    Args:
        argument: name of the argument.
        model: value of the argument.
        path: path that the model is loaded from.

    Raises:
        ValueError: instead of an OSError, if `path` is neither a folder here nor a model on the Hub.
    """
    try:
        yield
    except OSError as error:
        if Path(path).exists():
            raise
        raise ValueError(
            f"`{argument}` ({model}) is no folder here, and could not be loaded from the Hub: {error}"
        ) from None
