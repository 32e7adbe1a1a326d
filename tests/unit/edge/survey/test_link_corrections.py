"""Corrections of measured links by use: where tokens take longer than computing and links explain, links are
corrected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge.parallel.step_times import StepTime, StepTimes, Summary
from edge.survey.link_corrections import LinkCorrections
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.predict.hysteresis import PLAN_OFF
from partition.predict.predict import compute_s, predict
from partition.predict.speeds import Links, LinkSpeed
from tests.support.planning import MS, device, linked, work

A, B = "a:1", "b:1"
DOING = work(8)
SPEEDS = [device(LOCAL, MS), device(A, MS), device(B, MS)]
BY = {speed.device: speed for speed in SPEEDS}
SLOW = LinkSpeed(2 * MS, 1e5)  # 5 ms for a row of 512 bytes


def plan(*devices: str, kind: str = "pipeline", shares: tuple[float, ...] | None = None) -> Plan:
    return make_plan(DOING.limits, "m", "0" * 64, devices, kind, shares)


def measured(folder: Path) -> Links:
    """Links as the next survey gives them, which finds these in its cache."""
    return LinkCorrections(folder).applied(linked([LOCAL, A, B], SLOW))


def times(built: Plan, links: Links, *, compute: float = 1.0, n: int = 40) -> list[dict[str, Summary]]:
    """Steps of each rank that take what is true of the links, and so many times what is predicted of its computing."""
    own_s = [item or 0.0 for item in compute_s(built, DOING, BY, links)]
    ranks = iter(own_s)
    stages_s = [max(next(ranks) for _ in stage.shards) for stage in built.stages]
    token_s = predict(built, DOING, BY, links).latency_s + (compute - 1) * sum(stages_s)
    results = []
    for seconds in own_s:
        record = StepTimes()
        for _ in range(n):
            record.add(StepTime(1, compute * seconds, token_s - compute * seconds))
        results.append(record.summaries())
    return results


def scaled(times_: float, *ends: str) -> Links:
    """The links, of which those between these devices are so many times as slow."""
    slower = LinkSpeed(times_ * SLOW.latency_s, SLOW.bytes_per_s / times_)
    between = linked([LOCAL, A, B], SLOW).between
    return Links({pair: slower if set(pair) <= set(ends) else link for pair, link in between.items()})


@pytest.mark.parametrize(("kind", "shares"), [("pipeline", (1, 1)), ("tensor", (1, 1)), ("pipeline", (0, 1))])
@pytest.mark.parametrize("slower", [3.0, 0.3])
def test_the_next_prediction_is_what_a_token_took(
    tmp_path: Path, kind: str, shares: tuple[float, float], slower: float
) -> None:
    built, true = plan(LOCAL, A, kind=kind, shares=shares), scaled(slower, LOCAL, A)
    took = times(built, true)
    [line] = LinkCorrections(tmp_path).correct(built, DOING, SPEEDS, measured(tmp_path), took)
    assert line.startswith("communication took ")
    after = measured(tmp_path)
    wanted_s = predict(built, DOING, BY, true).latency_s
    assert predict(built, DOING, BY, after).latency_s == pytest.approx(wanted_s, rel=1e-3)
    assert after.get(LOCAL, A).corrected == pytest.approx(slower, rel=1e-3)
    for ends in ((LOCAL, B), (A, B), (B, A)):
        assert after.get(*ends) == SLOW  # no token took them
    assert LinkCorrections(tmp_path).correct(built, DOING, SPEEDS, after, took) == []  # it is as predicted now


def test_only_ways_that_a_token_takes_are_corrected(tmp_path: Path) -> None:
    built = plan(LOCAL, A, B)
    assert LinkCorrections(tmp_path).correct(
        built, DOING, SPEEDS, measured(tmp_path), times(built, scaled(2, LOCAL, A, B))
    )
    corrected = {ends for ends, link in measured(tmp_path).between.items() if link.corrected != 1}
    assert corrected == {(LOCAL, A), (A, B), (B, LOCAL)}


def test_slow_devices_are_not_taken_for_slow_links(tmp_path: Path) -> None:
    built = plan(LOCAL, A)
    took = times(built, measured(tmp_path), compute=2.0)
    assert LinkCorrections(tmp_path).correct(built, DOING, SPEEDS, measured(tmp_path), took) == []


def test_what_is_not_clear_changes_nothing(tmp_path: Path) -> None:
    """A token 15 % longer is the least."""
    built, links = plan(LOCAL, A), measured(tmp_path)
    total_s = predict(built, DOING, BY, links).latency_s
    apart_s = total_s - sum(item or 0.0 for item in compute_s(built, DOING, BY, links))
    for share, count in ((PLAN_OFF - 0.005, 0), (PLAN_OFF + 0.005, 1)):
        slower = 1 + (share - 1) * total_s / apart_s
        took = times(built, scaled(slower, LOCAL, A))
        assert len(LinkCorrections(tmp_path / str(count)).correct(built, DOING, SPEEDS, links, took)) == count
    slow = times(built, scaled(9, LOCAL, A))
    assert LinkCorrections(tmp_path).correct(built, DOING, SPEEDS, links, slow, disturbed=True) == []
    few = times(built, scaled(9, LOCAL, A), n=15)
    assert LinkCorrections(tmp_path).correct(built, DOING, SPEEDS, links, few) == []
    assert LinkCorrections(tmp_path).correct(plan(LOCAL), DOING, SPEEDS, links, few[:1]) == []
    assert not LinkCorrections(tmp_path).learn((LOCAL, A), SLOW, 1e6)


def test_a_new_measurement_begins_anew_and_answers_lead_to_a_mean(tmp_path: Path) -> None:
    for ratio in (4.0, 1.0):
        link = measured(tmp_path).get(LOCAL, A)
        assert LinkCorrections(tmp_path).learn((LOCAL, A), link, ratio / link.corrected)
    assert measured(tmp_path).get(LOCAL, A).corrected == pytest.approx(2)
    again = LinkCorrections(tmp_path).applied(linked([LOCAL, A], replace(SLOW, latency_s=3 * MS)))
    assert again.get(LOCAL, A).corrected == 1
    guessed = LinkCorrections(tmp_path).applied(linked([LOCAL, A], replace(SLOW, estimate=True)))
    assert guessed.get(LOCAL, A).corrected == 1
