"""Atomic writing of files and folders: after any interruption, each exists complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

# Prefixes of files and folders that are being written, and of those that are being deleted. Readers ignore both.
PARTIAL, OLD = "partial-", "old-"

# safetensors and torch raise their own errors when the disk is full.
WRITE_ERRORS = (OSError, SafetensorError, RuntimeError)


def flush(path: Path) -> None:
    """Forces a file or folder from the system's buffers to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_in(partial: Path, final: Path) -> None:
    """Renames a completely written file or folder to its final name, and deletes what had that name before.

    Args:
        partial: path of the written file or folder, in the same folder as `final`.
        final: path to rename it to.
    """
    # Without this, a loss of power could leave the new name without the content.
    for path in (*partial.rglob("*"), partial):
        flush(path)
    if final.is_dir():
        set_aside(final)
    os.replace(partial, final)
    flush(final.parent)
    delete_leftovers(final.parent, OLD, final.name)


def set_aside(folder: Path) -> Path:
    """Renames a folder before it is deleted, so that a half-deleted one is not mistaken for a complete one.

    Returns:
        The new path.
    """
    delete_leftovers(folder.parent, OLD, folder.name)
    aside = folder.with_name(f"{OLD}{folder.name}")
    os.replace(folder, aside)
    return aside


def delete_leftovers(folder: Path, prefix: str, name: str = "*") -> None:
    """Deletes what an interrupted write or deletion left in a folder."""
    for path in folder.glob(f"{prefix}{name}"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_text(file: Path, text: str) -> None:
    """Writes a text file atomically: under a temporary name first, which is then replaced by the final one."""
    partial = file.with_name(f"{PARTIAL}{file.name}")
    partial.write_text(text, encoding="utf-8")
    rename_in(partial, file)


def attempt(work: Callable[[], object]) -> Exception | None:
    """Calls a function that writes to the disk, and returns the error if that fails."""
    try:
        work()
    except WRITE_ERRORS as error:
        return error
    return None


def not_written(what: str, folder: Path, error: Exception | None, otherwise: str = "") -> OSError:
    """Makes an error that says in one line that something could not be written, and why.

    Args:
        what: words for what could not be written, such as "the model".
        folder: folder that it was to be written to.
        error: the error that was raised; None if it was raised in another process.
        otherwise: text to append to the message.
    """
    if error is None:
        reason = "another process failed to write its part"
    elif isinstance(error, OSError):
        reason = error.strerror or str(error)
    elif shutil.disk_usage(folder).free < 2**20:
        # torch does not report that the disk is full.
        reason = os.strerror(28)
    else:
        reason = " ".join(str(error).split())
    return OSError(f"{what} could not be written to {folder}: {reason}{otherwise}")
