"""Draws a pretraining run for the README: held-out figures on the way, and masks that the model fills.

python docs/pretraining_picture.py runs/bert docs/images/pretraining.png
"""

import json
import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

run, output = Path(sys.argv[1]), Path(sys.argv[2])
history = [json.loads(line) for line in (run / "history.jsonl").read_text(encoding="utf-8").splitlines()]
results = json.loads((run / "results.json").read_text(encoding="utf-8"))
evaluations = [row for row in history if row["kind"] == "evaluation"]
steps = [row["step"] for row in evaluations]

figure, (accuracy, loss, masks) = plt.subplots(1, 3, figsize=(13, 3.6), width_ratios=(1, 1, 1.6), layout="constrained")
for axes, name, scale, title in (
    (accuracy, "masked_accuracy", 100, "masked tokens predicted right (%)"),
    (loss, "masked_loss", 1, "loss per masked token (nats)"),
):
    baseline = {"masked_accuracy": "masked_accuracy_baseline", "masked_loss": "masked_loss_unigram"}[name]
    label = {"masked_accuracy": "most frequent token", "masked_loss": "token frequencies"}[name]
    axes.plot(steps, [scale * row[name] for row in evaluations], marker="o", markersize=3, label="model")
    axes.axhline(scale * evaluations[-1][baseline], color="gray", linestyle="--", label=label)
    axes.set(title=title, xlabel="step")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
accuracy.set_ylim(bottom=0)

masks.axis("off")
masks.set_title("held-out sentences, one word masked", loc="left")
place = 0.97
for example in results["filled"]:
    lines = textwrap.wrap(example["text"], 72)
    masks.text(0, place, "\n".join(lines), va="top", fontsize=9, transform=masks.transAxes)
    place -= 0.062 * len(lines)
    answer = f"→ {', '.join(example['guesses'])}   (was: {example['word']})"
    masks.text(0.03, place, answer, va="top", fontsize=9, color="tab:blue", transform=masks.transAxes)
    place -= 0.092
figure.savefig(output, dpi=110)
