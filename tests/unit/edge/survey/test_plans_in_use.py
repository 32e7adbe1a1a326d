"""Plans under which tokens took far longer than predicted: known times give known choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from devices.remembered import Remembered
from edge.demo import MODEL_PATH
from edge.deployment.replanning import Replanner
from edge.parallel.step_times import StepTime, StepTimes, Summary
from edge.planning.arrange import by_use, chosen
from edge.planning.choice import PlanChoice
from edge.survey.corrections import AGE_S, Corrections, UsedPlans, token_s
from partition.plan.plan import LOCAL, Plan
from partition.predict.hysteresis import FAR
from partition.predict.predict import compute_s
from partition.predict.speeds import DeviceSpeed
from partition.search.explain import best
from partition.search.planner import Planner
from quant.gguf.file import GgufFile
from tests.support import planning
from tests.support.clock import Clock
from tests.support.deployments import own_folders
from tests.support.planning import MS

PI = "pi:7070"
SPEEDS = tuple(planning.device(name, 10 * MS, half_s=6 * MS) for name in (LOCAL, PI))
LINKS, WORK = planning.linked((LOCAL, PI)), planning.work(8)
PLANNER = Planner(WORK, SPEEDS, LINKS, "made up", "")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    import devices.remembered as remembered

    own_folders(monkeypatch, tmp_path)
    clock = Clock().install(monkeypatch, remembered)
    clock.now = 1e9
    return clock


def replanner(plan: Plan, speeds: Sequence[DeviceSpeed]) -> Replanner:
    """Return the replanner of a plan that was chosen by such measurements."""
    choice = PlanChoice(MODEL_PATH, plan, "", planner=Planner(WORK, speeds, LINKS, "made up", ""))
    return Replanner(choice, GgufFile.open(MODEL_PATH), "")


def ranks(compute_s: Sequence[float], waits_s: float, n: int = 32) -> list[dict[str, Summary]]:
    """Summarize so many steps that compute so long, by rank, and wait for others."""
    results = []
    for seconds in compute_s:
        times = StepTimes()
        for _ in range(n):
            times.add(StepTime(1, compute_s=seconds, communication_s=waits_s))
        results.append(times.summaries())
    return results


def several() -> tuple[Plan, float]:
    """The plan over both devices, and what is predicted of it."""
    placed = best(PLANNER, "latency")
    assert placed.plan.world_size == 2
    return placed.plan, placed.objectives[0]


def as_predicted(plan: Plan) -> list[float]:
    return [seconds or 0.0 for seconds in compute_s(plan, WORK, {s.device: s for s in SPEEDS}, LINKS)]


def test_what_a_token_took() -> None:
    assert token_s(ranks([0.010, 0.030], 0.002)) == pytest.approx(0.012)  # this device's, which waits for the other
    assert token_s(ranks([0.010], 0.002, n=15)) is None
    assert token_s([]) is token_s([{}]) is None


def test_a_plan_that_waits_is_not_taken_again(clock: Clock) -> None:
    """Each device computes as it was measured to, and a token takes eleven times as long: they wait for each other."""
    plan, predicted_s = several()
    arranged = replanner(plan, SPEEDS)
    computed = as_predicted(plan)
    took_s = 11 * predicted_s
    times = ranks(computed, took_s - computed[0])
    [line] = arranged.learn(plan, times)
    assert line == "a token took 528 ms, where 48.0 were predicted; the next plan goes by that"
    by_now, why = chosen(PLANNER)
    assert by_now.plan.devices == (LOCAL,)
    in_use = "in use, tensor on 2 devices took 528 ms a token, where 48.0 were predicted"
    assert why == f"use one device: 80.0 ms a token on this device alone; {in_use}"
    clock.now += AGE_S + 1
    assert chosen(PLANNER)[0].plan == plan  # what held them up may be over


def test_a_plan_is_left_only_where_one_device_is_better() -> None:
    plan, predicted_s = several()
    assert UsedPlans().learn(plan, predicted_s, 1.55 * predicted_s)  # 74 ms; this device alone takes 80
    assert by_use(PLANNER, best(PLANNER, "latency"))[0].plan == plan
    assert UsedPlans().learn(plan, predicted_s, 1.65 * predicted_s)  # 79 ms is not clearly better than 80
    assert by_use(PLANNER, best(PLANNER, "latency"))[0].plan.world_size == 1


def test_what_is_not_far_off_is_not_remembered() -> None:
    plan, predicted_s = several()
    assert not UsedPlans().learn(plan, predicted_s, FAR * predicted_s)
    assert UsedPlans().took_s(plan) is None
    arranged = replanner(plan, SPEEDS)
    assert arranged.far_off(plan, ranks(as_predicted(plan), 0.0)) == []
    alone = PLANNER.only_own().front(("latency",))[0][0].plan
    assert arranged.far_off(alone, ranks([1.0], 1.0)) == []  # there is no other plan to go back to


def test_it_is_of_that_model_and_of_these_devices() -> None:
    plan, predicted_s = several()
    UsedPlans().learn(plan, predicted_s, 1.0)
    assert UsedPlans().took_s(plan) == 1.0
    assert UsedPlans().took_s(replace(plan, model_digest="0" * 64)) is None
    other = Planner(
        WORK, [SPEEDS[0], replace(SPEEDS[1], device="pi:7071")], planning.linked((LOCAL, "pi:7071")), "made up", ""
    )
    assert UsedPlans().took_s(best(other, "latency").plan) is None


@pytest.mark.parametrize("value", ["long", None, -1.0, 0.0, True])
def test_what_else_is_in_the_file_counts_nothing(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = several()
    monkeypatch.setattr(Remembered, "get", lambda *_: (value, 0.0))
    assert UsedPlans().took_s(plan) is None


def test_another_plan_pays_by_what_the_running_one_takes() -> None:
    plan, predicted_s = several()
    alone = PLANNER.only_own().front(("latency",))[0][0].plan
    arranged = replanner(plan, SPEEDS)
    assert not arranged.pays(alone, plan)
    UsedPlans().learn(plan, predicted_s, 0.2)
    assert arranged.pays(alone, plan)


def test_a_busy_device_that_joins_has_to_be_worth_more() -> None:
    """Both together take 48 ms, this device alone 80: that pays, unless the other one was busy, or this one was."""
    plan, _ = several()
    alone = PLANNER.only_own().front(("latency",))[0][0].plan

    def pays(own: dict[str, object], other: dict[str, object]) -> bool:
        speeds = (replace(SPEEDS[0], **own), replace(SPEEDS[1], **other))  # type: ignore[arg-type]
        return replanner(alone, speeds).pays(plan, alone)

    assert pays({}, {})
    assert not pays({}, {"busy": True})
    assert not pays({"busy": True, "quiet_s": 5 * MS}, {})


@pytest.mark.parametrize(("quiet_s", "pays"), [(10 * MS, True), (1.5 * MS, False)])
def test_a_busy_device_is_left_only_where_it_is_slow_when_quiet(quiet_s: float, pays: bool) -> None:
    own = replace(SPEEDS[0], busy=True, quiet_s=quiet_s)
    speeds = (own, planning.device(PI, MS, half_s=0.6 * MS))
    planner = Planner(WORK, speeds, LINKS, "made up", "")
    several = planner.front(("latency",))[0][0].plan
    assert several.world_size == 2
    alone = planner.only_own().front(("latency",))[0][0].plan
    assert replanner(alone, speeds).pays(several, alone) == pays


@pytest.mark.parametrize(("disturbed", "factor"), [(False, 3.0), (True, 1.0)])
def test_a_disturbed_device_is_not_taken_to_be_slower(disturbed: bool, factor: float, tmp_path: Path) -> None:
    plan, _ = several()
    speeds = [replace(speed, key=f"key of {speed.device}") for speed in SPEEDS]
    times = ranks([3 * seconds for seconds in as_predicted(plan)], 0.0)
    Corrections(tmp_path).correct(plan, WORK, speeds, LINKS, times, disturbed=disturbed)
    own, other = (Corrections(tmp_path).applied(speed) for speed in speeds)
    assert own.corrected == pytest.approx(factor)
    assert other.corrected == pytest.approx(3.0)  # a worker's own load is not known here


def test_a_correction_leaves_the_quiet_moment(tmp_path: Path) -> None:
    busy = replace(SPEEDS[0], busy=True, quiet_s=4 * MS, key="own")
    assert Corrections(tmp_path).learn(busy, 0.5)
    by_now = Corrections(tmp_path).applied(busy)
    assert by_now.seconds == pytest.approx(5 * MS)
    assert by_now.at_best.seconds == pytest.approx(4 * MS)
