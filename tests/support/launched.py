"""Trains several models in one launch, each in a process of its own: starting one takes longer than training in it.

The one argument is JSON: a port to meet at (0: the launcher's), family, folder and settings for each run. With
`KILL_AFTER`, the last process kills itself after so many steps of its first start.
"""

import json
import logging
import os
import signal
import sys
from multiprocessing import get_context

import torch

from regard.training.families.recipes import TRAINABLE
from regard.training.families.train import train
from regard.training.loop.run_keeper import Keeper


def run(port: int, family: str, folder: str, settings: dict) -> None:
    torch.set_num_threads(1)
    if port:
        os.environ["MASTER_PORT"] = str(port)
    train(TRAINABLE[family], folder, settings, resume=True)


def kill_after(step: int) -> None:
    whole = Keeper.record

    def record(self, kind: str, values: dict) -> None:
        whole(self, kind, values)
        if self.progress.step == step + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    Keeper.record = record


if __name__ == "__main__":
    is_first = os.environ["RANK"] == "0"
    logging.basicConfig(format="%(message)s")
    logging.getLogger("regard").setLevel(logging.INFO if is_first else logging.ERROR)
    if "KILL_AFTER" in os.environ:
        if not is_first and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            kill_after(int(os.environ["KILL_AFTER"]))
        run(*json.loads(sys.argv[1])[0])
        sys.exit()
    for arguments in json.loads(sys.argv[1]):
        process = get_context("fork").Process(target=run, args=arguments)
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{arguments}: {process.exitcode}")
