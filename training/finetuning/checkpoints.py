"""Finding the checkpoint that a fine-tuning run resumes from. `Trainer` writes them, without checksums."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals

logger = logging.getLogger("regard.training")

_STATE_FILE = "trainer_state.json"


def last_checkpoint(folder: Path) -> str | None:
    """Returns the path of the last checkpoint in a folder that is complete, undamaged and safe to load.

    A checkpoint is safe if its pickled files hold only tensors and plain values, so that loading them runs no code.
    Others are passed over with a warning.

    Returns:
        The path; None if the folder holds no checkpoint.

    Raises:
        ValueError: if there are checkpoints, but none can be loaded.
    """
    # The state is written last, so a checkpoint with one is complete.
    found = [path.parent for path in folder.glob(f"checkpoint-*/{_STATE_FILE}")]
    found = [path for path in found if _step(path).isdecimal()]
    for path in sorted(found, key=lambda path: int(_step(path)), reverse=True):
        damaged = _damaged_file(path)
        if damaged is None:
            return str(path)
        logger.warning("The checkpoint %s is passed over: its %s is damaged or may run code.", path, damaged)
    if found:
        raise ValueError(f"no checkpoint in {folder} can be read: delete the folder to start anew")
    return None


def _step(checkpoint: Path) -> str:
    return checkpoint.name.rpartition("-")[2]


def _damaged_file(checkpoint: Path) -> str | None:
    if not list(checkpoint.glob("*.safetensors")):
        return "model.safetensors"
    for file in sorted(checkpoint.iterdir()):
        try:
            if file.name == _STATE_FILE:
                TrainerState.load_from_json(str(file))
            elif file.suffix == ".safetensors":
                # Opening the file compares its header with its length.
                with safe_open(file, "pt"):
                    pass
            elif file.suffix in (".pt", ".pth"):
                with safe_globals():
                    torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        # Reading a file that is no pickle as one may raise any error.
        except Exception:
            return file.name
    return None
