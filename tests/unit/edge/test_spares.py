"""The losses that are prepared for: which, and how many."""

from collections.abc import Sequence
from itertools import combinations

import pytest

from edge.cluster import spares
from partition.errors import PlanError
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from tests.support import planning

WORKERS = ("a:1", "b:1", "c:1")


def over(workers: Sequence[str]) -> tuple[Plan, str]:
    """A stage of each of these and of this device."""
    return make_plan(planning.work(8).limits, "made up", "", [LOCAL, *workers], "pipeline"), ""


@pytest.mark.parametrize("losses", [1, 2, 3])
def test_each_loss_has_a_plan_of_those_that_are_left(losses: int) -> None:
    cases = spares._Cases(losses, WORKERS, over)
    cases.after(over(WORKERS)[0], frozenset())
    lost = {frozenset(some) for n in range(1, losses + 1) for some in combinations(WORKERS, n)}
    assert set(cases.plans) == lost
    for some, plan in cases.plans.items():
        assert set(plan.devices) == {LOCAL, *WORKERS} - some
    assert cases.missing == []


def test_a_loss_that_nothing_is_left_for_is_named() -> None:
    def without_a_nothing(workers: Sequence[str]) -> tuple[Plan, str]:
        if "a:1" not in workers:
            raise PlanError("no room")
        return over(workers)

    cases = spares._Cases(1, WORKERS, without_a_nothing)
    cases.after(over(WORKERS)[0], frozenset())
    assert cases.missing == ["nothing is prepared for the loss of a:1: no room"]
    assert set(cases.plans) == {frozenset({"b:1"}), frozenset({"c:1"})}


def test_there_are_no_more_cases_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "MOST_CASES", 6)
    spares._Cases(2, WORKERS, over).after(over(WORKERS)[0], frozenset())
    monkeypatch.setattr(spares, "MOST_CASES", 5)
    with pytest.raises(PlanError, match="takes more than 5 plans of 3 workers; ask for fewer"):
        spares._Cases(2, WORKERS, over).after(over(WORKERS)[0], frozenset())
