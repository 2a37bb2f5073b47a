"""The recipes of the families that can be trained, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...families.family import resolve
from ...families.registry import FAMILIES
from .base import Recipe


class _Recipes(Mapping[str, Recipe[Any]]):
    """The recipe of each registered family, which is imported when it is read."""

    def __getitem__(self, name: str) -> Recipe[Any]:
        return resolve(FAMILIES[name].recipe)

    def __iter__(self) -> Iterator[str]:
        return iter(FAMILIES)

    def __len__(self) -> int:
        return len(FAMILIES)


TRAINABLE = _Recipes()


def recipe_of(family: str) -> Recipe[Any]:
    """Returns the recipe of a family.

    Raises:
        ValueError: if there is no family of that name.
    """
    if family not in FAMILIES:
        raise ValueError(f"`family` ({family!r}) must be one of {', '.join(FAMILIES)}")
    return TRAINABLE[family]
