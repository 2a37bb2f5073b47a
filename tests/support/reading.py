"""What the tests of sources share: files to read, and how a refusal must look."""

import gzip
import json
import os
from collections.abc import Callable

import pytest

from regard.training.reading.documents import load_documents


def write(name: str, content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "wb") as file:
        file.write(gzip.compress(data) if name.lower().endswith(".gz") else data)
    return name


def write_lines(name: str, *rows: dict) -> str:
    return write(name, "".join(json.dumps(row) + "\n" for row in rows))


def rows_of(*args, **kwargs) -> list[tuple[str, str]]:
    """The documents of a corpus and where they are from."""
    corpus = load_documents(*args, **kwargs)
    assert corpus.column_names == ["text", "source"]
    return list(zip(corpus["text"], corpus["source"], strict=True))


def texts_of(*args, **kwargs) -> list[str]:
    return [text for text, _ in rows_of(*args, **kwargs)]


def refusal_by(load: Callable, *args, error: type[Exception] = ValueError, **kwargs) -> str:
    """The message of the error that these arguments give: one line, and no trace of the library underneath."""
    with pytest.raises(error) as raised:
        load(*args, **kwargs)
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is None or raised.value.__suppress_context__
    return str(raised.value)
