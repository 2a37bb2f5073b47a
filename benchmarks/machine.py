"""What the figures were measured on, and the most that it can do."""

import os
import platform
import re
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard
from regard.modeling.cpu.linear import linear


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, flags=re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def peak(multiply: Callable[[Tensor, Tensor], Tensor], size: int, repetitions: int) -> float:
    """The most float32 operations a second that a product of two square matrices reaches."""
    one, other = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0))
    shortest = float("inf")
    for _ in range(repetitions):
        began = time.perf_counter()
        multiply(one, other)
        shortest = min(shortest, time.perf_counter() - began)
    return 2 * size**3 / shortest


def describe(quick: bool = False) -> dict[str, Any]:
    """The machine, the versions, and two peaks: of PyTorch's BLAS and of oneDNN, which may differ much on one CPU.

    Args:
        quick: measure the peaks with a small matrix, which does not tell much.
    """
    built = torch.__config__.show()
    libraries = {
        "mkl": re.search(r"Math Kernel Library Version ([\w.]+)", built),
        "onednn": re.search(r"MKL-DNN v([\w.]+)", built),
    }
    size, repetitions = (256, 2) if quick else (2048, 15)
    return {
        "date": date.today().isoformat(),
        "cpu": cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "regard": regard.__version__,
        **{name: found[1] if found else None for name, found in libraries.items()},
        "sgemm_peak": peak(torch.mm, size, repetitions),
        "onednn_peak": peak(linear, size, repetitions),
    }
