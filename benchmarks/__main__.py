"""Runs benchmarks and writes what came of them: `python -m benchmarks --help`."""

import argparse
import importlib
import logging
from pathlib import Path

import torch
from datasets import disable_progress_bars
from transformers.utils.logging import disable_progress_bar

from . import NAMES, report
from .compare import compare
from .machine import describe
from .sides import ROOT


def chosen_cases(wanted: list[str], quick: bool) -> dict[str, list[str]]:
    """The cases of each benchmark that are to be run.

    Args:
        wanted: benchmarks, and cases as NAME/CASE; empty: all.
        quick: leave out cases that have no quick form.

    Raises:
        ValueError: if there is no such benchmark or case.
    """
    chosen: dict[str, list[str]] = {}
    for each in wanted or NAMES:
        name, _, case = each.partition("/")
        if name not in NAMES:
            raise ValueError(f"benchmark {name!r} must be one of {', '.join(NAMES)}")
        cases = importlib.import_module(f"benchmarks.{name}").CASES
        if case and case not in cases:
            raise ValueError(f"case {case!r} of {name} must be one of {', '.join(cases)}")
        found = [case] if case else list(cases)
        chosen.setdefault(name, []).extend(one for one in found if not quick or cases[one].quick is not None)
    return chosen


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compares regard with its peers.")
    parser.add_argument("names", nargs="*", metavar="NAME[/CASE]", help=f"what to run of {', '.join(NAMES)}; all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and two turns, to see that everything runs")
    parser.add_argument("--output", type=Path, help="where results go; benchmarks/results, build/benchmarks if quick")
    options = parser.parse_args(arguments)
    try:
        chosen = chosen_cases(options.names, options.quick)
    except ValueError as error:
        parser.error(str(error))
    output = options.output or ROOT / ("build/benchmarks" if options.quick else "benchmarks/results")
    output.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(format="%(message)s")
    disable_progress_bar()
    disable_progress_bars()

    threads = torch.get_num_threads()
    for name, cases in chosen.items():
        benchmark = importlib.import_module(f"benchmarks.{name}")
        machine = describe(options.quick)
        print(f"{benchmark.TITLE}\n{report.machine_line(machine)}", flush=True)
        for case in cases:
            row = {**compare(benchmark, case, threads, options.quick), "machine": machine}
            # Saved at once: what was measured is kept if a later case fails.
            report.save(output, name, [row])
            for peer, ratios in row["peers"].items():
                memory = "" if ratios["memory"] is None else f", {ratios['memory']:.2f} times the memory"
                print(f"  {case}: {ratios['speed']:.2f} times as fast as {peer}{memory}", flush=True)
            for side, reason in row["skipped"].items():
                print(f"  {case}: {side} left out, {reason}", flush=True)
    report.write(output)
    print(f"Written to {output}.")


if __name__ == "__main__":
    main()
