"""Text corpora as training data: their settings, and the split into training and held-out documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from ..run.settings import TrainingSettings, held_out_share, option
from .documents import load_documents


@dataclass
class CorpusSettings(TrainingSettings):
    """Settings of a run on a text corpus."""

    data: list[str] = option(
        ["python-docs"],
        "What to train on: 'python-docs', a text, jsonl, csv or parquet file, a folder, a glob, or a Hub data set id. "
        "Several are joined.",
    )
    text_column: str = option("text", "The column of a table or data set that holds the text.")
    documents: str = option("file", "What a document is in text files: 'file', 'blank-line' or 'line'.")
    max_documents: int | None = option(None, "Read no more documents than this.")
    streaming: bool = option(False, "Read a Hub data set row by row, without keeping its files.")
    language: str = option(
        "en", "Language of the text (ISO 639): for the model card, and for splitting sentences where that is done."
    )

    def check(self) -> None:
        """See `TrainingSettings.check`."""
        super().check()
        if self.max_documents is not None and self.max_documents < 1:
            raise ValueError(f"`max_documents` ({self.max_documents}) must be at least 1")


def load_split(settings: CorpusSettings) -> tuple[Dataset, Dataset]:
    """The training documents and the held-out ones.

    Raises:
        ValueError: if `validation` is neither a share nor a source, or a part would be empty; see `load_documents`.
    """
    reading: dict[str, Any] = {
        "text_column": settings.text_column,
        "documents": settings.documents,
        "split": settings.split,
        "streaming": settings.streaming,
        "bad_records": settings.bad_records,
    }
    documents = load_documents(settings.data, max_documents=settings.max_documents, **reading)
    share = held_out_share(settings.validation)
    if share is None:
        return documents, load_documents(settings.validation, **reading)
    # Two on each side: a pair with a random second segment needs another document.
    number = max(2, round(share * len(documents)))
    if len(documents) < number + 2:
        raise ValueError(
            f"the corpus has {len(documents)} document{'s' if len(documents) > 1 else ''}, "
            f"too few to hold out {number} and train on 2 or more: add documents, "
            "split the text into several with `documents`, or name a source for `validation`"
        )
    split = documents.train_test_split(test_size=number, seed=settings.seed)
    return split["train"], split["test"]
