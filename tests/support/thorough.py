"""Tests of many values that take some of them with every change, and all of them in `make test-all`."""

from collections.abc import Iterable

import pytest

one_or_all = pytest.mark.parametrize(
    "thorough", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "all"]
)


def chosen(values: list, turn: int, thorough: bool) -> list:
    """One of the values, another one at each turn, or all of them."""
    return values if thorough else [values[turn % len(values)]]


def slow_except(kept: list, values: Iterable) -> list:
    """Parameters of a test, single ones or tuples, of which those that are not kept are slow."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else [value]), marks=() if value in kept else pytest.mark.slow
        )
        for value in values
    ]
