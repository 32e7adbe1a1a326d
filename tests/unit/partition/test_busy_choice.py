"""Test plans that are chosen from figures of busy devices: never clearly slower than this device alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.plan.plan import LOCAL
from partition.predict.hysteresis import (
    BUSY_PLAN,
    MOST_SLOWED,
    PLAN,
    clearly_better,
    clearly_faster,
    clearly_off,
    lower_bound_factor,
    plan_threshold,
)
from partition.predict.predict import predict
from partition.predict.speeds import DeviceSpeed, Links, LinkSpeed
from partition.search.explain import best, reason
from partition.search.planner import Placed, Planner
from tests.support.planning import MS, best_of, device, linked, work

A, B = "a:1", "b:1"
NAMES = (LOCAL, A, B)
WORK = work(6)
OBJECTIVES = ("latency", "throughput", "ttft")


@dataclass(frozen=True)
class Survey:
    """Devices as they are, and as they were measured."""

    true: list[DeviceSpeed]
    measured: list[DeviceSpeed]
    links: Links


@st.composite
def surveys(draw: st.DrawFn) -> Survey:
    """Three devices of any speed. Each was measured in a quiet moment, or in one that made it slower: this device by
    MOST_SLOWED at most.
    """
    factor = st.floats(1, MOST_SLOWED)
    true, measured = [], []
    for name in NAMES:
        layer_s = draw(st.floats(0.2, 20)) * MS
        half_s = draw(st.floats(0.5, 0.9)) * layer_s
        quiet = device(
            name, layer_s, half_s=half_s, head_s=draw(st.floats(0, 5)) * MS, step_s=draw(st.floats(0, 1)) * MS
        )
        slowed = 1.0 if draw(st.booleans()) else draw(factor if name == LOCAL else st.floats(1, 12))
        true.append(quiet)
        measured.append(replace(quiet.times(slowed), busy=slowed > 1))
    way = LinkSpeed(draw(st.floats(0, 2)) * MS, draw(st.floats(1e6, 1e10)))
    return Survey(true, measured, linked(NAMES, way))


def took(survey: Survey, placed: Placed, objective: str) -> float:
    """Return what a plan takes on the devices as they are."""
    total = {speed.device: speed for speed in survey.true}
    predicted = predict(placed.plan, WORK, total, survey.links, placed.microbatches)
    seconds = {"latency": predicted.latency_s, "throughput": 1 / predicted.throughput_per_s, "ttft": predicted.ttft_s}
    return float(seconds[objective] or 0.0)


def check_never_slower(survey: Survey, objective: str) -> None:
    planner = Planner(WORK, survey.measured, survey.links, "m", "")
    chosen = best(planner, objective)
    alone = planner.only_own().front((objective,))[0][0]
    slower = took(survey, chosen, objective) / took(survey, alone, objective)
    assert slower <= (1.0 if chosen.plan.world_size == 1 else 1 / PLAN) * (1 + 1e-9)
    if chosen.plan.world_size > 1 and any(s.busy for s in survey.measured if s.device in chosen.plan.devices):
        assert slower <= 1 / BUSY_PLAN * (1 + 1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(surveys())
def test_never_slower_than_one_device_that_was_slowed_within_the_bound(objective: str, survey: Survey) -> None:
    check_never_slower(survey, objective)


@given(surveys())
def test_the_reason_names_who_was_busy(survey: Survey) -> None:
    planner = Planner(WORK, survey.measured, survey.links, "m", "")
    busy = [speed.name for speed in survey.measured if speed.busy]
    why = best_of(planner)[1]
    assert ("; measured while busy: " + ", ".join(busy) in why) == bool(busy)


def planner(*speeds: DeviceSpeed) -> Planner:
    return Planner(WORK, speeds, linked([speed.device for speed in speeds]), "m", "")


@pytest.mark.parametrize(("busy", "devices"), [(True, 1), (False, 2)])
def test_a_busy_device_may_be_faster_than_it_was_measured(busy: bool, devices: int) -> None:
    """This device is measured to take 10 ms a layer, another one 6 ms in a quiet moment."""
    own = replace(device(LOCAL, 10 * MS), busy=busy)
    assert best(planner(own, device(A, 6 * MS)), "latency").plan.world_size == devices


def test_a_busy_worker_is_left_out_before_all_are() -> None:
    """With A the gain is a third; B was busy, and what it would add is not believed."""
    speeds = [device(name, MS, half_s=0.7 * MS) for name in NAMES]
    speeds[2] = replace(speeds[2], busy=True)
    several = best(planner(*speeds), "latency").plan
    assert set(several.devices) == {LOCAL, A}
    assert set(best(planner(*speeds[:2], replace(speeds[2], busy=False)), "latency").plan.devices) == set(NAMES)


def test_what_does_not_fit_here_is_spread_all_the_same() -> None:
    small = replace(device(LOCAL, 10 * MS), busy=True, memory_bytes=30 << 20)
    built = planner(small, replace(device(A, MS), busy=True))
    placed = best(built, "latency")
    assert placed.plan.world_size == 2
    assert reason(built, placed, "latency").endswith(f"; measured while busy: {LOCAL}, {A}")


def test_how_much_less_it_may_take() -> None:
    assert lower_bound_factor(False) == 1.0
    assert lower_bound_factor(True) == 1 / MOST_SLOWED


def test_what_is_clear() -> None:
    assert clearly_better(1.0, 1.21, by=1.2)
    assert not clearly_better(1.0, 1.19, by=1.2)
    assert not clearly_better(1.0, 1.0, by=1.0)
    assert clearly_faster(1.21, 1.0, by=1.2)
    assert not clearly_faster(1.19, 1.0, by=1.2)
    assert [value for value in (0.79, 0.81, 1.0, 1.24, 1.26) if clearly_off(value, 1.0, by=1.25)] == [0.79, 1.26]
    assert (plan_threshold(False), plan_threshold(True)) == (PLAN, BUSY_PLAN)
    assert [plan_threshold(busy, least) for busy, least in ((False, 1.1), (True, 1.1), (True, 3.0))] == [
        1.1,
        BUSY_PLAN,
        3.0,
    ]


def test_factors_apply_to_the_quiet_moment_too() -> None:
    """As a cluster file's speed does; a GPU that is said to be twice as fast is so when it is quiet, too."""
    own = replace(device(LOCAL, 10 * MS), busy=True)
    assert own.at_best.seconds == pytest.approx(10 * MS / MOST_SLOWED)
    assert own.times(0.5).at_best.seconds == pytest.approx(5 * MS / MOST_SLOWED)
    assert device(LOCAL, 10 * MS).at_best.seconds == 10 * MS
