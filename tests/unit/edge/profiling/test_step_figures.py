"""Test the figures of steps, the predicted work of ranks, and measurements at a busy moment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge.parallel.step_times import Figure, StepTime, StepTimes, Summary
from edge.profiling import survey
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.predict.predict import compute_s
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


def test_figures_of_steps() -> None:
    result = steps(2 * MS, n=100, slow=30)
    assert result.compute_ms == Figure(2.0, 20.0, 2.0)
    assert Summary.from_json(result.to_json()) == result
    times = StepTimes()
    for i in range(100):
        times.add(StepTime(1, compute_s=i * MS))
    assert times.summaries()["decode"].compute_ms == Figure(49.5, 99.0, 10.0)


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
