"""Test that a plan must be clearly better if a device was measured while it was busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from edge.deployment.replanning import Replanner
from edge.models.demo import MODEL_PATH
from edge.planning.choice import PlanChoice
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL, Plan
from partition.predict.speeds import DeviceSpeed
from partition.search.explain import best
from partition.search.planner import Planner
from tests.support import planning
from tests.support.planning import MS

PI = "pi:7070"
SPEEDS = tuple(planning.device(name, 10 * MS, half_s=6 * MS) for name in (LOCAL, PI))
LINKS, WORK = planning.linked((LOCAL, PI)), planning.work(8)
PLANNER = Planner(WORK, SPEEDS, LINKS, "made up", "")


def replanner(plan: Plan, speeds: Sequence[DeviceSpeed]) -> Replanner:
    """Return the replanner of a plan that was chosen by such measurements."""
    choice = PlanChoice(MODEL_PATH, plan, "", planner=Planner(WORK, speeds, LINKS, "made up", ""))
    return Replanner(choice, ModelFile.open(MODEL_PATH), "")


def several() -> Plan:
    """Return the plan over both devices."""
    plan = best(PLANNER, "latency").plan
    assert plan.world_size == 2
    return plan


def test_a_busy_device_that_joins_has_to_be_worth_more() -> None:
    """Both together take 48 ms, this device alone 80: that pays, unless the other one was busy, or this one was."""
    plan = several()
    alone = PLANNER.only_own().front(("latency",))[0][0].plan

    def pays(own: dict[str, object], other: dict[str, object]) -> bool:
        speeds = (replace(SPEEDS[0], **own), replace(SPEEDS[1], **other))  # type: ignore[arg-type]
        return replanner(alone, speeds).pays(plan, alone)

    assert pays({}, {})
    assert not pays({}, {"busy": True})
    assert not pays({"busy": True}, {})


@pytest.mark.parametrize(("other_s", "pays"), [(0.3 * MS, True), (3 * MS, False)])
def test_a_busy_device_is_left_only_for_a_much_faster_one(other_s: float, pays: bool) -> None:
    own = replace(SPEEDS[0], busy=True)
    speeds = (own, planning.device(PI, other_s, half_s=0.6 * other_s))
    planner = Planner(WORK, speeds, LINKS, "made up", "")
    several = planner.front(("latency",))[0][0].plan
    assert several.world_size == 2
    alone = planner.only_own().front(("latency",))[0][0].plan
    assert replanner(alone, speeds).pays(several, alone) == pays
