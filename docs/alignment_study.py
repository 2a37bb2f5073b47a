"""What attention buys: the recurrent encoder-decoder with each alignment function, and with one fixed context vector.

    python docs/alignment_study.py [--runs runs/alignment-study] [--seeds 0 1 2] [--steps 3000]

Trains a model of one size for as many steps with each, on the built-in dates, and writes what came of it, exact match
on held-out dates by the length of the source, to docs/alignment_study.md and docs/images/alignment_study.png. A run
that has ended is not trained again, and one that was interrupted goes on.
"""

import argparse
import logging
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import regard
from regard.training.families.seq2seq import RecurrentSettings

ALIGNMENTS = ("none", "dot", "scaled_dot", "bilinear", "additive")
LABELS = {"none": "none (fixed context vector)", "scaled_dot": "scaled dot"}
DOCS = Path(__file__).parent
# Sources of so many characters are told together.
STEP = 20

PAGE = """# What attention buys

A recurrent encoder-decoder reads a source and writes a target. Without attention, all that its decoder knows of the
source is one vector of fixed width; with attention, each step attends to the source anew. If that vector is a
bottleneck, the loss should grow with the length of the source. Cho et al. (2014), https://arxiv.org/abs/1409.1259,
observed this in translation, and Bahdanau et al. (2015), https://arxiv.org/abs/1409.0473, how attention helps.

Here each model rewrites one to five dates, written in any of 24 locales, as ISO 8601. They differ only in the
alignment: {width} wide, {steps:,} steps of {batch_size} pairs, with the same pairs in the same order for each seed.
The figures are those of greedy generation on {held_out:,} held-out rows, none of whose dates occur in training.

{by_run}

These are the shares of targets that are right to the last character, in percent, for each run. Two runs of the same
alignment may differ by more than two alignments do.

![Exact match by length of the source, a line for each run](images/alignment_study.png)

The same share over all runs of an alignment, with its standard error (which does not include the differences between
runs):

{by_length}

{by_dates}

Made by `make study`, which is `python docs/alignment_study.py{arguments}`, with {versions}.
"""


def train(runs: Path, seeds: list[int], settings: dict) -> dict[str, list[dict]]:
    """The results of each alignment, a run for each seed."""
    found: dict[str, list[dict]] = defaultdict(list)
    for seed in seeds:
        for alignment in ALIGNMENTS:
            folder = runs / f"{alignment}-{seed}"
            given = {**settings, "alignment": alignment, "seed": seed, "log_with": ["none"]}
            found[alignment].append(regard.train_recurrent(folder, given, resume=True))
    return found


def joined(results: list[dict], name: str) -> dict[int, tuple[int, float]]:
    """The number of rows and the share that is right for each key, over all runs."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0, 0.0])
    for row in (row for result in results for row in result[name]):
        sums[row["key"]][0] += row["number"]
        sums[row["key"]][1] += row["number"] * row["exact_match"]
    return {key: (int(number), right / number) for key, (number, right) in sorted(sums.items())}


def error(number: int, share: float) -> float:
    return (share * (1 - share) / number) ** 0.5


def table(found: dict[str, list[dict]], name: str, heading: str, label) -> str:
    columns = {alignment: joined(results, name) for alignment, results in found.items()}
    keys = [key for key, (number, _) in columns["none"].items() if number >= 20]
    lines = [
        f"| {heading} | rows | " + " | ".join(LABELS.get(alignment, alignment) for alignment in columns) + " |",
        "|---" * (2 + len(columns)) + "|",
    ]
    for key in keys:
        cells = [
            f"{100 * share:.1f} ± {100 * error(number, share):.1f}"
            for number, share in (column[key] for column in columns.values())
        ]
        lines.append(f"| {label(key)} | {columns['none'][key][0]:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def runs_table(found: dict[str, list[dict]]) -> str:
    lines = [
        "| | " + " | ".join(LABELS.get(alignment, alignment) for alignment in found) + " |",
        "|---" * (1 + len(found)) + "|",
    ]
    for results in zip(*found.values(), strict=True):
        cells = [f"{100 * result['metrics']['exact_match']:.1f}" for result in results]
        lines.append(f"| seed {results[0]['settings']['seed']} | {' | '.join(cells)} |")
    sizes = " | ".join(f"{results[0]['parameters']:,}" for results in found.values())
    lines.append(f"| parameters | {sizes} |")
    return "\n".join(lines)


def draw(found: dict[str, list[dict]], file: Path) -> None:
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for number, (alignment, results) in enumerate(found.items()):
        for run, result in enumerate(results):
            rows = {key: value for key, value in joined([result], "by_source_length").items() if value[0] >= 20}
            axes.errorbar(
                [key + STEP / 2 for key in rows],
                [100 * share for _, share in rows.values()],
                [100 * error(*value) for value in rows.values()],
                marker="o",
                markersize=4,
                capsize=2,
                linestyle="--" if alignment == "none" else "-",
                color="black" if alignment == "none" else f"C{number}",
                label=None if run else LABELS.get(alignment, alignment),
            )
    axes.set(xlabel="length of the source (characters)", ylabel="targets all right (%)", ylim=(-3, 103))
    axes.set_title("Dates to ISO 8601: exact match by length of the source")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right")
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/alignment-study"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--output", type=Path, default=DOCS)
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("regard").setLevel(logging.INFO)

    found = train(options.runs, options.seeds, {"steps": options.steps})
    (options.output / "images").mkdir(parents=True, exist_ok=True)
    draw(found, options.output / "images" / "alignment_study.png")
    one = found["none"][0]
    versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items() if name != "tokenizers")
    arguments = "".join(
        f" --{name} {value}"
        for name, value, usual in (
            ("seeds", " ".join(map(str, options.seeds)), "0 1"),
            ("steps", str(options.steps), "3000"),
        )
        if value != usual
    )
    page = PAGE.format(
        width=RecurrentSettings(**one["settings"]).width,
        steps=options.steps,
        batch_size=one["settings"]["batch_size"],
        held_out=one["data"]["held_out_pairs"],
        by_length=table(found, "by_source_length", "characters", lambda key: f"{key} to {key + STEP - 1}"),
        by_dates=table(found, "by_target_words", "dates", str),
        by_run=runs_table(found),
        arguments=arguments,
        versions=versions,
    )
    (options.output / "alignment_study.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
