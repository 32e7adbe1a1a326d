"""Cases that run every time, and cases that run only with EDGE_THOROUGH=1.

    @pytest.mark.parametrize("shares", [(1, 1), *thorough((2, 1), (1, 2, 3))])
    @settings(max_examples=some(30, 150))

A whole test, or a combination, is marked with `pytest.mark.thorough`.
"""

import os
from typing import Any

import pytest

THOROUGH = os.environ.get("EDGE_THOROUGH") == "1"


def some(few: int, every: int) -> int:
    """How many of `every` instance to run: `few`, or all with EDGE_THOROUGH=1."""
    return every if THOROUGH else few


def thorough(*values: Any) -> list[Any]:
    """Values of a parameter that run only with EDGE_THOROUGH=1. A tuple is one value."""
    return [pytest.param(value, marks=pytest.mark.thorough) for value in values]
