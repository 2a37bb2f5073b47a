"""Compares plans with what training then takes on this machine, and prints the table of `docs/planning.md`.

    python -m docs.planning_check

Each figure comes from a process of its own: the plan's; the memory of steps on full batches, as the system sees it,
without what the process had before the model, and once more where the C library gives freed memory back at once; and
the speed of a real run on the documentation of Python.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MINI = {"size": "mini", "vocab_size": 8192, "max_length": 128, "batch_size": 16}
CASES = {
    "BERT-mini, 16 × 128": ("bert", MINI),
    "decoder of that size, 16 × 128": ("decoder", MINI),
}
STEPS = 60


def plan(family: str, settings: dict[str, Any]) -> dict[str, Any]:
    from regard import plan_training

    return plan_training(family, settings, measure=True).to_dict()


def in_memory(name: str) -> int:
    """Bytes of this process in memory: now (VmRSS), or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def memory(family: str, settings: dict[str, Any]) -> int:
    from regard.training.families.recipes import TRAINABLE
    from regard.training.loop.launch import make_accelerator
    from regard.training.loop.loop import Loop
    from regard.training.loop.schedule import Budget
    from regard.training.run.settings import make_settings

    def steps(**changes: Any) -> None:
        changed = {**settings, "log_with": ["none"], **changes}
        chosen: Any = make_settings(TRAINABLE[family].settings_class, changed)
        chosen.config = {"vocab_size": chosen.vocab_size, **chosen.config}
        model = TRAINABLE[family].make_model(chosen).train()
        task: Any = SimpleNamespace(
            tokens=lambda batch: 1,
            counts=lambda batch: {},
            forward=lambda model, batch, **counts: model(**batch, **counts),
        )
        with tempfile.TemporaryDirectory() as folder:
            accelerator = make_accelerator(chosen, Path(folder))
            loop = Loop(task, model, chosen, Budget(steps=1), Path(folder), accelerator)
            for _ in range(3):
                loop._step([TRAINABLE[family].synthetic_batch(chosen, model.config, chosen.batch_size)[0]], 0.5)

    # The libraries' own memory, with next to none of a model's.
    steps(size="tiny", vocab_size=99, batch_size=1, max_length=8)
    before = in_memory("VmRSS")
    steps()
    return in_memory("VmHWM") - before


def speed(family: str, settings: dict[str, Any]) -> float:
    from regard.training.families.recipes import TRAINABLE
    from regard.training.families.train import train

    quiet = {"evaluate_every": 0, "save_every": 0, "evaluation_batches": 1, "log_every": 5, "log_with": ["none"]}
    with tempfile.TemporaryDirectory() as folder:
        train(TRAINABLE[family], Path(folder, "run"), {**settings, "steps": STEPS, **quiet})
        lines = Path(folder, "run", "history.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    rates = [record["tokens_per_second"] for record in records if record["kind"] == "train"]
    return statistics.median(rates[1:])


def ask(name: str, case: str, **environment: str) -> Any:
    """What one of the functions above gives, in a process of its own."""
    command = [sys.executable, "-m", "docs.planning_check", name, case]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    return json.loads(ended.stdout.splitlines()[-1])


def beside(figure: float, planned: float, unit: str) -> str:
    return f"{figure:,.0f} {unit} ({figure / planned - 1:+.0%})"


def main() -> None:
    print(
        "| run | memory planned | freed at once | resident | speed planned | of a real run |",
        "|---" * 6 + "|",
        sep="\n",
    )
    for case in CASES:
        planned = ask("plan", case)
        peak, rate = planned["memory"]["peak"] / 2**20, planned["speed"]
        freed = ask("memory", case, MALLOC_MMAP_THRESHOLD_="131072") / 2**20
        resident = ask("memory", case) / 2**20
        columns = [
            case,
            f"{peak:,.0f} MiB",
            beside(freed, peak, "MiB"),
            beside(resident, peak, "MiB"),
            f"{rate:,.0f} tokens/s",
            beside(ask("speed", case), rate, "tokens/s"),
        ]
        print(f"| {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        print(json.dumps({"plan": plan, "memory": memory, "speed": speed}[sys.argv[1]](*CASES[sys.argv[2]])))
