"""Writing the code of a model family beside a checkpoint, which then loads where this package is not installed.

`from_pretrained(..., trust_remote_code=True)` runs code from the checkpoint's own folder. transformers finds it by the
`auto_map` of `config.json` and follows what a file imports from its own folder, but neither into other folders nor by
`from . import module`. So the modules that a family consists of are written side by side, their imports of each other
rewritten. Where this package is imported, its classes are taken, and the code beside the checkpoint is not run.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterable
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

from ..families.family import Family, resolve
from ..families.registry import family_of_type

_PACKAGE = __name__.partition(".")[0]
_LINE_LENGTH = 119
_HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# Copyright The {package} authors
# This is {module}, changed only in how it imports the modules that now stand beside it.

"""
_SAVED_TOO = """

# transformers saves a model with the files that its own file imports, whether or not the import is ever run.
if False:
"""


class _Module(NamedTuple):
    """A module as it is published.

    Attributes:
        source: its code.
        imports: names of the modules of the package that it imports.
    """

    source: str
    imports: set[str]


def write_bundle(folder: str | Path) -> list[Path]:
    """Writes the code of a checkpoint's family beside it, and names the classes in its `auto_map`.

    The code holds all of the family's classes, whichever of them the checkpoint was saved from, and the processor if
    `folder` holds one. Files are named after the modules, `regard_modeling_bert.py`, and replaced if they exist.

    Args:
        folder: a checkpoint of one of this package's families, as `save_pretrained` writes it.

    Returns:
        The files of code, sorted by name.

    Raises:
        FileNotFoundError: if there is no `config.json` in `folder`.
        ValueError: if the checkpoint belongs to no family of this package.
    """
    folder = Path(folder)
    family = _family_of(folder)
    models = {name: resolve(model_class) for name, model_class in family.models.items()}
    auto_maps: dict[str, dict[str, type]] = {"config.json": {"AutoConfig": resolve(family.config), **models}}
    if family.processor is not None and (folder / "processor_config.json").exists():
        auto_maps["processor_config.json"] = {"AutoProcessor": resolve(family.processor)}

    modules = _published({each.__module__ for classes in auto_maps.values() for each in classes.values()})
    _save_together(models.values(), modules)
    paths = []
    for name in sorted(modules):
        paths.append(folder / f"{_flat_name(name)}.py")
        text = _HEADER.format(package=_PACKAGE, module=name) + modules[name].source
        paths[-1].write_text(text, encoding="utf-8", newline="\n")
    for file_name, classes in auto_maps.items():
        _add_auto_map(folder / file_name, classes)
    return paths


def remove_bundle(folder: str | Path) -> None:
    """Deletes the code of a bundle from a folder, and the references to it from the configurations there."""
    folder = Path(folder)
    for path in folder.glob(f"{_PACKAGE}_*.py"):
        path.unlink()
    for path in (folder / "config.json", folder / "processor_config.json"):
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if config.pop("auto_map", None):
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8", newline="\n")


def _family_of(folder: Path) -> Family:
    model_type = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    family = family_of_type(model_type)
    if family is None:
        raise ValueError(
            f"`folder` ({folder}) holds a checkpoint of the model type {model_type!r}, none of {_PACKAGE}'s"
        )
    return family


def _published(names: Iterable[str]) -> dict[str, _Module]:
    """Collects modules of the package, and all modules of it that they import, by their full names."""
    modules: dict[str, _Module] = {}
    remaining = set(names)
    while remaining:
        name = remaining.pop()
        modules[name] = _flatten(name)
        remaining |= modules[name].imports - modules.keys()
    return modules


def _flatten(name: str) -> _Module:
    """Rewrites the imports of a module so that it finds the package's other modules in its own folder."""
    module = importlib.import_module(name)
    source = inspect.getsource(module)
    lines = source.split("\n")
    imports = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.module, f"{name} imports a module by `from . import`, which transformers does not follow"
            imported = resolve_name("." * node.level + node.module, module.__package__)
            imports.add(imported)
            first = node.lineno - 1
            lines[first] = re.sub(r"from \.[\w.]*", f"from .{_flat_name(imported)}", lines[first], count=1)
            if len(lines[first]) > _LINE_LENGTH:
                indent = " " * node.col_offset
                start, _, _ = lines[first].partition(" import ")
                items = [f"{indent}    {ast.unparse(item)}," for item in node.names]
                lines[first] = "\n".join([f"{start} import (", *items, f"{indent})"])
    # In one folder the modules have another order than in several.
    own = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level]
    statements = sorted("\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in own)
    for node, statement in zip(reversed(own), reversed(statements), strict=True):
        lines[node.lineno - 1 : node.end_lineno] = [statement]
    return _Module("\n".join(lines), imports)


def _save_together(model_classes: Iterable[type], modules: dict[str, _Module]) -> None:
    """Makes each module of model classes import all the others, so that transformers keeps them together.

    When a loaded model is saved again, for example after further pretraining, transformers saves only the files that
    the model's own file imports, but the `auto_map` still names all of the family's classes.
    """
    # One class of each module is enough.
    classes = {model_class.__module__: model_class.__name__ for model_class in model_classes}
    for name in classes:
        missing = sorted(classes.keys() - _published([name]).keys())
        if missing:
            imports = [f"    from .{_flat_name(other)} import {classes[other]}  # noqa: F401\n" for other in missing]
            modules[name] = modules[name]._replace(source=modules[name].source + _SAVED_TOO + "".join(imports))


def _flat_name(module: str) -> str:
    return module.replace(".", "_")


def _add_auto_map(path: Path, classes: dict[str, type]) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config["auto_map"] = {name: f"{_flat_name(each.__module__)}.{each.__name__}" for name, each in classes.items()}
    # As transformers writes it.
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
