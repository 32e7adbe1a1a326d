"""Test that a scheduler uses the number of microbatches of its current engine, also after a replacement."""

from types import SimpleNamespace
from typing import Any

import pytest

from edge.llm.in_flight import InFlight
from edge.llm.step_budget import StepBudget


def an_engine(stages: int, groups: int) -> Any:
    return SimpleNamespace(stages=stages, microbatches=groups)


@pytest.mark.parametrize(
    ("stages", "groups", "microbatches", "formed", "most"),
    [
        (1, 1, None, 1, 1),
        (3, 3, None, 3, 3),
        (2, 4, None, 4, 4),  # as its plan says
        (2, 4, 2, 2, 2),  # as the caller says
        (1, 1, 2, 2, 1),  # one stage computes one step at a time
    ],
)
def test_microbatches_are_those_of_the_engine_that_took_over(
    stages: int, groups: int, microbatches: int | None, formed: int, most: int
) -> None:
    budget = StepBudget(512, lambda: 0.0)
    for first in (an_engine(1, 1), an_engine(4, 4)):
        in_flight = InFlight(budget, first, microbatches)
        in_flight.follow(an_engine(stages, groups))
        assert (budget.microbatches, in_flight.most) == (formed, most)
