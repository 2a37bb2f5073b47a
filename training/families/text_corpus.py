"""Text corpora: their training documents and their held-out documents."""

from __future__ import annotations

from datasets import Dataset

from ..reading.documents import load_documents
from ..reading.splits import load_split
from .settings import CorpusSettings


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
