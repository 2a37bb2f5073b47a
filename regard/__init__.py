"""regard: Hugging Face-compatible attention models, from recurrent alignment scores to BERT.

Importing the package registers every model family with transformers' Auto classes, so that
`AutoModelForMaskedLM.from_pretrained(folder)` and the like find them.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# In a checkout the subpackages are siblings of this folder; installed, they lie inside it.
if not (Path(__file__).parent / "modeling").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

from .configuration.bert import RegardBertConfig
from .modeling.bert import (
    RegardBertForMaskedLM,
    RegardBertForNextSentencePrediction,
    RegardBertForPreTraining,
    RegardBertModel,
)
from .modeling.bert_tasks import (
    RegardBertForMultipleChoice,
    RegardBertForQuestionAnswering,
    RegardBertForSequenceClassification,
    RegardBertForTokenClassification,
)
from .registration import register_families

register_families()

# What training needs is imported when it is first asked for: loading a model does not need it.
_LAZY = {"fill_masks": ".fill", "train_bert": ".train"}

__all__ = [
    "RegardBertConfig",
    "RegardBertForMaskedLM",
    "RegardBertForMultipleChoice",
    "RegardBertForNextSentencePrediction",
    "RegardBertForPreTraining",
    "RegardBertForQuestionAnswering",
    "RegardBertForSequenceClassification",
    "RegardBertForTokenClassification",
    "RegardBertModel",
    "fill_masks",
    "train_bert",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name], "regard"), name)
