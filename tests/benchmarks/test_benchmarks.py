"""The benchmarks' harness: what it refuses to time, what it makes of the times, and that every benchmark runs."""

import importlib
import json
import math
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import NAMES, pretraining, recurrent, report
from benchmarks.__main__ import chosen_cases, main
from benchmarks.compare import Case, Disagreement, agree, compare
from benchmarks.sides import SideFailed
from regard.modeling.cpu import without_row_padding

OURS_SECONDS, STOCK_SECONDS = [7.0, 1.0, 2.0, 3.0, 5.0, 4.0], [9.0, 3.0, 1.0, 6.0, 4.0, 20.0]

TOY = f"""
import os
import sys
from benchmarks.compare import Case
from benchmarks.sides import Side, Work

TITLE = "A toy"
MEBIBYTE = 2**20

def write_inputs(parameters, folder):
    (folder / "total").write_text("2.5")

class Ours(Side):
    seconds = {OURS_SECONDS}
    off = 0.0

    def check(self):
        total = float((self.folder / "total").read_text()) + self.off
        return {{"total": total, "values": [[0.0, total]], "tokens": [3, 1], "text": "a"}}

    def run(self, turn):
        with open(self.parameters["log"], "a") as log:
            log.write(f"{{type(self).__name__}} {{turn}}\\n")
        print("what libraries print is no answer")
        return Work(self.seconds[turn], units=10 + turn, flops=8.0)

class Stock(Ours):
    seconds = {STOCK_SECONDS}

class Off(Stock):
    off = 2.5e-3

class Large(Stock):
    def run(self, turn):
        if turn == 0:
            len(b"x" * (64 * MEBIBYTE))  # for a moment
        return super().run(turn)

class Absent(Stock):
    needs = ("json", "no_such_module")

class Raising(Stock):
    def check(self):
        raise RuntimeError("out of paper")

class Dying(Stock):
    def run(self, turn):
        os._exit(3)

SIDES = {{"ours": Ours, "stock": Stock, "off": Off, "large": Large, "absent": Absent, "raising": Raising,
         "dying": Dying}}
CASES = {{}}
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A benchmark whose sides make up their times; the sides of the case may be named."""
    (tmp_path / "toy_benchmark.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_benchmark", raising=False)
    module = importlib.import_module("toy_benchmark")
    log = tmp_path / "log"

    def run(*sides, **fields):
        fields = {"warm_up": 2, "repetitions": 4, "parameters": {"log": str(log)}, **fields}
        module.CASES["case"] = Case("work", sides=sides, **fields)
        return compare(module, "case", threads=1)

    run.log = lambda: log.read_text().splitlines() if log.exists() else []
    return run


def test_sides_take_turns_and_are_compared_turn_by_turn(toy):
    row = toy("ours", "stock")
    assert toy.log() == [f"{side} {turn}" for turn in range(6) for side in ("Ours", "Stock")]
    assert row["sides"]["ours"]["seconds"] == OURS_SECONDS[2:]
    assert row["sides"]["stock"]["units"] == [12, 13, 14, 15]
    speeds = {"ours": [12 / 2, 13 / 3, 14 / 5, 15 / 4], "stock": [12 / 1, 13 / 6, 14 / 4, 15 / 20]}
    for side, values in speeds.items():
        assert row["sides"][side]["speed"] == pytest.approx(np.median(values))
    ratios = np.divide(speeds["ours"], speeds["stock"])  # 0.5, 2, 0.8, 5: their median is not that of the medians
    assert row["peers"]["stock"]["speed"] == pytest.approx(1.4)
    assert row["peers"]["stock"]["speed_quartiles"] == pytest.approx(np.percentile(ratios, [25, 75]))
    assert row["sides"]["ours"]["flops_per_second"] == pytest.approx(np.median([8 / s for s in OURS_SECONDS[2:]]))


def test_nothing_is_timed_where_the_sides_disagree(toy):
    with pytest.raises(Disagreement, match=r"case: `total` is 2\.5 for 'ours' and 2\.5025 for 'off'.*1e-05"):
        toy("ours", "stock", "off", tolerance=1e-5)
    assert toy.log() == []
    assert toy("ours", "off", tolerance=2e-3)["checked"]["off"]["total"] == 2.5025


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1.0, 1.00009, True),
        (1.0, 1.00011, False),
        (-1.0, 1.0, False),
        ([[100.0, 0.0]], [[100.0, 0.009]], True),
        ([[100.0, 0.0]], [[100.0, 0.011]], False),
        ([1.0, 2.0], [1.0], False),
        (math.nan, math.nan, False),
        (100_000, 100_001, False),
        (100_000, 100_001.0, True),
        ([1, 2], [1, 2], True),
        ("a", "a", True),
        ("a", "b", False),
        ([], [], True),
    ],
)
def test_what_agrees(one, other, same):
    assert agree(one, other, tolerance=1e-4) is same


def test_an_absent_peer_is_left_out_with_the_reason(toy):
    row = toy("ours", "absent", "stock")
    assert row["skipped"] == {"absent": "no_such_module is not installed"}
    assert list(row["peers"]) == ["stock"]


def test_memory_is_the_peak_of_each_process(toy):
    row = toy("ours", "large")
    ours, large = row["sides"]["ours"]["memory"], row["sides"]["large"]["memory"]
    if ours is None:
        pytest.skip("no /proc here")
    assert 56 * 2**20 < large - ours < 72 * 2**20
    assert row["peers"]["large"]["memory"] == ours / large


@pytest.mark.parametrize(("side", "reason"), [("raising", "out of paper"), ("dying", r"exit code 3")])
def test_a_side_that_fails_is_named(toy, side, reason):
    with pytest.raises(SideFailed, match=rf"(?s)'{side}'.*{reason}"):
        toy("ours", side)


@pytest.mark.parametrize(("name", "known"), [("nothing", "pretraining"), ("pretraining/nothing", "mini-full")])
def test_unknown_benchmarks_and_cases_are_refused(capsys, name, known):
    with pytest.raises(SystemExit) as error:
        main([name])
    assert error.value.code == 2
    assert "'nothing'" in (message := capsys.readouterr().err)
    assert known in message


def test_cases_are_chosen():
    assert chosen_cases(["pretraining/base-full"], quick=False) == {"pretraining": ["base-full"]}
    assert chosen_cases([], quick=True).keys() == set(NAMES)
    assert "base-full" not in chosen_cases(["pretraining"], quick=True)["pretraining"]


@pytest.mark.parametrize("side", pretraining.SIDES)
def test_operations_are_those_of_the_matrix_products(tmp_path, side):
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 112}
    batch = {"rows": 5, "length": 38, "data": "full", "batches": 1, "dropout": 0.1}
    parameters = {"vocab_size": 1009, **sizes, **batch}
    pretraining.write_inputs(parameters, tmp_path)
    step = pretraining.SIDES[side](parameters, tmp_path)
    tokens, needed = step.size(step.batches[0])
    # The counter does not know oneDNN's products, and the formula not what fills up a batch.
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter, without_row_padding():
        step.model(**step.batches[0]).loss.backward()
    assert tokens == 5 * 38
    if side == "regard":
        # Queries are projected together with keys and values, in the last layer too, where few of them are needed.
        chosen = 5 + len(step.batches[0]["predicted_positions"])
        needed += 3 * 2 * 48**2 * (tokens - chosen)
    # The two classes of the next sentence are not in the formula.
    assert counter.get_total_flops() == pytest.approx(needed, rel=1e-3)


@pytest.mark.parametrize(("peer", "side"), [("joeynmt", "regard"), ("joeynmt", "joeynmt"), ("torch", "torch")])
def test_operations_of_recurrent_steps_are_those_of_the_matrix_products(tmp_path, peer, side):
    if recurrent.SIDES[side].missing():
        pytest.skip(f"{side} is not installed")
    sizes = {"vocab_size": 1009, "hidden_size": 48, "rows": 5, "batches": 1}
    parameters = {**sizes, "dropout": 0.1, "peer": peer}
    recurrent.write_inputs(parameters, tmp_path)
    step = recurrent.SIDES[side](parameters, tmp_path)
    tokens, needed = step.size(0)
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        step.loss(step.model, step.batches[0]).backward()
    assert tokens == sum(len(row) for row in step.rows[0][1])
    if side == "regard":
        # Products with a vector, which the counter leaves out: each position's with each of its source.
        sources, targets = step.rows[0]
        needed -= 3 * 2 * 48 * 5 * max(map(len, sources)) * max(map(len, targets))
    assert counter.get_total_flops() == pytest.approx(needed, rel=1e-3)


def test_recurrent_sides_agree_at_weights_that_hide_nothing(tmp_path):
    parameters = {"vocab_size": 101, "hidden_size": 16, "rows": 5, "batches": 1, "dropout": 0.0, "peer": "torch"}
    recurrent.write_inputs(parameters, tmp_path)
    sides = [recurrent.SIDES[name](parameters, tmp_path) for name in ("regard", "torch")]
    expected, found = (side.check() for side in sides)
    assert found == pytest.approx(expected, rel=1e-5)
    for name, parameter in sides[1].load("checked", 0.0).named_parameters():
        assert parameter.count_nonzero() == parameter.numel(), name


def make_row(name, speed, **fields):
    side = {"speed": 10.0, "flops_per_second": 4e10, "seconds": [1.0], "units": [10], "memory": 3 * 2**20}
    ratios = {"speed": speed, "speed_quartiles": [speed - 0.25, speed + 0.25], "memory": None}
    machine = dict.fromkeys(("date", "cpu", "instructions", "cores", "threads", "python", "torch", "mkl", "onednn"), 0)
    machine |= {"transformers": 0, "regard": 0, "sgemm_peak": 5e10, "onednn_peak": 1e11}
    row = {"name": name, "work": f"work of {name}", "units": "tokens", "quick": False, "machine": machine}
    row |= {"figures": {"stock": {"speed": 3.5}}, "share": 0.85, "beyond": None, "skipped": {}}
    return row | {"sides": {"regard": side, "stock": side}, "peers": {"stock": ratios}} | fields


def test_results_are_told_with_what_was_asked(tmp_path):
    report.save(tmp_path, "pretraining", [make_row("mini-ragged", 9.0, skipped={"other": "it is not installed"})])
    report.save(tmp_path, "pretraining", [make_row("mini-full", 4.0)])
    # A case that is run again replaces its old row, and no other.
    report.save(tmp_path, "pretraining", [make_row("mini-ragged", 6.0, beyond=("mini-full", 1.3))])
    rows = json.loads((tmp_path / "pretraining.json").read_text())["rows"]
    assert [(row["name"], row["peers"]["stock"]["speed"]) for row in rows] == [("mini-full", 4), ("mini-ragged", 6)]
    report.write(tmp_path)
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    (line,) = (line for line in page.splitlines() if "work of mini-full" in line and "**" in line)
    assert "**4.00** (3.75–4.25) | 3.50 | 3 | 3 |  |  |" in line
    assert "| regard | 40.0 | 80% | 40% | 85% |" in page
    assert "mini-ragged, stock: 1.50 times the ratio of mini-full; asked: 1.3." in page
    assert "not installed" not in page


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Runs a benchmark once, and returns the folder of its results."""
    folder = tmp_path_factory.mktemp("results")

    def run(name):
        if not (folder / f"{name}.json").exists():
            main([name, "--quick", "--output", str(folder)])
        return folder

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_runs(quick, name):
    expected = chosen_cases([name], quick=True)[name]
    assert expected
    folder = quick(name)
    rows = report.read(folder, name)
    assert [row["name"] for row in rows] == expected
    for row in rows:
        assert row["quick"]
        assert row["peers"].keys() | row["skipped"].keys()
        assert row["machine"]["sgemm_peak"] > 0
        for side in row["sides"].values():
            assert side["speed"] > 0
            assert len(side["seconds"]) == len(side["units"]) == 2
        for ratios in row["peers"].values():
            low, high = ratios["speed_quartiles"]
            assert low <= ratios["speed"] <= high
        page = (folder / "results.md").read_text(encoding="utf-8")
        assert f"{row['name']}: {row['work']}" in page


@pytest.mark.slow
def test_rows_of_documents_are_ragged(quick):
    (row,) = (row for row in report.read(quick("pretraining"), "pretraining") if row["name"] == "mini-ragged")
    full = row["parameters"]["rows"] * row["parameters"]["length"]
    assert all(tokens < full for tokens in row["sides"]["stock"]["units"])
    assert row["sides"]["regard"]["units"] == row["sides"]["stock"]["units"]


@pytest.mark.slow
@pytest.mark.parametrize(("plot", "name"), [("ratios", "pretraining"), ("scaling",) * 2, ("preparation",) * 2])
def test_plots_show_something(quick, plot, name):
    assert len(Image.open(quick(name) / f"{plot}.png").convert("L").getcolors()) > 50
