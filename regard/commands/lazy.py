"""Commands whose options are made only when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import typer
from typer.core import TyperCommand


class LazyCommand(TyperCommand):
    """A command that is made from a function when its options are first read: making it takes heavy imports.

    Args:
        make: returns the function.
        arguments: of `TyperCommand`; its options are those of the function.
    """

    def __init__(self, make: Callable[[], Callable[..., None]], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._make = make

    @cached_property
    def _command(self) -> Any:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command()(self._make())
        return typer.main.get_command(app)

    @property
    def params(self) -> list[Any]:
        """The options of the function."""
        return self._command.params

    @params.setter
    def params(self, params: list[Any]) -> None:
        """Leaves out the options of the placeholder that Typer made this command from."""

    def invoke(self, ctx: Any) -> Any:
        return self._command.invoke(ctx)


def add_lazy_command(app: typer.Typer, name: str, help: str, make: Callable[[], Callable[..., None]]) -> None:
    """Adds a command whose function is made when its options are first read.

    Args:
        app: the application that gets the command.
        name: name of the command.
        help: what the command does. Details may follow a colon; lists of commands show the part before it.
        make: returns the function.
    """

    def command(**arguments: Any) -> LazyCommand:
        return LazyCommand(make, **arguments)

    short_help = help.partition(":")[0].rstrip(".")
    app.command(name, help=help, short_help=short_help, cls=command)(lambda: None)  # type: ignore[arg-type]
