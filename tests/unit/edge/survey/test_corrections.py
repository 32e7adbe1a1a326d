"""Corrections of measured speeds by use, and what is remembered of a busy moment."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from edge.parallel.step_times import Figure, StepTime, StepTimes, Summary
from edge.survey import survey
from edge.survey.corrections import Corrections, measured_ratio
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.predict.hysteresis import CORRECTION
from partition.predict.predict import compute_s
from partition.predict.speeds import DeviceSpeed
from partition.search.explain import best
from partition.search.planner import Planner
from tests.support.planning import MS, device, linked, work

ZERO = Figure(0.0, 0.0, 0.0)
PI = "pi:7070"


def steps(seconds: float, *, n: int = 40, slow: int = 0) -> Summary:
    """Summarize so many steps that compute so long, `slow` of them ten times as long."""
    times = StepTimes()
    for i in range(n):
        times.add(StepTime(1, compute_s=seconds * (10 if i < slow else 1)))
    return times.summaries()["decode"]


def remembered(folder: Path, speed: DeviceSpeed) -> DeviceSpeed:
    """A speed as the next survey gives it, which finds this one in its cache."""
    return Corrections(folder).applied(replace(speed, key=f"key of {speed.device}"))


def test_figures_of_steps() -> None:
    result = steps(2 * MS, n=100, slow=30)
    assert result.compute_ms == Figure(2.0, 20.0, 2.0)
    assert Summary.from_json(result.to_json()) == result
    times = StepTimes()
    for i in range(100):
        times.add(StepTime(1, compute_s=i * MS))
    assert times.summaries()["decode"].compute_ms == Figure(49.5, 99.0, 10.0)


def test_how_far_off() -> None:
    assert measured_ratio(steps(12 * MS), 10 * MS) == pytest.approx(1.2)
    assert measured_ratio(steps(8 * MS), 10 * MS) == pytest.approx(0.8)
    assert measured_ratio(steps(10 * MS, slow=35), 10 * MS) == 1  # a busy moment: some of the steps are as predicted
    assert measured_ratio(steps(8 * MS, slow=30), 10 * MS) == 1  # nor is it faster, where most steps are not
    assert measured_ratio(steps(20 * MS, n=15), 10 * MS) == 1  # too few
    assert measured_ratio(None, 10 * MS) == measured_ratio(steps(20 * MS), None) == measured_ratio(steps(MS), 0.0) == 1


def plan(by: list[DeviceSpeed], shares: tuple[float, float]) -> Plan:
    return make_plan(work(8).limits, "m", "0" * 64, [item.device for item in by], "tensor", shares)


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_what_each_rank_computes(kind: str) -> None:
    """8 layers: this device has 3/4 of them, or of each, by weights, and the other one the rest and the head's part."""
    doing = work(8, depth=10)
    mine = device(LOCAL, 4 * MS, half_s=2.5 * MS, head_s=8 * MS, step_s=MS, token_s=1e-6)
    its = device(PI, 8 * MS, half_s=4 * MS, head_s=16 * MS, token_s=2e-6)
    built = make_plan(doing.limits, "m", "0" * 64, [LOCAL, PI], kind, (3, 1))
    result = compute_s(built, doing, {LOCAL: mine, PI: its}, linked([LOCAL, PI]))
    if kind == "pipeline":
        [first, last] = (built.slice(rank).layers for rank in range(2))
        n, m = len(first), len(last)
        assert result == pytest.approx([MS + n * (4 * MS + 1e-5), m * (8 * MS + 2e-5) + 16 * MS])
        return
    [a, b] = (built.shard(rank) for rank in range(2))
    part = 0.25 * len(a.heads) / 8 + 0.75 * len(a.ff) / 64
    mine_s = MS + 8 * (MS + 3 * MS * part + 1e-5 * len(a.heads) / 8) + 8 * MS * len(a.vocab) / 1024
    assert result[0] == pytest.approx(mine_s, rel=0.02)
    part = 0.25 * len(b.heads) / 8 + 0.75 * len(b.ff) / 64
    its_s = 8 * (8 * MS * part + 2e-5 * len(b.heads) / 8) + 16 * MS * len(b.vocab) / 1024
    assert result[1] == pytest.approx(its_s, rel=0.02)


def test_the_next_plan_is_better(tmp_path: Path) -> None:
    """The other device was measured 15 % too fast: one answer makes the shares those of its true speed."""
    doing, links = work(8), linked([LOCAL, PI])
    true = [device(LOCAL, 4 * MS), device(PI, 4.6 * MS)]
    thought = [device(LOCAL, 4 * MS), device(PI, 4 * MS)]
    speeds = [remembered(tmp_path, item) for item in thought]
    built = plan(speeds, (1, 1))
    took = compute_s(built, doing, {item.device: item for item in true}, links)
    times = [{"decode": steps(seconds or 0.0)} for seconds in took]
    [line] = Corrections(tmp_path).correct(built, doing, speeds, links, times)
    assert line.startswith(f"{PI} computed 15 % longer than it was measured to take (")
    after = [remembered(tmp_path, item) for item in thought]
    assert [item.layer_s.at(1) for item in after] == pytest.approx([4 * MS, 4.6 * MS])
    assert [item.corrected for item in after] == pytest.approx([1, 1.15])
    assert Corrections(tmp_path).correct(built, doing, after, links, times) == []  # now it is as predicted


def test_a_device_with_two_ranks_is_corrected_by_neither(tmp_path: Path) -> None:
    """They compute beside each other, so how long one takes is no speed of the device."""
    doing, links = work(8), linked([LOCAL, PI])
    speeds = [remembered(tmp_path, device(LOCAL, 4 * MS)), remembered(tmp_path, device(PI, 4 * MS))]
    built = make_plan(doing.limits, "m", "0" * 64, [LOCAL, PI, PI], "pipeline", (1, 1, 1))
    mine, *its = compute_s(built, doing, {item.device: item for item in speeds}, links)
    times = [{"decode": steps(seconds or 0.0)} for seconds in (mine, *(2 * (seconds or 0.0) for seconds in its))]
    assert Corrections(tmp_path).correct(built, doing, speeds, links, times) == []
    assert remembered(tmp_path, device(PI, 4 * MS)).corrected == 1


def test_what_is_not_clear_changes_nothing(tmp_path: Path) -> None:
    speed = remembered(tmp_path, device(PI))
    for ratio in (1.0, CORRECTION - 0.001, 1 / CORRECTION + 0.001, 0.0, 1e9):
        assert not Corrections(tmp_path).learn(speed, ratio)
    assert not Corrections(tmp_path).learn(device(PI), 1.5)  # nobody remembers it
    assert remembered(tmp_path, device(PI)).corrected == 1


def test_a_new_measurement_begins_anew(tmp_path: Path) -> None:
    assert Corrections(tmp_path).learn(remembered(tmp_path, device(PI, MS)), 1.5)
    assert remembered(tmp_path, device(PI, MS)).corrected == pytest.approx(1.5)
    assert remembered(tmp_path, device(PI, 1.4 * MS)).corrected == 1


@pytest.mark.parametrize("seed", range(8))
def test_correcting_ends(tmp_path: Path, seed: int) -> None:
    """Whatever two plans say, where the one is chosen when the other is, the factor comes to rest between them."""
    dice = random.Random(seed)
    truths, rest = [dice.uniform(0.4, 3), dice.uniform(0.4, 3)], dice.uniform(0.5, 2)
    factors = [1.0]
    for _ in range(60):
        speed = remembered(tmp_path, device(PI))
        true = truths[speed.corrected > rest]  # the plan, and so what is seen, depends on what is believed
        noise = dice.uniform(0.97, 1.03)
        Corrections(tmp_path).learn(speed, true * noise / speed.corrected)
        factors.append(remembered(tmp_path, device(PI)).corrected)
    low, high = min(truths), max(truths)
    if not 1 / CORRECTION <= truths[rest < 1.0] <= CORRECTION:
        assert low / 1.14 <= factors[-1] <= high * 1.14
    jumps = [abs(b / a - 1) for a, b in itertools.pairwise(factors)]
    assert max(jumps[30:]) < 0.12
    assert max(jumps[50:]) < 0.08


def test_a_busy_moment_is_not_kept(tmp_path: Path) -> None:
    slow, slower, quiet = (replace(device(PI, n * MS), busy=n > 1) for n in (2, 3, 1))
    assert survey.better(slow, None) is slow
    assert survey.better(quiet, slow) is quiet
    assert survey.better(slow, slower) is slow
    assert survey.better(slower, slow).layer_s.at(1) == 2 * MS
    after = replace(device(PI, 2.5 * MS), busy=False)
    assert survey.better(after, slow) is after  # it has clocked down, say: nothing disturbed it


def test_what_was_measured_while_busy_has_to_be_worth_more() -> None:
    """Two equal devices share layers with a gain of less than a fifth: that is taken where they were quiet."""
    gain = [device(LOCAL, 4 * MS, half_s=3.5 * MS), device(PI, 4 * MS, half_s=3.5 * MS)]
    kinds = []
    for busy in (False, True):
        planner = Planner(work(8), [gain[0], replace(gain[1], busy=busy)], linked([LOCAL, PI]), "m", "0" * 64)
        kinds.append(best(planner, "latency").plan.world_size)
    assert kinds == [2, 1]
