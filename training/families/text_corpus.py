"""Text corpora: the settings of all families that are trained on one, and its training and held-out documents."""

from __future__ import annotations

from dataclasses import dataclass

from datasets import Dataset

from ..reading.documents import load_documents
from ..reading.splits import load_split
from ..run.settings import TrainingSettings, option


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
        super().check()
        if self.max_documents is not None and self.max_documents < 1:
            raise ValueError(f"`max_documents` ({self.max_documents}) must be at least 1")


def load_document_split(settings: CorpusSettings) -> tuple[Dataset, Dataset]:
    """Loads the training documents and the held-out ones.

    Raises:
        ValueError: if `validation` is neither a share nor a source, a source cannot be read, or there are too few
            documents.
    """

    def read(names: list[str], is_training: bool) -> Dataset:
        return load_documents(
            names,
            text_column=settings.text_column,
            documents=settings.documents,
            split=settings.split,
            max_documents=settings.max_documents if is_training else None,
            streaming=settings.streaming,
            bad_records=settings.bad_records,
        )

    # Two on each side: a pair with a random second segment needs another document.
    remedy = "add documents, split the text into several with `documents`"
    return load_split(settings, read, least=2, unit="document", remedy=remedy)
