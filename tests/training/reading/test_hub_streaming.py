"""Streamed data sets whose connection breaks: no row is lost, none comes twice, and the end is one clear line."""

import json
import logging
import time
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub.utils import httpx

from regard.training.reading import hub_streaming as streaming
from regard.training.reading.documents import load_documents
from regard.training.reading.hub_streaming import WAITS, stream_rows
from tests.support.hub.client import Client
from tests.support.hub.data_set import NAME, DataSetHub

# The second of the files is read in more than one request, each for about 15 MB.
PARTS, ROWS = 4, 1100
TEXTS = [f"part {part}, row {row} " + "x" * 20_000 * (part == 1) for part in range(PARTS) for row in range(ROWS)]
EXPECTED = [(text, f"{NAME}:{number}") for number, text in enumerate(TEXTS, start=1)]


def read(cache: str) -> tuple[list[tuple[str, str]] | str, list[str], list[float]]:
    """Streams the data set in a process of its own: its rows or an error, what was logged of it, and our waits."""
    datasets.config.HF_DATASETS_CACHE = cache
    messages: list[str] = []
    waits: list[float] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("regard.training").handlers = [handler]
    time.sleep = lambda seconds: None  # what huggingface_hub and `datasets` wait between tries of their own
    streaming.time = SimpleNamespace(sleep=waits.append)
    try:
        corpus = load_documents(NAME, streaming=True)
        return list(zip(corpus["text"], corpus["source"], strict=True)), messages, waits
    except (ConnectionError, ValueError) as error:
        return f"{type(error).__name__}: {error}", messages, waits


@pytest.fixture(scope="module")
def hub():
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    parts = (lines[part * ROWS : (part + 1) * ROWS] for part in range(PARTS))
    with DataSetHub({f"train-{number}.jsonl": "".join(part).encode() for number, part in enumerate(parts)}) as hub:
        yield hub


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    with Client(hub.environment(tmp_path_factory.mktemp("home"))) as client:
        yield client


@pytest.fixture
def stream(hub, client, tmp_path):
    """Reads from the Hub as it now is."""
    hub.faults.clear()
    hub.log.clear()
    return lambda: client(read, str(tmp_path))


@pytest.mark.parametrize(("part", "from_byte"), [(1, 0), (1, 1), (3, 0)])
def test_hub_that_refuses_for_a_while(stream, hub, part, from_byte):
    # The six tries of huggingface_hub fail twice, and two of the third time.
    hub.fail(f"GET .*train-{part}.jsonl", times=14, status=500, from_byte=from_byte)
    found, messages, waits = stream()
    assert found == EXPECTED
    assert waits == list(WAITS[:2])
    rows = {int(message.split(" ")[0].rpartition(":")[2]) for message in messages}
    assert len(messages) == 2
    assert len(rows) == 1
    assert part * ROWS < rows.pop() <= (part + 1) * ROWS - (from_byte == 0) * (ROWS - 1)
    # It did not begin anew: once for the columns, once for the rows.
    if part == 3:
        assert len([path for _, path, _ in hub.log if path.endswith("train-0.jsonl")]) == 2


def test_connection_that_breaks_is_left_to_huggingface_hub(stream, hub):
    hub.cut("GET .*train-[12].jsonl", times=3, after=1000)
    assert stream() == (EXPECTED, [], [])


def test_hub_that_does_not_come_back(stream, hub):
    hub.fail("GET .*train-2.jsonl", times=10**6)
    found, messages, waits = stream()
    assert found.startswith(f"ConnectionError: {NAME}:{2 * ROWS + 1} can't be reached, 6 times in a row: ")
    assert "503" in found
    assert "\n" not in found
    assert len(messages) == 5
    assert waits == list(WAITS)


def test_connection_that_is_lost_for_good(stream, hub):
    # `datasets` has then tried for long enough.
    hub.cut("GET .*train-2.jsonl", times=10**6, after=1000)
    found, _, waits = stream()
    assert found == f"ConnectionError: {NAME}:{2 * ROWS + 1} can't be reached: ConnectionError: Server Disconnected"
    assert waits == []


@pytest.mark.parametrize("status", [401, 403])
def test_what_will_not_pass_is_not_tried_again(stream, hub, status):
    hub.fail("GET .*train-2.jsonl", times=10**6, status=status)
    found, _, waits = stream()
    assert found.startswith(f"ConnectionError: {NAME}:{2 * ROWS + 1} can't be reached: ")
    assert str(status) in found
    assert waits == []


# By injection


def rows_that_break(errors: dict[int, list[Exception]]) -> datasets.IterableDataset:
    """Twelve rows in three shards. At some rows there are errors, each of them once."""

    def generate(shards):
        for shard in shards:
            for row in range(4 * shard, 4 * shard + 4):
                if errors.get(row):
                    raise errors[row].pop(0)
                yield {"text": f"{row}"}

    return datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1, 2]})


@pytest.fixture
def waits(monkeypatch):
    found = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def answered(status: int) -> Exception:
    request = httpx.Request("GET", "http://127.0.0.1/")
    return httpx.HTTPStatusError("refused", request=request, response=httpx.Response(status, request=request))


PASSING = [ConnectionResetError(104, "reset"), EOFError("cut"), TimeoutError(), httpx.ReadError("lost"), answered(502)]


LOST = [(PASSING[0], row, columns) for row in (0, 1, 3, 4, 6, 11) for columns in (False, True)]
LOST += [(error, 4, False) for error in (*PASSING[1:], answered(408), answered(429))]


@pytest.mark.parametrize(("error", "row", "columns"), LOST)
def test_no_row_is_lost_or_doubled(waits, error, row, columns):
    rows = rows_that_break({row: [error] * 3, 9: [error]})
    rows = rows.select_columns(["text"]) if columns else rows
    assert [found["text"] for found in stream_rows(rows, "org/name")] == [str(number) for number in range(12)]
    # Counted anew once a row has come.
    assert waits == [*WAITS[:3], WAITS[0]] if row < 9 else [WAITS[0], *WAITS[:3]]


@pytest.mark.parametrize("row", [0, 5])
def test_last_try(waits, row):
    rows = stream_rows(rows_that_break({row: [ConnectionResetError("reset")] * 6}), "org/name")
    assert [next(rows)["text"] for _ in range(row)] == [str(number) for number in range(row)]
    with pytest.raises(ConnectionError) as raised:
        next(rows)
    assert str(raised.value) == (f"org/name:{row + 1} can't be reached, 6 times in a row: ConnectionResetError: reset")
    assert waits == list(WAITS)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (answered(404), ConnectionError),
        (ConnectionError("Server Disconnected"), ConnectionError),
        (ValueError("does not\nparse"), ValueError),
        (FileNotFoundError("gone"), ValueError),
    ],
)
def test_error_that_another_try_does_not_help(waits, error, kind):
    with pytest.raises(kind, match=r"^org/name:6 can't be (reached|read): \w+: [^\n]+$"):
        list(stream_rows(rows_that_break({5: [error]}), "org/name"))
    assert waits == []
