"""Test cases that always run, and test cases that run only with EDGE_THOROUGH=1.

    @pytest.mark.parametrize("shares", [(1, 1), *thorough((2, 1), (1, 2, 3))])
    @pytest.mark.parametrize(("arch", "cut"), each_once(ARCHITECTURES, CUTS))
    @settings(max_examples=some(30, 150))

A whole test, or a combination, is marked with `pytest.mark.thorough`.
"""

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

THOROUGH = os.environ.get("EDGE_THOROUGH") == "1"


def some(few: T, every: T) -> T:
    """Choose how many instances, or which, run: `few`, or `every` with EDGE_THOROUGH=1."""
    return every if THOROUGH else few


def thorough(*values: Any) -> list[Any]:
    """Values of a parameter that run only with EDGE_THOROUGH=1. A tuple is one value."""
    return [pytest.param(value, marks=pytest.mark.thorough) for value in values]


def each_once(first: Iterable[Any], second: Iterable[Any], ids: Any = str) -> list[Any]:
    """Pairs of values for two parameters: all with EDGE_THOROUGH=1, else so many that every value occurs."""
    first, second = list(first), list(second)
    saved = {(i % len(first), i % len(second)) for i in range(max(len(first), len(second)))}
    return [
        pytest.param(a, b, id=f"{ids(a)}-{ids(b)}", marks=[] if (i, j) in saved else [pytest.mark.thorough])
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]
