"""The results as JSON, as tables and as a plot.

Each benchmark's rows stand in `NAME.json`. Those of a case that is run anew replace its old ones; the tables,
`results.md`, and the plot, `ratios.png`, are made from all that the folder has.
"""

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from . import NAMES

Row = dict[str, Any]

PAGE = """# Benchmarks

Each row is the same work, done in turns by both sides, in a process each, after they were seen to compute the same.
Speeds are medians. A ratio is ours to the peer's: of speeds, the median over turns with its quartiles; of memories,
that of the most that each process ever had, with Python and all libraries in it. "Asked" is the figure to reach.

{sections}

Made by `make bench`, which is `python -m benchmarks`.
"""


def read(folder: Path, name: str) -> list[Row]:
    """The rows of a benchmark that were saved; none if it was not run."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []


def save(folder: Path, name: str, rows: list[Row]) -> None:
    """Saves the rows of a benchmark, in the order of its cases, with those of other cases that are there already."""
    benchmark = importlib.import_module(f"benchmarks.{name}")
    known = {row["name"]: row for row in [*read(folder, name), *rows]}
    content = {"title": benchmark.TITLE, "rows": [known[case] for case in benchmark.CASES if case in known]}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _table(headings: list[str], lines: Iterable[list[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _number(value: float | None, form: str = ",.2f", scale: float = 1) -> str:
    return "" if value is None else f"{value / scale:{form}}"


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _case(row: Row) -> str:
    return f"{row['name']}: {row['work']}"


def _comparison(row: Row, peer: str) -> list[str]:
    ours, theirs = next(iter(row["sides"].values())), row["sides"][peer]
    ratios, asked = row["peers"][peer], row["figures"][peer]
    low, high = ratios["speed_quartiles"]
    return [
        _case(row),
        peer,
        row["units"],
        _speed(ours["speed"]),
        _speed(theirs["speed"]),
        f"**{ratios['speed']:.2f}** ({low:.2f}–{high:.2f})",
        _number(asked.get("speed")),
        _number(ours["memory"], ",.0f", 2**20),
        _number(theirs["memory"], ",.0f", 2**20),
        _number(ratios["memory"]),
        _number(asked.get("memory")),
    ]


def _shares(row: Row) -> Iterable[list[str]]:
    machine = row["machine"]
    for number, (side, found) in enumerate(row["sides"].items()):
        rate = found["flops_per_second"]
        if rate:
            yield [
                _case(row),
                side,
                _number(rate, ",.1f", 1e9),
                f"{rate / machine['sgemm_peak']:.0%}",
                f"{rate / machine['onednn_peak']:.0%}",
                f"{row['share']:.0%}" if row["share"] and number == 0 else "",
            ]


def _notes(rows: list[Row]) -> Iterable[str]:
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        if row["beyond"] and row["beyond"][0] in by_name:
            other, asked = row["beyond"]
            for peer in row["peers"].keys() & by_name[other]["peers"].keys():
                times = row["peers"][peer]["speed"] / by_name[other]["peers"][peer]["speed"]
                yield f"- {row['name']}, {peer}: {times:.2f} times the ratio of {other}; asked: {asked:g}."
        for side, reason in row["skipped"].items():
            yield f"- {row['name']}, {side}: left out, {reason}."
        if row["quick"]:
            yield f"- {row['name']}: measured with `--quick`, which tells nothing but that it runs."


def machine_line(machine: dict[str, Any]) -> str:
    """The machine in a line."""
    return (
        "{cpu} ({instructions}), cores: {cores}, threads used: {threads}; Python {python}, torch {torch} (MKL {mkl}, "
        "oneDNN {onednn}), transformers {transformers}, regard {regard}; {date}. Peak in float32: torch.mm (sgemm) "
        "{sgemm:.1f} GFLOP/s, oneDNN {dnn:.1f}."
    ).format(**machine, sgemm=machine["sgemm_peak"] / 1e9, dnn=machine["onednn_peak"] / 1e9)


def _section(title: str, rows: list[Row]) -> str:
    machines = dict.fromkeys(machine_line(row["machine"]) for row in rows)
    parts = [f"## {title}", "\n".join(machines)]
    comparisons = [_comparison(row, peer) for row in rows for peer in row["peers"]]
    headings = ["case", "peer", "counted", "regard, a second", "peer", "times as fast", "asked"]
    headings += ["regard, MiB", "peer", "times the memory", "asked"]
    parts.append(_table(headings, comparisons))
    if shares := [line for row in rows for line in _shares(row)]:
        headings = ["case", "side", "GFLOP/s needed", "of the sgemm peak", "of oneDNN's peak", "asked (sgemm)"]
        parts.append(_table(headings, shares))
    if notes := list(_notes(rows)):
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def draw_ratios(named_rows: list[tuple[str, Row]], file: Path) -> None:
    """A bar for each case and peer: of the ratios of speed, with quartiles, and of memory; a mark where asked."""
    bars = [(f"{name}: {row['name']}\nagainst {peer}", row, peer) for name, row in named_rows for peer in row["peers"]]
    height = 1.4 + 0.55 * len(bars)
    figure, panels = plt.subplots(1, 2, figsize=(11, height), sharey=True, width_ratios=(1.6, 1), layout="constrained")
    places = range(len(bars))
    for axes, ratio, title in zip(panels, ("speed", "memory"), ("times as fast", "times the memory"), strict=True):
        values = [row["peers"][peer][ratio] or 0 for _, row, peer in bars]
        axes.barh(places, values, height=0.6, color="C0" if ratio == "speed" else "C1", alpha=0.8)
        asked = [row["figures"][peer].get(ratio) for _, row, peer in bars]
        marks = [(value, place) for value, place in zip(asked, places, strict=True) if value is not None]
        axes.plot(
            *zip(*marks, strict=True) if marks else ([], []), "k|", markersize=18, markeredgewidth=2, label="asked"
        )
        for place, value in zip(places, values, strict=True):
            axes.annotate(f"{value:.2f}", (0, place), xytext=(4, 0), textcoords="offset points", va="center")
        axes.axvline(1, color="grey", linestyle=":", label="the peer")
        largest = max([1, *values, *(value for value, _ in marks)])
        axes.set(title=title, xlim=(0, 1.1 * largest))
    quartiles = [row["peers"][peer]["speed_quartiles"] for _, row, peer in bars]
    panels[0].set_xlim(right=max(panels[0].get_xlim()[1], 1.05 * max(high for _, high in quartiles)))
    panels[0].hlines(places, *zip(*quartiles, strict=True), color="black", linewidth=1.5, label="quartiles")
    panels[0].set_yticks(places, [label for label, *_ in bars], fontsize=9)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(file, dpi=120)
    plt.close(figure)


def write(folder: Path) -> None:
    """Makes the tables and the plots of all benchmarks that have results in a folder."""
    sections, in_ratios = [], []
    for name in NAMES:
        rows = read(folder, name)
        if not rows:
            continue
        benchmark = importlib.import_module(f"benchmarks.{name}")
        section = _section(benchmark.TITLE, rows)
        if hasattr(benchmark, "draw"):
            benchmark.draw(rows, folder)
            section += f"\n\n![{benchmark.TITLE}]({name}.png)"
        else:
            in_ratios += [(name, row) for row in rows if row["peers"]]
        sections.append(section)
    if in_ratios:
        draw_ratios(in_ratios, folder / "ratios.png")
        sections.insert(0, "![Ratios of speed and memory](ratios.png)")
    (folder / "results.md").write_text(PAGE.format(sections="\n\n".join(sections)), encoding="utf-8")
