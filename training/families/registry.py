"""The families that can be trained, by name."""

from __future__ import annotations

from typing import Any

from .base import Family
from .bert import BERT
from .captioner import CAPTIONER
from .decoder import DECODER
from .seq2seq import RECURRENT, TRANSFORMER

TRAINABLE: dict[str, Family[Any]] = {
    family.name: family for family in (BERT, DECODER, TRANSFORMER, RECURRENT, CAPTIONER)
}
