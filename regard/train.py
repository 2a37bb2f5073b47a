"""Training a model and describing it: what `regard train` does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from accelerate import PartialState

from .sharing.cards import write_card
from .training.bert import BERT
from .training.family import train
from .training.run import MODEL

logger = logging.getLogger(__name__)


def train_bert(
    output: str | Path = "runs/bert", settings: dict[str, Any] | None = None, *, resume: bool = False
) -> dict[str, Any]:
    """Pretrains a BERT, writes its model card and logs what came out.

    The arguments, the result and the errors are those of `training.family.train`.
    """
    results = train(BERT, output, settings, resume=resume)
    model = Path(output) / MODEL
    if PartialState().is_main_process:
        # The card of a run that had ended before may have been edited since.
        if not (model / "README.md").exists():
            write_card(model, results)
        logger.info("%s", bert_summary(results, model))
    return results


def bert_summary(results: dict[str, Any], model: Path) -> str:
    """What a run came to, for people: figures beside baselines, filled masks, and the line that loads the model."""
    metrics = results["metrics"]
    lines = [
        "",
        f"Trained for {results['step']:,} steps, {results['tokens']:,} tokens, in {results['seconds']:,.0f} seconds.",
        "",
        "On held-out documents                 model   baseline",
        f"  masked tokens predicted right     {metrics['masked_accuracy']:7.1%}    "
        f"{metrics['masked_accuracy_baseline']:7.1%}  the most frequent token",
        f"  loss per masked token             {metrics['masked_loss']:7.3f}    "
        f"{metrics['masked_loss_unigram']:7.3f}  token frequencies",
    ]
    if "next_sentence_accuracy" in metrics:
        lines.append(
            f"  next sentences told from random   {metrics['next_sentence_accuracy']:7.1%}    "
            f"{metrics['next_sentence_baseline']:7.1%}  the more frequent kind"
        )
    if results["filled"]:
        lines += ["", "Held-out sentences with a word masked:"]
        for example in results["filled"]:
            lines += [f"  {example['text']}", f"    {', '.join(example['guesses'])}  (was: {example['word']})"]
    lines += [
        "",
        "To load it, in Python:",
        f"  import regard, transformers; model = transformers.AutoModelForMaskedLM.from_pretrained({str(model)!r})",
    ]
    return "\n".join(lines)
