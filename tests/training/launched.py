"""Trains several models in one launch, each in a process of its own: starting one takes longer than training in it.

The one argument is JSON: a port to meet at, family, folder and settings for each run.
"""

import json
import logging
import os
import sys
from multiprocessing import get_context

import torch

from regard.training.families import TRAINABLE
from regard.training.family import train


def run(port: int, family: str, folder: str, settings: dict) -> None:
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    train(TRAINABLE[family], folder, settings, resume=True)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    for arguments in json.loads(sys.argv[1]):
        process = get_context("fork").Process(target=run, args=arguments)
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{arguments}: {process.exitcode}")
