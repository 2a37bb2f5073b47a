"""The families that can be trained, by name."""

from __future__ import annotations

from typing import Any

from .base import Recipe
from .bert import BERT
from .captioner import CAPTIONER
from .decoder import DECODER
from .seq2seq import RECURRENT, TRANSFORMER

TRAINABLE: dict[str, Recipe[Any]] = {
    family.name: family for family in (BERT, DECODER, TRANSFORMER, RECURRENT, CAPTIONER)
}
