"""From text to an epoch of sentence pairs, against the bare tokenizer on the same text.

Ours reads memory-mapped documents, splits them into sentences, encodes these, writes their ids to an Arrow file, which
is never taken from the cache, and plans the pairs of an epoch of BERT's pretraining. The peer is one call of
`tokenizers.Tokenizer.encode_batch` on all documents, which are a list in memory already, and what it gives is left as
it is. Both find the same ids. The text is Python's own documentation, once or several times over: what is done in a
second, and the memory of ours, should stay the same.
"""

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from .compare import Case
from .sides import Side, Work

TITLE = "Tokenising and pairing"

FIGURES = {"tokenizers": {"speed": 1 / 1.3}}
BASIC = {"vocab_size": 8192, "length": 128}

CASES = {
    f"times-{times}": Case(
        "Python's documentation" + ("" if times == 1 else f", {times} times over"),
        BASIC | {"times": times},
        quick={"vocab_size": 1000, "documents": 40} if times == 1 else None,
        units="MB",
        warm_up=1,
        repetitions=repetitions,
        figures=FIGURES,
    )
    for times, repetitions in ((1, 9), (4, 5), (16, 3))
}


def write_inputs(parameters: dict[str, Any], folder: Path) -> None:
    """Writes the documents and the tokenizer."""
    from datasets import concatenate_datasets

    from regard.training.families.bert import BERT, BertSettings
    from regard.training.families.text_corpus import load_document_split

    settings = BertSettings(vocab_size=parameters["vocab_size"], max_documents=parameters.get("documents"))
    documents, _ = load_document_split(settings)
    BERT.make_processor(settings, documents).save_pretrained(folder / "tokenizer")
    concatenate_datasets([documents] * parameters["times"]).save_to_disk(folder / "documents")


def _digest(parts: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.asarray(part, dtype=np.int32).tobytes())
    return digest.hexdigest()


class PreparationSide(Side):
    """Tokenises the documents."""

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        from datasets import disable_caching, disable_progress_bars, load_from_disk

        super().__init__(parameters, folder)
        disable_caching()
        disable_progress_bars()
        self.documents = load_from_disk(folder / "documents")
        self.megabytes = sum(len(text.encode()) for text in self.documents["text"]) / 1e6

    def prepare(self) -> Any:
        """What is timed."""
        raise NotImplementedError

    def run(self, turn: int) -> Work:
        """Prepares all documents once."""
        began = time.perf_counter()
        self.prepare()
        return Work(time.perf_counter() - began, self.megabytes)


class RegardPreparation(PreparationSide):
    """`tokenize_documents` and `BertExamples`."""

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        from transformers import AutoTokenizer

        from regard.training.examples.masking import Masking

        super().__init__(parameters, folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self.masking = Masking.from_tokenizer(self.tokenizer)

    def tokenize(self) -> Any:
        """The tokenized corpus."""
        from regard.training.examples.tokenized import tokenize_documents

        return tokenize_documents(self.documents, self.tokenizer)

    def prepare(self) -> Any:
        """The examples of an epoch, each of which is made when it is read."""
        from regard.training.examples.bert import BertExamples

        return BertExamples(self.tokenize(), self.tokenizer, self.masking, self.parameters["length"]).epoch(0)

    def check(self) -> dict[str, Any]:
        """The ids of the corpus."""
        from regard.training.examples.tokenized import FlatColumn

        return {"ids": _digest(FlatColumn(self.tokenize(), "ids").parts())}


class BareTokenizer(PreparationSide):
    """`tokenizers` by itself."""

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        from tokenizers import Tokenizer

        super().__init__(parameters, folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        self.texts = list(self.documents["text"])

    def prepare(self) -> Any:
        """What the tokenizer gives."""
        return self.tokenizer.encode_batch(self.texts, add_special_tokens=False)

    def check(self) -> dict[str, Any]:
        """The ids of the corpus."""
        return {"ids": _digest(encoding.ids for encoding in self.prepare())}


SIDES = {"regard": RegardPreparation, "tokenizers": BareTokenizer}


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """Speed and memory against the size of the corpus, to `preparation.png`."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, name, unit in zip(panels, ("speed", "memory"), (1, 2**20), strict=True):
        for side in rows[0]["sides"]:
            sizes = [row["sides"]["regard"]["units"][0] for row in rows]
            # Where the memory can't be told there is a gap.
            heights = [(row["sides"][side][name] or float("nan")) / unit for row in rows]
            axes.plot(sizes, heights, marker="o", markersize=4, label=side)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:.2g}" for size in sizes])
        axes.set_xlabel("MB of text")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("MB a second")
    panels[1].set_ylabel("peak memory of the process (MiB)")
    panels[0].legend()
    figure.suptitle(TITLE)
    figure.savefig(folder / "preparation.png", dpi=120)
    plt.close(figure)
