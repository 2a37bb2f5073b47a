"""A streamed data set is read by one of two processes, and shared out to both: nothing twice, nothing left out."""

import contextlib
import json
import shutil
from collections import Counter

import datasets
import pytest
import torch

from regard.training.families.decoder import DECODER
from regard.training.families.train import train
from regard.training.loop.loop import Loop
from regard.training.reading import sources
from tests.support.decoding import TINY
from tests.support.forked import fork
from tests.support.thorough import slow_except
from tests.training.conftest import make_texts

TEXTS = make_texts(24, 5)
# Two epochs and a part of the third.
SETTINGS = {**TINY, "data": ["org/name"], "streaming": True, "epochs": 2.5, "batch_size": 12, "save_every": 2}
SETTINGS |= {"evaluate_every": 0, "workers": 0}


class Killed(BaseException):
    """What no code catches."""


def work(folder, cache: str, last: int | None = None) -> dict:
    """Trains to a step; tells of its own share: documents, how often they were streamed, and the rows of each step."""
    torch.set_num_threads(1)
    datasets.config.HF_DATASETS_CACHE = cache
    told = {"documents": [], "streamed": 0, "rows": {}}
    stream, load, step = sources.stream_rows, DECODER.load_data, Loop._step

    def streamed(*args):
        told["streamed"] += 1
        return stream(*args)

    def loaded(settings):
        parts = load(settings)
        told["documents"] = [text for part in parts for text in part["text"]]
        return parts

    def watched(self, batches, share):
        result = step(self, batches, share)
        told["rows"][self.progress.step] = [tuple(row.tolist()) for each in batches for row in each["input_ids"]]
        if self.progress.step == last:
            raise Killed
        return result

    sources.stream_rows, DECODER.load_data, Loop._step = streamed, loaded, watched
    with contextlib.suppress(Killed):
        train(DECODER, folder, SETTINGS, resume=True)
    return told


def rows_by_step(told: dict[int, dict]) -> dict[int, Counter]:
    """The rows that each step was of, over all processes."""
    (steps,) = {tuple(each["rows"]) for each in told.values()}
    return {step: sum((Counter(each["rows"][step]) for each in told.values()), Counter()) for step in steps}


@pytest.fixture(params=slow_except([3], [1, 2, 3]))
def hub(request, tmp_path, monkeypatch):
    """Stands in for the Hub, with a data set of some shards."""
    files, share = [], len(TEXTS) // request.param
    for shard in range(request.param):
        files.append(str(tmp_path / f"{shard}.jsonl"))
        with open(files[-1], "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS[shard * share : (shard + 1) * share])
    builder = datasets.load_dataset_builder
    monkeypatch.setattr(sources, "load_dataset_builder", lambda *_: builder("json", data_files=files))
    rows, _ = sources.open_hub_data_set("org/name", "train", streaming=True)
    assert rows.num_shards == request.param


@pytest.mark.usefixtures("hub")
def test_two_processes_share_it_out(tmp_path):
    def run(number: int, name: str, cache: str, last: int | None = None) -> dict[int, dict]:
        return fork(lambda: work(tmp_path / name, str(tmp_path / cache), last), number, patience=200)

    one, two = run(1, "one", "cache-1"), run(2, "two", "cache-2")
    for told in (*one.values(), *two.values()):
        assert sorted(told["documents"]) == sorted(TEXTS)
    # The second finds what the first has read.
    assert [two[rank]["streamed"] for rank in (0, 1)] == [1, 0]
    expected = rows_by_step(one)
    assert len(expected) > 5
    assert rows_by_step(two) == expected
    # No process has a part of the other's, and none a row twice in an epoch.
    epoch = range(1, len(expected) // 3)
    shares = [[row for step in epoch for row in two[rank]["rows"][step]] for rank in (0, 1)]
    assert len(shares[0]) == len(shares[1])
    assert max(Counter(shares[0] + shares[1]).values()) == 1

    # It is streamed anew where the run goes on: from the last checkpoint, in two processes and in one.
    cut = run(2, "cut", "cache-2", last=5)
    assert rows_by_step(cut) == {step: expected[step] for step in range(1, 6)}
    for number in (2, 1):
        shutil.copytree(tmp_path / "cut", tmp_path / f"again-{number}")
        resumed = run(number, f"again-{number}", f"cache-again-{number}")
        assert resumed[0]["streamed"] == 1
        assert rows_by_step(resumed) == {step: rows for step, rows in expected.items() if step > 4}
