"""The process of one side: `python -m benchmarks.worker MODULE SIDE`.

Reads commands from standard input, [name, arguments ...] as a line of JSON each, and answers each with a line on
standard output, {"value": ...} or {"error": traceback}. Whatever else is printed goes to standard error.
"""

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from .sides import Side


def peak_memory() -> int | None:
    """The most bytes that this process ever had in memory; None where there is no Linux to say so."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def serve(module: str, name: str) -> None:
    """AnswerMetrics commands until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Libraries print too.
    os.dup2(2, 1)
    side_class: type[Side] = importlib.import_module(module).SIDES[name]
    side: Side | None = None

    def do(command: str, *arguments: Any) -> Any:
        nonlocal side
        if command == "prepare":
            parameters, folder = arguments
            side = side_class(parameters, Path(folder))
            return None
        if command == "memory":
            return peak_memory()
        assert side, "`prepare` comes first"
        # What was left by the last run is not collected in this one's time.
        gc.collect()
        return {"check": side.check, "run": side.run}[command](*arguments)

    for line in sys.stdin:
        try:
            answer = json.dumps({"value": do(*json.loads(line))})
        except Exception:
            answer = json.dumps({"error": traceback.format_exc()})
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
