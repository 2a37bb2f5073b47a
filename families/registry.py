"""The registry of model families. To add a family is its own files and one name here."""

from __future__ import annotations

from importlib import import_module

from .family import Family

# The module of each family in this folder, in the order of help texts.
_MODULES = ("bert", "decoder", "transformer", "recurrent", "captioner")

FAMILIES: dict[str, Family] = {name: import_module(f".{name}", __package__).FAMILY for name in _MODULES}


def family_of_type(model_type: str) -> Family | None:
    """Returns the family of a `model_type`; None if it is not one of this package's."""
    return next((family for family in FAMILIES.values() if family.model_type == model_type), None)
