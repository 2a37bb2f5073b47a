"""Tests of a product of values that take one of each with every change, and all of them in `make test-all`."""

import pytest

one_or_all = pytest.mark.parametrize(
    "thorough", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "all"]
)


def chosen(values: list, turn: int, thorough: bool) -> list:
    """One of the values, another one at each turn, or all of them."""
    return values if thorough else [values[turn % len(values)]]
