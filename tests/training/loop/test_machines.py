"""Two machines, as two network namespaces of one: an address each, a cable between, and a cache each."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
NAMES = ("first", "second")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def machines():
    """The names of two network namespaces, whose addresses are 10.213.7.1 and 10.213.7.2."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` to make network namespaces with")
    spaces = [f"regard-{os.getpid()}-{name}" for name in NAMES]
    cables = [f"rg{os.getpid()}{end}" for end in "ab"]
    try:
        for space in spaces:
            ip("netns", "add", space)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for number, (space, cable) in enumerate(zip(spaces, cables, strict=True), start=1):
            ip("link", "set", cable, "netns", space)
            ip("-n", space, "addr", "add", f"10.213.7.{number}/24", "dev", cable)
            ip("-n", space, "link", "set", cable, "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield list(zip(spaces, cables, strict=True))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


@pytest.mark.slow
def test_two_machines_train_as_one(machines, pretrain, tmp_path, history_of):
    # No tokenizer but the run's, so that the second machine must find that one.
    one = pretrain(tmp_path / "one", steps=3, dropout=0.0, log_every=1, learning_rate=0.005)
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(one["settings"]))
    train = ["-m", "regard", "train", "bert", "--settings", str(tmp_path / "settings.yaml")]
    processes = []
    for number, (space, cable) in enumerate(machines):
        launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)]
        launcher += ["--nproc-per-node", "1", "--master-addr", "10.213.7.1", "--master-port", "29500"]
        environment = {
            **os.environ,
            "HF_HOME": str(tmp_path / f"cache-{number}"),
            # The name of the real machine stands for an address that neither has.
            "GLOO_SOCKET_IFNAME": cable,
        }
        command = ["ip", "netns", "exec", space, sys.executable, *launcher, *train]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(
            subprocess.Popen([*command, "--output", str(tmp_path / "two")], cwd=ROOT, env=environment, **pipes)
        )
    printed = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    assert "2 processes met at 10.213.7.1:29500" in printed[0][0]
    assert printed[1][0] == ""
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    assert (two["processes"], two["tokens"], two["data"]) == (2, one["tokens"], one["data"])
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-4)
    for record, expected in zip(history_of(tmp_path / "two"), history_of(tmp_path / "one"), strict=True):
        assert record[2] == pytest.approx(expected[2], rel=1e-4)
    # Each machine read the corpus into a cache of its own.
    for number in range(2):
        assert list((tmp_path / f"cache-{number}").rglob("*.arrow"))
