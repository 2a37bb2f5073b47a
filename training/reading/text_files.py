"""Reading text files that may be gzipped, as UTF-8: in pieces of a bounded size, and on past what is no text."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

from .bad_records import BadRecords

_GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)


def open_file(name: str, mode: str, **options: Any) -> Any:
    """Opens a file that may be gzipped."""
    return gzip.open(name, mode, **options) if name.lower().endswith(".gz") else open(name, mode, **options)


def open_text(name: str, newline: str | None = None, errors: str = "strict") -> IO[str]:
    """Opens a text that may be gzipped."""
    file: IO[str] = open_file(name, "rt", encoding="utf-8-sig", newline=newline, errors=errors)
    return file


@contextmanager
def naming_the_file(name: str) -> Iterator[None]:
    """Names the file, and the place in it, in the errors of the decoders of UTF-8 and of gzip."""
    try:
        yield
    except UnicodeDecodeError:
        raise ValueError(_undecodable(name)) from None
    except _GZIP_ERRORS as error:
        raise ValueError(f"{name!r} is not a complete gzip file: {error}") from None


def read_pieces(
    name: str, bad: BadRecords, read: Callable[[IO[str]], str], newline: str | None = None
) -> Iterator[tuple[int, str]]:
    """Reads a text that may be gzipped, piece by piece.

    A byte that is not UTF-8 becomes half a surrogate pair, which no UTF-8 gives: see `require_utf8`. A gzip file that
    is damaged counts as one bad record, with all that would have followed.

    Args:
        name: of the file.
        bad: takes note.
        read: reads the next piece; none are left when it is empty.
        newline: as of `open`.

    Yields:
        The number of the piece, from 1, and the piece.
    """
    number = 0
    try:
        with open_text(name, newline, errors="surrogateescape") as file:
            for number, piece in enumerate(iter(partial(read, file), ""), start=1):
                yield number, piece
    except _GZIP_ERRORS as error:
        place = f", after line {number:,}" if number else ""
        bad.add(ValueError(f"{name!r} is not a complete gzip file{place}: {error}"))


def read_lines(name: str, bad: BadRecords, longest: int, newline: str | None = None) -> Iterator[tuple[int, str]]:
    """Reads the lines of a text, see `read_pieces`.

    Of a line that is longer than `longest`, one character more than that is given, and the rest is never in memory.
    """

    def read(file: IO[str]) -> str:
        line = rest = file.readline(longest + 1)
        while len(rest) > longest and not rest.endswith(("\n", "\r")):
            rest = file.readline(longest + 1)
        return line

    return read_pieces(name, bad, read, newline)


def require_utf8(text: str, where: str, name: str, bad: BadRecords) -> None:
    """Refuses what `read_pieces` gave for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if bad.stops:
            raise ValueError(_undecodable(name)) from None
        byte = ord(text[error.start]) - 0xDC00
        raise ValueError(f"{where} is not UTF-8: byte 0x{byte:02x} after {error.start:,} characters") from None


def _undecodable(name: str) -> str:
    # The decoder knows the place within its buffer only. No line of UTF-8 can break inside a character.
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
