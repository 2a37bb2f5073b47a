"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

# What is being written, and what was replaced and is being deleted. Neither counts.
PARTIAL, OLD = "partial-", "old-"

# Of a full disk safetensors and torch tell by errors of their own.
WRITE_ERRORS = (OSError, SafetensorError, RuntimeError)


def flush(path: Path) -> None:
    """Has a file or folder on the disk, not only in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_in(partial: Path, final: Path) -> None:
    """Gives what is written to its end, a file or a folder, its name; what had the name before is deleted.

    Args:
        partial: what was written, in the folder of `final`.
        final: the name.
    """
    # Without this, a machine that loses power can keep the new name and lose the content.
    for path in (*partial.rglob("*"), partial):
        flush(path)
    if final.is_dir():
        set_aside(final)
    os.replace(partial, final)
    flush(final.parent)
    delete_leftovers(final.parent, OLD, final.name)


def set_aside(folder: Path) -> Path:
    """Takes a folder's name away before it is deleted, so that no half of it is taken for the whole."""
    delete_leftovers(folder.parent, OLD, folder.name)
    aside = folder.with_name(f"{OLD}{folder.name}")
    os.replace(folder, aside)
    return aside


def delete_leftovers(folder: Path, prefix: str, name: str = "*") -> None:
    """Deletes what an interrupted writing or deletion left in a folder."""
    for path in folder.glob(f"{prefix}{name}"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_text(file: Path, text: str) -> None:
    """Writes a file beside, and renames it in."""
    partial = file.with_name(f"{PARTIAL}{file.name}")
    partial.write_text(text, encoding="utf-8")
    rename_in(partial, file)


def attempt(work: Callable[[], object]) -> Exception | None:
    """Does what writes to the disk; returns the error if that fails."""
    try:
        work()
    except WRITE_ERRORS as error:
        return error
    return None


def not_written(what: str, folder: Path, error: Exception | None, otherwise: str = "") -> OSError:
    """The error of one line that tells that something could not be written.

    Args:
        what: it was.
        folder: where to.
        error: that was met; None: another process met it.
        otherwise: what there is to add.
    """
    if error is None:
        reason = "another process failed to write its part"
    elif isinstance(error, OSError):
        reason = error.strerror or str(error)
    elif shutil.disk_usage(folder).free < 2**20:
        # Which torch does not tell.
        reason = os.strerror(28)
    else:
        reason = " ".join(str(error).split())
    return OSError(f"{what} could not be written to {folder}: {reason}{otherwise}")
