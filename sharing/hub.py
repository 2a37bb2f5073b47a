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
# Model types that `export_model` writes.
EXPORTED_TYPES = ("bert", "blenderbot", "gpt2", "marian", "opt", "pegasus")
_CARD = "README.md"
# The state of a run, which `Trainer` keeps beside the model, and which users of the model don't need.
_RUN_STATE = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth", "checkpoint-*")
# Files of an earlier push that a push deletes: otherwise its shards would stay beside a single file of weights, and
# either could be loaded. Other files on the Hub stay.
_REPLACED = [WEIGHTS, INDEX, "model-*-of-*.safetensors", f"{_PACKAGE}_*.py"]
# Placeholder for the model's path in a card.
_PLACE = "PATH_OR_ID"
_BRANCH = re.compile(r"\w[\w./-]*", re.ASCII)
_TOKEN = re.compile(r"[\x21-\x7e]+")
# The Hub's names; its languages are codes of ISO 639 without a country.
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
    """Uploads a model with all the files that belong to it.

    The folder itself is not changed. Hidden files and the state of a `Trainer`'s run are not uploaded. Weights and
    code of an earlier push that the folder does not hold are deleted on the Hub.

    Args:
        folder: folder of a model of this package, or of an exported one, as `save_pretrained` writes it.
        repo_id: id of the repository on the Hub, which is made if it does not exist: `name/model`, or `model` for the
            account's own.
        private: whether to make a repository that others can't see.
        revision: branch to push to, made from `main` if it does not exist; None: `main`.
        bundle: whether to add the code of a model of this package, so that it loads where the package is not
            installed.
        token: token of an account that may write; None: the one of `hf auth login` or `HF_TOKEN`.
        message: message of the commit.
        card: text of a model card, used if neither `folder` nor the repository has one.
        license: license of the model for the card, as the Hub names it (`apache-2.0`); None keeps the card's.
        language: language of the model's texts for the card, or several, as the Hub names them (`en`); None keeps the
            card's.

    Returns:
        The address of the commit.

    Raises:
        ValueError: if the folder holds no such model, lacks files or holds pickles, if an argument is malformed, if
            the Hub refuses the card, or if the repository exists and is public but `private` is set.
        PermissionError: if there is no token, or it may not write to the repository.
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
            # Unless `private` is set, an organization's own default decides.
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
        ValueError: if it holds no such model, lacks files, or holds pickles or links that lead out of it.
    """
    if not folder.is_dir():
        raise ValueError(f"`folder` ({folder}) must be the folder of a model: there is no such folder")
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
    """Lists the files of a folder, as paths in it, without hidden ones and the state of a `Trainer`'s run."""
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    left_out = (".*", "__pycache__", *_RUN_STATE)
    return [
        path.as_posix()
        for path in paths
        if not any(fnmatchcase(part, pattern) for part in path.parts for pattern in left_out)
    ]


def _stays_inside(folder: Path, name: str) -> bool:
    """Returns whether a file lies in a folder once links are followed. The Hub's cache keeps the files beside it."""
    target, whole = (folder / name).resolve(), folder.resolve()
    return target.is_relative_to(whole) or (
        whole.parent.name == "snapshots" and target.is_relative_to(whole.parents[1] / "blobs")
    )


def _stage(folder: Path, staged: Path) -> None:
    """Copies the files of a folder into another, where they can be changed; weights are linked."""
    for name in _files(folder):
        source, target = (folder / name).resolve(), staged / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".safetensors":
            shutil.copyfile(source, target)
            continue
        # Weights are large and never changed, and the temporary folder may be in memory.
        try:
            os.symlink(source, target)
        except OSError:
            shutil.copyfile(source, target)


def _card_facts(license: str | None, language: str | Sequence[str] | None) -> dict[str, Any]:
    """Returns the entries of a card's metadata for a license and languages.

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
    """Makes a card's example load the model from the Hub, and adds entries to its metadata."""
    if path.exists():
        text = path.read_text(encoding="utf-8").replace(f'"{_PLACE}"', f'"{repo_id}"')
        if facts:
            try:
                card = ModelCard(text)
            # PyYAML lets the last four through, for example for a date that does not exist.
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
    # Otherwise the client's own error would show it.
    if not _TOKEN.fullmatch(token):
        raise ValueError("`token` holds characters that no token of the Hub has: copy it anew")
    return token


@contextmanager
def _plain_errors(repo_id: str, token: str) -> Iterator[None]:
    """Turns an error of the Hub's client into one line that says what to do, and does not show the token."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        # The client wraps errors of single files.
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        plain = _plain_error(cause, repo_id, lambda text: " ".join(str(text).replace(token, "***").split()))
        # Without a cause, since the original error may hold the token.
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
