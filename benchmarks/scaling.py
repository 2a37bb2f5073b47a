"""How the cost of a pretraining step grows with the batch, the length of its rows and the number of layers.

Each point is `pretraining`'s comparison, with a small model.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter

from .compare import Case
from .pretraining import FULL, SIDES, TINY, write_inputs

__all__ = ["CASES", "SIDES", "TITLE", "draw", "write_inputs"]

TITLE = "Pretraining step by batch, length and layers"

SMALL = FULL | {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
# What grows, under its name in the cases: the parameter, what it is called, and its values.
AXES = {
    "batch": ("rows", "rows", (4, 8, 16, 32, 64)),
    "length": ("length", "tokens in a row", (32, 64, 128, 256, 512)),
    "layers": ("num_hidden_layers", "layers", (1, 2, 4, 8)),
}

CASES = {
    f"{axis}-{value}": Case(
        f"256 wide, {value} {label}, else 16 rows of 128 tokens and 2 layers",
        SMALL | {parameter: value},
        quick=TINY | {parameter: value} if (axis, value) == ("batch", 4) else None,
        warm_up=1,
        repetitions=5,
    )
    for axis, (parameter, label, values) in AXES.items()
    for value in values
}


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """Speed and memory against each of the three, to `scaling.png`."""
    points: dict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for row in rows:
        axis, _, value = row["name"].partition("-")
        points[axis].append((int(value), row["sides"]))
    size = {"figsize": (1.5 + 3.5 * len(points), 6), "layout": "constrained"}
    figure, grid = plt.subplots(2, len(points), sharex="col", sharey="row", squeeze=False, **size)
    for column, (axis, found) in zip(grid.T, points.items(), strict=True):
        found.sort(key=lambda point: point[0])
        values = [value for value, _ in found]
        for axes, name, unit in zip(column, ("speed", "memory"), (1, 2**20), strict=True):
            for number, side in enumerate(found[0][1]):
                # Where the memory can't be told there is a gap.
                heights = [(sides[side][name] or float("nan")) / unit for _, sides in found]
                axes.plot(values, heights, marker="o", markersize=4, color=f"C{number}", label=side)
            axes.set_xscale("log", base=2)
            axes.set_xticks(values, [str(value) for value in values])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.grid(alpha=0.3)
        column[1].set_xlabel(AXES[axis][1])
    for axes in grid[:, 0]:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    grid[0, 0].set_ylabel("tokens a second")
    grid[1, 0].set_ylabel("peak memory of the process (MiB)")
    grid[0, 0].legend()
    figure.suptitle("Pretraining step, 256 wide\nwhere not said, 16 rows of 128 tokens and 2 layers")
    figure.savefig(folder / "scaling.png", dpi=120)
    plt.close(figure)
