"""Text files in UTF-8, gzipped or not, read in pieces of bounded size; bytes that are not UTF-8 can be passed over."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any

from .bad_records import BadRecords

_GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)


def open_file(name: str, mode: str, **options: Any) -> Any:
    """Opens a file, which is decompressed if its name ends in `.gz`."""
    return gzip.open(name, mode, **options) if name.lower().endswith(".gz") else open(name, mode, **options)


def read_pieces(
    name: str, bad: BadRecords, read: Callable[[IO[str]], str], newline: str | None = None
) -> Iterator[tuple[int, str]]:
    """Reads a text file piece by piece.

    A byte that is not UTF-8 becomes half a surrogate pair, which valid UTF-8 never contains; `require_utf8` finds it.
    A damaged gzip file counts as one bad record, together with everything after the damage.

    Args:
        name: name of the file.
        bad: receives the bad records.
        read: reads the next piece from the open file; returns an empty string at the end.
        newline: as for `open`.

    Yields:
        The number of the piece, from 1, and the piece.
    """
    number = 0
    try:
        options = {"encoding": "utf-8-sig", "newline": newline, "errors": "surrogateescape"}
        with open_file(name, "rt", **options) as file:
            for number, piece in enumerate(iter(partial(read, file), ""), start=1):
                yield number, piece
    except _GZIP_ERRORS as error:
        place = f", after line {number:,}" if number else ""
        bad.add(ValueError(f"{name!r} is not a complete gzip file{place}: {error}"))


def read_lines(name: str, bad: BadRecords, longest: int, newline: str | None = None) -> Iterator[tuple[int, str]]:
    """Reads a text file line by line; see `read_pieces` for the arguments and for what is yielded.

    A line of more than `longest` characters is cut after `longest + 1` of them, and its rest is never in memory.
    """

    def read(file: IO[str]) -> str:
        line = rest = file.readline(longest + 1)
        while len(rest) > longest and not rest.endswith(("\n", "\r")):
            rest = file.readline(longest + 1)
        return line

    return read_pieces(name, bad, read, newline)


def require_utf8(text: str, where: str, name: str, bad: BadRecords) -> None:
    """Raises a ValueError if `read_pieces` met bytes that are not UTF-8 in a text.

    Args:
        text: a piece of the file, or part of one.
        where: its place, for the error if bad records are skipped.
        name: name of the file, in which the byte is looked up if the first bad record stops the reading.
        bad: says which of the two it is.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if bad.stops:
            raise ValueError(_undecodable(name)) from None
        byte = ord(text[error.start]) - 0xDC00
        raise ValueError(f"{where} is not UTF-8: byte 0x{byte:02x} after {error.start:,} characters") from None


def _undecodable(name: str) -> str:
    # The decoder knows the place in its buffer only. Lines can be decoded one by one: none ends inside a character.
    offset = 0
    try:
        with open_file(name, "rb") as file:
            for line in file:
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    place = f"byte {offset + error.start:,} (0x{line[error.start]:02x})"
                    return f"{name!r} is not UTF-8: {place}; if it is text, re-encode it (iconv -t UTF-8)"
                offset += len(line)
    except _GZIP_ERRORS as error:
        # The line may go on beyond what the decoder had.
        return f"{name!r} is not a complete gzip file: {error}"
    return f"{name!r} changed while it was read"


def num_bytes(text: str, where: str) -> int:
    """Returns the size of a text in UTF-8.

    Raises:
        ValueError: if it contains half a surrogate pair and so has no UTF-8.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: character {error.start} is half a surrogate pair, which is no text") from None


def require_content(text: str, column: str, where: str) -> None:
    """Raises a ValueError if a text has no UTF-8, or is empty or nothing but white space."""
    num_bytes(text, where)
    if not text.strip():
        raise ValueError(f"{where}: column {column!r} must hold text, not nothing or white space alone")
