"""Every family trains in two processes, with whole and with sharded weights, as in one."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from transformers import AutoModelForCausalLM

from regard.training.families.recipes import TRAINABLE
from regard.training.families.train import train

ROOT = Path(__file__).parents[3]
# The last held-out batch is smaller than the others, and there is an odd number of them.
SETTINGS = {
    "steps": 4,
    "batch_size": 8,
    "validation": "0.25",
    "dropout": 0.0,
    "learning_rate": 0.005,
    "evaluate_every": 3,
    "log_every": 1,
    "save_every": 3,
    "log_with": ["none"],
}
WIDTHS = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 44}
FAMILIES = ("bert", "decoder", "transformer", "recurrent", "captioner")
# Statistics of batch normalisation are those of what goes through the model at once.
PARTS = {"whole": {}, "in parts": {"accumulation": 2}, "sharded": {"sharding": "fsdp"}}
PARTS["sharded, in parts"] = PARTS["in parts"] | PARTS["sharded"]
CASES = [(family, way) for family in FAMILIES for way in PARTS if "parts" not in way or family != "captioner"]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def launch(command: list[str], number: int = 2, **environment: str) -> list[subprocess.Popen]:
    """Starts processes as a launcher does."""
    shared = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environment}
    return [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(number), **shared},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(number)
    ]


def finish(processes: list[subprocess.Popen]) -> list[str]:
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(printed)
    return printed


@pytest.fixture(scope="module")
def data(corpus_folder, tmp_path_factory) -> dict[str, dict]:
    """For each family its settings, with rows of unequal lengths."""
    folder = tmp_path_factory.mktemp("data")
    words = "one two three four five six seven".split()
    pairs = [{"source": " ".join(words[: row % 7 + 1]), "target": " ".join(words[row % 7 :])} for row in range(54)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "images").mkdir()
    rows = []
    for number in range(54):
        Image.effect_noise((24, 24), 100).save(folder / "images" / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "text": " ".join(words[: number % 5 + 1])})
    (folder / "images" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = {"data": [corpus_folder], "vocab_size": 300, "max_length": 32}
    pair = {"data": [str(folder / "pairs.jsonl")], "max_length": 48}
    config = {
        "bert": {**text, "vocab_size": 120, "config": {**WIDTHS, "max_position_embeddings": 32}},
        "decoder": {**text, "config": WIDTHS},
        "transformer": {**pair, "config": WIDTHS},
        "recurrent": {**pair, "config": {"hidden_size": 36, "num_hidden_layers": 2}},
        "captioner": {"data": [str(folder / "images")], "image_size": 24, "max_length": 6, "config": WIDTHS},
    }
    config["captioner"]["decoder_type"] = "transformer"
    return {family: {**SETTINGS, **config[family]} for family in FAMILIES}


@pytest.fixture(scope="module")
def one(data, tmp_path_factory) -> Path:
    """A folder with a run of each family in one process."""
    folder = tmp_path_factory.mktemp("one")
    for family in FAMILIES:
        train(TRAINABLE[family], folder / family, data[family])
        AcceleratorState._reset_state(reset_partial_state=True)
    return folder


@pytest.fixture(scope="module")
def two(data, tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder with a run of each case in two processes, and what they printed."""
    folder = tmp_path_factory.mktemp("two")
    runs = [(free_port(), family, str(folder / f"{family} {way}"), data[family] | PARTS[way]) for family, way in CASES]
    return folder, finish(launch(["-m", "tests.support.launched", json.dumps(runs)]))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "way"), CASES)
def test_two_processes_train_as_one(one, two, history_of, weights_of, family, way):
    expected_folder, folder = one / family, two[0] / f"{family} {way}"
    expected, results = (json.loads((each / "results.json").read_text()) for each in (expected_folder, folder))
    assert (expected["processes"], results["processes"]) == (1, 2)
    assert results["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)
    assert (results["tokens"], results["data"]) == (expected["tokens"], expected["data"])
    records, expected_records = history_of(folder), history_of(expected_folder)
    assert len(records) == len(expected_records)
    for record, expected_record in zip(records, expected_records, strict=True):
        assert record[:2] == expected_record[:2]
        assert record[2] == pytest.approx(expected_record[2], rel=1e-4)
    weights, expected_weights = weights_of(folder), weights_of(expected_folder)
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        assert torch.allclose(weight, expected_weights[name], rtol=0, atol=2e-5), name


@pytest.mark.slow
def test_the_first_process_alone_speaks(two):
    first, second = two[1]
    assert "processes met at" in first
    assert "Step 4: " in first
    assert second == ""


@pytest.mark.slow
def test_tied_weights_stay_tied_when_sharded(two):
    model = AutoModelForCausalLM.from_pretrained(two[0] / "decoder sharded" / "model")
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.slow
def test_sharded_checkpoints_lie_in_parts(two):
    (checkpoint,) = (two[0] / "bert sharded" / "checkpoints").iterdir()
    for kind in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert sorted(path.name for path in (checkpoint / kind).glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    sizes = [path.stat().st_size for path in (checkpoint / "optimizer_0").glob("*.distcp")]
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.slow
def test_a_killed_worker_is_restarted_and_goes_on(data, two, tmp_path, weights_of):
    """In torchrun, with sharded weights: bit for bit the run that nothing disturbed."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    run = [0, "transformer", str(tmp_path / "run"), data["transformer"] | PARTS["sharded"]]
    command = [*torchrun, "--master-port", str(free_port()), "-m", "tests.support.launched", json.dumps([run])]
    environment = {**os.environ, "KILL_AFTER": "3"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Going on from step 3." in done.stderr
    weights, expected = weights_of(tmp_path / "run"), weights_of(two[0] / "transformer sharded")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    shutil.rmtree(tmp_path / "run")
