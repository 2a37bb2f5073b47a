"""Several processes see the same batches as one, and come to the same result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from regard.training.loop.loop import Loop

ROOT = Path(__file__).parents[3]
# Three batches are held out, so that two processes evaluate unequally many.
SETTINGS = {
    "steps": 5,
    "batch_size": 6,
    "dropout": 0.0,
    "learning_rate": 0.005,
    "evaluate_every": 2,
    "log_every": 1,
    "save_every": 2,
}


@pytest.mark.slow
def test_two_processes_are_as_good_as_one(pretrain, tmp_path, weights_of, history_of):
    one = pretrain(tmp_path / "one", **SETTINGS)
    assert -(-one["data"]["held_out_examples"] // 6) % 2 == 1
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(one["settings"]))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train = ["-m", "regard", "train", "bert", "--settings", str(tmp_path / "settings.yaml")]
    command = [*launch, *train, "--output", str(tmp_path / "two")]
    printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout

    two = json.loads((tmp_path / "two" / "results.json").read_text())
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
    assert (two["tokens"], two["data"], two["filled"]) == (one["tokens"], one["data"], one["filled"])
    weights, expected = weights_of(tmp_path / "two"), weights_of(tmp_path / "one")
    assert weights.keys() == expected.keys()
    assert all(torch.allclose(weights[name], expected[name], rtol=0, atol=1e-5) for name in weights)
    records, expected_records = history_of(tmp_path / "two"), history_of(tmp_path / "one")
    for (step, kind, values), (expected_step, expected_kind, expected_values) in zip(
        records, expected_records, strict=True
    ):
        assert (step, kind) == (expected_step, expected_kind)
        assert values == pytest.approx(expected_values, rel=1e-3, abs=1e-5)
    # What is said is said once.
    assert printed.count("Step 2: ") == printed.count("To load it") == 1
    assert (tmp_path / "two" / "model" / "README.md").exists()
    states = (tmp_path / "two" / "checkpoints" / "step-4").glob("random_states_*")
    assert sorted(path.name for path in states) == ["random_states_0.pkl", "random_states_1.pkl"]


class Share:
    """An accelerator that says it is one of several processes, and adds nothing up."""

    def __init__(self, accelerator, index: int, number: int) -> None:
        self._accelerator, self.process_index, self.num_processes = accelerator, index, number

    def reduce(self, value):
        return value

    def __getattr__(self, name: str):
        return getattr(self._accelerator, name)


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_every_held_out_example_counts_once(pretrain, tmp_path, monkeypatch, processes):
    loops = []
    whole = Loop._train
    monkeypatch.setattr(Loop, "_train", lambda self: loops.append(self) or whole(self))
    results = pretrain(tmp_path / "run", **{**SETTINGS, "steps": 1})
    (loop,) = loops
    totals: dict[str, float] = {}

    def add(sums: dict[str, float]) -> dict[str, float]:
        for name, value in sums.items():
            totals[name] = totals.get(name, 0) + value
        return {"masked_loss": 1.0}

    metrics = loop.objective.metrics
    monkeypatch.setattr(loop.objective, "metrics", add)
    for index in range(processes):
        loop.accelerator = Share(loop.accelerator, index, processes)
        loop.evaluate()
    assert totals["pairs"] == results["data"]["held_out_examples"]
    assert metrics(totals) == pytest.approx(results["metrics"], rel=1e-5)
