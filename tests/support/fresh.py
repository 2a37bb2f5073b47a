"""Runs Python in a new process, forked from a server that has imported the libraries, and nothing of ours.

Starting Python and importing torch and transformers takes ten times as long as what most of these processes do. The
hashes of strings have another seed there than in the tests' own process.
"""

import os
import sys
from multiprocessing import forkserver, get_context
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from tempfile import TemporaryDirectory
from types import ModuleType
from unittest.mock import patch

LIBRARIES = """torch datasets accelerate transformers.trainer transformers.pipelines evaluate sklearn.metrics typer
matplotlib.figure""".split()
ROOT = Path(__file__).parents[2]


def _start_server() -> None:
    # Does nothing where it runs already.
    forkserver.set_forkserver_preload(LIBRARIES)
    with patch.dict(os.environ, PYTHONHASHSEED="1"):
        forkserver.ensure_running()


def _execute(code: str, arguments: list[str], folder: Path, environment: dict[str, str], printed: Path) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(printed / name, os.O_WRONLY), descriptor)
    sys.argv = ["-c", *arguments]
    sys.path.insert(0, str(ROOT))
    # A module of its own, since what is defined in it may be pickled.
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<code>", "exec"), main.__dict__)


def run_python(
    code: str, folder: Path, *arguments: str, environment: dict[str, str] | None = None, timeout: float = 300
) -> CompletedProcess[str]:
    """Runs code in a folder, with the checkout's package, and returns its exit code and what it printed.

    Args:
        code: Python source.
        folder: The working directory.
        arguments: What follows the program's name in `sys.argv`.
        environment: Variables to set beside those of the test session.
        timeout: Seconds after which the process is killed.

    Raises:
        TimeoutExpired: If the process took longer.
    """
    _start_server()
    with TemporaryDirectory() as printed:
        files = {name: Path(printed, name) for name in ("stdout", "stderr")}
        for file in files.values():
            file.touch()
        told = (code, list(arguments), folder, environment or {}, Path(printed))
        process = get_context("forkserver").Process(target=_execute, args=told)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutExpired("python", timeout)
        texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        return CompletedProcess("python", process.exitcode, **texts)
