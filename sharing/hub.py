"""Pushing a model to the Hub: what is sent, what is refused, and errors that say what to do."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from ..families.registry import family_of_type
from ..modeling.loading.folder import CONFIG, INDEX, PICKLES, WEIGHTS, check_weights, read_json
from .bundle import remove_bundle, write_bundle

_PACKAGE = __name__.partition(".")[0]
# What `export_model` makes.
EXPORTED_TYPES = ("bert", "blenderbot", "gpt2", "marian", "opt", "pegasus")
_CARD = "README.md"
# What `Trainer` keeps of a run beside the model; to share a model it is not needed.
_RUN_STATE = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth", "checkpoint-*")
# What a push replaces as a whole: shards of an earlier one would else lie beside a single file, and win or lose by
# chance. Other files that are there already stay.
_REPLACED = [WEIGHTS, INDEX, "model-*-of-*.safetensors", f"{_PACKAGE}_*.py"]
# What stands in a card for the place of the model.
_PLACE = "PATH_OR_ID"
_BRANCH = re.compile(r"\w[\w./-]*", re.ASCII)
_TOKEN = re.compile(r"[\x21-\x7e]+")
# As the Hub names them; it knows languages by the codes of ISO 639 alone, without a country.
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    bundle: bool = True,
    token: str | None = None,
    message: str | None = None,
    card: str | None = None,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
) -> str:
    """Uploads a model with all that belongs to it.

    `folder` itself is left as it is; hidden files and the state of a `Trainer`'s run stay behind. Weights and code of
    an earlier push that are no longer there are deleted on the Hub.

    Args:
        folder: a model of this package, or one that was exported, as `save_pretrained` writes it.
        repo_id: of the repository on the Hub, made if it is not there: `name/model`, or `model` for one's own.
        private: whether others may not see it.
        revision: the branch to push to, made from `main` if it is not there; None: `main`.
        bundle: whether to add the code of a model of this package, so that it loads where that is not installed.
        token: of an account that may write; None: the one of `hf auth login` or `HF_TOKEN`.
        message: of the commit.
        card: text of a model card, taken if neither `folder` nor the repository has one.
        license: of the model, as the Hub names it (`apache-2.0`), for the card; None: what the card says.
        language: of the model's texts, or several, as the Hub names them (`en`); None: what the card says.

    Returns:
        The address of the commit.

    Raises:
        ValueError: if the folder is no such model, is not whole or holds pickles, if an argument is not what it should
            be, if the card is refused, or if a repository that was to be private is there and public.
        PermissionError: if there is no token, or it may not write there.
        ConnectionError: if the Hub cannot be reached, or the connection breaks for good.
        OSError: if the Hub refuses for another reason.
    """
    folder = Path(folder)
    model_type = check_folder(folder)
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"`repo_id` ({repo_id!r}) must be a name such as `someone/model`: {error}") from None
    if revision is not None and not _BRANCH.fullmatch(revision):
        raise ValueError(f"`revision` ({revision!r}) must be the name of a branch, of letters, digits and any of ._-/")
    facts = _card_facts(license, language)
    if constants.is_offline_mode():
        raise ConnectionError("the Hub is not asked in offline mode: unset HF_HUB_OFFLINE to push")
    token = _find_token(token)
    api = HfApi(token=token, library_name=_PACKAGE)
    with tempfile.TemporaryDirectory(prefix="regard-push-") as temporary:
        staged = Path(temporary)
        _stage(folder, staged)
        if not bundle:
            remove_bundle(staged)
        elif model_type not in EXPORTED_TYPES:
            write_bundle(staged)
        with _plain_errors(repo_id, token):
            # An organization's own default holds unless it is to be private.
            repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
            if private and not api.repo_info(repo_id).private:
                raise ValueError(f"`private`: {repo_id} is there already and public: make it private on the Hub first")
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            if not (staged / _CARD).exists() and (card is not None or facts):
                if not api.file_exists(repo_id, _CARD, revision=revision):
                    (staged / _CARD).write_text(card or "", encoding="utf-8")
                elif facts:
                    api.hf_hub_download(repo_id, _CARD, revision=revision, local_dir=staged)
            _fill_card(staged / _CARD, repo_id, facts)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=staged,
                revision=revision,
                commit_message=message or f"Push a model of the type {model_type}",
                delete_patterns=_REPLACED,
            )
    return commit.commit_url


def check_folder(folder: Path) -> str:
    """Checks that a folder is a model that can be shared.

    Returns:
        The model type.

    Raises:
        ValueError: if it is not one, is not whole, or holds pickles or links that lead out of it.
    """
    if not folder.is_dir():
        raise ValueError(f"`folder` ({folder}) must be the folder of a model: there is none of that name")
    label = f"`folder` ({folder})"
    config = read_json(folder, CONFIG, label)
    model_type: Any = config.get("model_type")
    if model_type not in EXPORTED_TYPES and family_of_type(model_type) is None:
        raise ValueError(
            f"`folder` ({folder}) holds a model of the type {model_type!r}, which is neither one of {_PACKAGE}'s nor "
            f"one that it exports to: {', '.join(EXPORTED_TYPES)}"
        )
    pickles = [name for name in _files(folder) if name.lower().endswith(PICKLES)]
    if pickles:
        raise ValueError(
            f"`folder` ({folder}) holds {', '.join(pickles)}, which may run code when loaded and are not shared: save "
            "the weights with `save_pretrained`, as safetensors, and take such files out"
        )
    astray = [name for name in _files(folder) if not _stays_inside(folder, name)]
    if astray:
        raise ValueError(
            f"`folder` ({folder}) holds {astray[0]}, a link to {(folder / astray[0]).resolve()}, which is outside of "
            "it and not shared: put the file itself there"
        )
    check_weights(folder, label)
    return model_type


def _files(folder: Path) -> list[str]:
    """The files of a folder that are neither hidden nor the state of a `Trainer`'s run, as paths in it."""
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    left_out = (".*", "__pycache__", *_RUN_STATE)
    return [
        path.as_posix()
        for path in paths
        if not any(fnmatchcase(part, pattern) for part in path.parts for pattern in left_out)
    ]


def _stays_inside(folder: Path, name: str) -> bool:
    """Whether a file lies in a folder, whatever links lead to it; that of a Hub's cache has its files beside it."""
    target, whole = (folder / name).resolve(), folder.resolve()
    return target.is_relative_to(whole) or (
        whole.parent.name == "snapshots" and target.is_relative_to(whole.parents[1] / "blobs")
    )


def _stage(folder: Path, staged: Path) -> None:
    """Puts the files of a folder into another, where they may be changed without changing the first."""
    for name in _files(folder):
        source, target = (folder / name).resolve(), staged / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".safetensors":
            shutil.copyfile(source, target)
            continue
        # Weights are large, never changed, and the temporary folder may well be in memory.
        try:
            os.symlink(source, target)
        except OSError:
            shutil.copyfile(source, target)


def _card_facts(license: str | None, language: str | Sequence[str] | None) -> dict[str, Any]:
    """What of this a card's metadata is to hold.

    Raises:
        ValueError: if the Hub has no such names.
    """
    facts: dict[str, Any] = {}
    if license is not None:
        if not _LICENSE.fullmatch(license):
            raise ValueError(
                f"`license` ({license!r}) must be as the Hub names it, in lower case: apache-2.0, mit, other and so on"
            )
        facts["license"] = license
    languages = [language] if isinstance(language, str) else list(dict.fromkeys(language or ()))
    for each in languages:
        if not _LANGUAGE.fullmatch(each):
            raise ValueError(
                f"`language` ({each!r}) must be a code of two or three lower-case letters, such as en, or "
                "'multilingual' or 'code'"
            )
    if languages:
        facts["language"] = languages[0] if len(languages) == 1 else languages
    return facts


def _fill_card(path: Path, repo_id: str, facts: dict[str, Any]) -> None:
    """Has a card's example load the model from the Hub, and its metadata hold these facts."""
    if path.exists():
        text = path.read_text(encoding="utf-8").replace(f'"{_PLACE}"', f'"{repo_id}"')
        if facts:
            try:
                card = ModelCard(text)
            # The last four for a date that there is not, and the like.
            except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
                raise ValueError(f"the metadata of {_CARD} is not YAML: {error}") from None
            for name, value in facts.items():
                card.data[name] = value
            text = str(card)
        path.write_text(text, encoding="utf-8", newline="\n")


def _find_token(token: str | None) -> str:
    token = (token or get_token() or "").strip()
    if not token:
        raise PermissionError("pushing needs a token of the Hub: run `hf auth login`, or set HF_TOKEN")
    # Else the client's own error would show it.
    if not _TOKEN.fullmatch(token):
        raise ValueError("`token` holds characters that no token of the Hub has: copy it anew")
    return token


@contextmanager
def _plain_errors(repo_id: str, token: str) -> Iterator[None]:
    """Turns errors of the Hub's client into one line each that says what to do, without the token."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        # What went wrong with one file comes wrapped.
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        plain = _plain_error(cause, repo_id, lambda text: " ".join(str(text).replace(token, "***").split()))
        # Nor is the token in what the error came from.
        raise plain from None


def _plain_error(error: BaseException, repo_id: str, line: Callable[[object], str]) -> Exception:
    if isinstance(error, HfHubHTTPError):
        status, said = error.response.status_code, line(error.server_message or error)
        if status == 400:
            return ValueError(f"the Hub refused what was to be pushed to {repo_id}: {said}")
        if status == 401:
            return PermissionError(
                "the Hub does not know the token: run `hf auth login` anew, or set HF_TOKEN to a valid one"
            )
        if status == 403:
            return PermissionError(
                f"the token may not write to {repo_id}: take one with write access, of an account that has it ({said})"
            )
        if status == 404:
            return OSError(f"the Hub has no {repo_id} for this token, or not all of it: check the name ({said})")
        if status == 429 or status >= 500:
            return ConnectionError(f"the Hub is not ready, with status {status}: push again later ({said})")
        return OSError(f"the Hub refused the push to {repo_id}, with status {status}: {said}")
    if isinstance(error, HTTPError | ConnectionError):
        return ConnectionError(
            f"the connection to the Hub at {constants.ENDPOINT} failed: check the network and push again "
            f"({line(error) or type(error).__name__})"
        )
    return ValueError(line(error)) if isinstance(error, ValueError) else OSError(line(error))
