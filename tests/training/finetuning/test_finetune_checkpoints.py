"""Checkpoints of `Trainer` that are damaged, or would run code, are passed over."""

import json
import logging
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import TrainerState

from regard.training.finetuning.checkpoints import last_checkpoint


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.fixture
def checkpoints(tmp_path):
    for step in (5, 10):
        folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"weight": torch.arange(100.0)}, folder / "model.safetensors")
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        torch.save({"last_epoch": step}, folder / "scheduler.pt")
        torch.save({"python": (3, (1, 2), None), "cpu": torch.get_rng_state()}, folder / "rng_state.pth")
        TrainerState(global_step=step).save_to_json(str(folder / "trainer_state.json"))
    return tmp_path / "checkpoints"


def test_the_last_is_taken(checkpoints):
    assert last_checkpoint(checkpoints) == str(checkpoints / "checkpoint-10")
    # By number, not by name; and not one that has no number, or no end.
    shutil.copytree(checkpoints / "checkpoint-5", checkpoints / "checkpoint-9")
    shutil.copytree(checkpoints / "checkpoint-5", checkpoints / "checkpoint-last")
    (checkpoints / "checkpoint-11").mkdir()
    assert last_checkpoint(checkpoints) == str(checkpoints / "checkpoint-10")


def test_there_may_be_none(tmp_path):
    assert last_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_what_would_run_code_is_passed_over(name, checkpoints, tmp_path, caplog):
    marker = tmp_path / "marker"
    (checkpoints / "checkpoint-10" / name).write_bytes(pickle.dumps(Malicious(marker)))
    torch.save(Malicious(tmp_path / "other"), checkpoints / "checkpoint-5" / name)
    with (
        caplog.at_level(logging.WARNING, "regard.training"),
        pytest.raises(ValueError, match=r"^no checkpoint in .* can be read: delete the folder to start anew$"),
    ):
        last_checkpoint(checkpoints)
    assert [name in record.getMessage() for record in caplog.records] == [True, True]
    assert not marker.exists()
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_a_damaged_one_is_named_and_the_one_before_taken(name, damage, checkpoints, caplog):
    file = checkpoints / "checkpoint-10" / name
    file.write_bytes(file.read_bytes()[:-20] if damage == "cut" else b"")
    with caplog.at_level(logging.WARNING, "regard.training"):
        assert last_checkpoint(checkpoints) == str(checkpoints / "checkpoint-5")
    (record,) = caplog.records
    assert f"checkpoint-10 is passed over: its {name} is" in record.getMessage()


def test_weights_are_safetensors(checkpoints):
    newest = checkpoints / "checkpoint-10"
    (newest / "model.safetensors").unlink()
    torch.save({"weight": torch.ones(3)}, newest / "pytorch_model.bin")
    assert last_checkpoint(checkpoints) == str(checkpoints / "checkpoint-5")


def test_a_state_that_is_none_is_passed_over(checkpoints):
    (checkpoints / "checkpoint-10" / "trainer_state.json").write_text(json.dumps({"steps": 3}))
    assert last_checkpoint(checkpoints) == str(checkpoints / "checkpoint-5")
