"""Groups that answers form: those of the engine that runs now, also after another one took over."""

from types import SimpleNamespace
from typing import Any

import pytest

from edge.llm.in_flight import InFlight
from edge.llm.step_budget import StepBudget


def an_engine(stages: int, groups: int, contexts: int = 1) -> Any:
    return SimpleNamespace(stages=stages, groups=groups, contexts=contexts)


@pytest.mark.parametrize(
    ("stages", "groups", "contexts", "microbatches", "formed", "most"),
    [
        (1, 1, 1, None, 1, 1),
        (3, 3, 1, None, 3, 3),
        (2, 4, 1, None, 4, 4),  # as its plan says
        (2, 4, 1, 2, 2, 2),  # as the caller says
        (1, 1, 1, 2, 2, 1),  # one stage has one step at a time
        (1, 1, 2, None, 1, 2),  # and one in each of its contexts
    ],
)
def test_groups_are_those_of_the_engine_that_took_over(
    stages: int, groups: int, contexts: int, microbatches: int | None, formed: int, most: int
) -> None:
    budget = StepBudget(512, lambda: 0.0)
    for first in (an_engine(1, 1), an_engine(4, 4), an_engine(1, 1, 2)):
        in_flight = InFlight(budget, first, microbatches)
        in_flight.follow(an_engine(stages, groups, contexts))
        assert (budget.groups, in_flight.most) == (formed, most)
