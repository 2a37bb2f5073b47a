"""One side of a comparison, and the process that it lives in; `worker` is what runs there."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

ROOT = Path(__file__).parents[1]


class Work(NamedTuple):
    """What one run did.

    Attributes:
        seconds: how long it took.
        units: how much was done, such as tokens; the speed is this over the seconds.
        flops: floating point operations that it needs, by a formula that the benchmark documents; 0: not counted.
    """

    seconds: float
    units: float
    flops: float = 0.0


class Side:
    """Base of all sides.

    Args:
        parameters: of the case.
        folder: where `write_inputs` wrote.
    """

    # Modules without which it can't run.
    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        self.parameters, self.folder = parameters, folder

    @classmethod
    def missing(cls) -> list[str]:
        """What it needs and is not installed."""
        return [name for name in cls.needs if importlib.util.find_spec(name) is None]

    def check(self) -> dict[str, Any]:
        """Figures of the work that must be the other sides' too.

        Numbers, strings, or rectangular lists of either. Floats agree within the tolerance of the case, all others
        exactly. Best taken from what is timed, in the same mode and by the same kernels.
        """
        raise NotImplementedError

    def run(self, turn: int) -> Work:
        """Does the work once. The number of the turn, counted from 0, is the same on all sides."""
        raise NotImplementedError


class SideFailed(RuntimeError):
    """What a side was told to do raised an error, or ended its process."""


class Worker:
    """The process of a side, which starts at once.

    Args:
        module: full name of the benchmark's module.
        side: name of the side in its `SIDES`.
        threads: how many it may use.
    """

    def __init__(self, module: str, side: str, threads: int) -> None:
        self.side = side
        settings = {
            "OMP_NUM_THREADS": str(threads),
            # The tokenizers' threads.
            "RAYON_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", module, side],
            cwd=ROOT,
            env=os.environ | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, command: str, *arguments: Any) -> None:
        """Tells it to `prepare`, `check`, `run` or tell its peak `memory`, and does not wait."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail("its process ended")

    def receive(self) -> Any:
        """The answer to what was sent.

        Raises:
            SideFailed: if there is none.
        """
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._fail("its process ended")
        answer = json.loads(line)
        if "error" in answer:
            self._fail(answer["error"])
        return answer["value"]

    def ask(self, command: str, *arguments: Any) -> Any:
        """Sends, and waits for the answer."""
        self.send(command, *arguments)
        return self.receive()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def _fail(self, reason: str) -> None:
        self.close()
        raise SideFailed(f"side {self.side!r} failed (exit code {self._process.returncode}): {reason}")
