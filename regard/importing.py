"""Two import hooks: a callback after the import of another package, and old names of modules that have moved."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType

# Modules that have moved: the old names, used by earlier documentation and installations, and the new ones.
MOVED = {
    "regard.cli": "regard.commands.app",
    "regard.inspection.calculation": "regard.inspection.steps.worked_example",
    "regard.inspection.dependence": "regard.inspection.steps.dependence",
    "regard.inspection.heads": "regard.inspection.steps.head_distances",
    "regard.inspection.shapes": "regard.inspection.steps.trace",
    "regard.push": "regard.commands.push",
    "regard.training.bad_records": "regard.training.reading.bad_records",
    "regard.training.glyphs": "regard.training.builtin.glyphs",
    "regard.training.sources": "regard.training.reading.documents",
}


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Calls a function as soon as a top-level package has been imported, or now if it already has been."""
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _AfterImport(name, callback))


class _AfterImport(MetaPathFinder):
    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name, self._callback = name, callback
        self._is_searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._with_callback(spec.loader.exec_module)  # type: ignore[method-assign, assignment]
        return spec

    def _with_callback(self, exec_module: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def run(module: ModuleType) -> None:
            exec_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._callback()

        return run


class MovedModules(MetaPathFinder, Loader):
    """Imports a module that has moved by its old name, with a warning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module in `MOVED`; None for all others."""
        return spec_from_loader(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Imports the module under its new name, and enters it in `sys.modules` under the old name."""
        new = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is now {new}", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = import_module(new)
