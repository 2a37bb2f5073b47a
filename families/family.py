"""The record of a model family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .card import Card

_PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class Family:
    """A model family. It is registered once, and all that treats families alike reads this record.

    A part is named by "module:attribute", with a dot before a module of this package, so that it is imported only
    when `resolve` is called for it; or it is the object itself.

    Attributes:
        name: name of the family for the command line and in results; its model type is "regard_" and this.
        help: what training it does, in one line.
        config: its configuration class.
        models: its model classes, by the names of the Auto classes that load them.
        settings: the class of the settings of its runs; its module must not import torch or transformers.
        recipe: the `Recipe` that trains it.
        card: what its model cards show.
        tokenizer: the class that `AutoTokenizer` loads for it, if its tokenizers name none.
        processor: the class that `AutoProcessor` loads for it.
        export: the function that turns a checkpoint and its configuration into a model of a stock class; None if no
            stock architecture computes the same.
        other: further public names of the package that belong to it.
    """

    name: str
    help: str
    config: Any
    models: Mapping[str, Any]
    settings: Any
    recipe: Any
    card: Card
    tokenizer: Any = None
    processor: Any = None
    export: Any = None
    other: tuple[Any, ...] = ()

    def public_parts(self) -> list[str]:
        """The parts that are public names of the package, as "module:attribute"."""
        parts = (self.config, *self.models.values(), self.processor, *self.other)
        return [
            part if isinstance(part, str) else f"{part.__module__}:{part.__name__}"
            for part in parts
            if part is not None
        ]

    @property
    def model_type(self) -> str:
        """The `model_type` of its configuration."""
        return f"{_PACKAGE}_{self.name}"


def resolve(part: Any) -> Any:
    """Returns the part of a family, which is imported if the family names it."""
    if not isinstance(part, str):
        return part
    module, _, name = part.partition(":")
    return getattr(import_module(module, _PACKAGE), name)
