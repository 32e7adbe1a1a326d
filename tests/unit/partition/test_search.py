"""Test the search for the best placements of stages: it equals an enumeration, no result is dominated, and the limits
of a beam.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.errors import PlanError
from partition.search import bounds, labels, search
from partition.search.best import Best, Solution
from partition.search.problem import Array, Group, Problem, with_peaks
from partition.search.search import front
from partition.search.tables import Tables, rounded
from tests.support import brute_force
from tests.support.brute_force import devices, priced, small_problem
from tests.support.thorough import some

PROBLEMS = some(100, 1000)
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("quick", "cells", "first"), [(48, 30_000_000, 0), (1, 30_000_000, 1000), (1, 50, 2000)])
def test_a_thousand_small_problems_have_the_front_that_brute_force_finds(
    quick: int, cells: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With good solutions known before and without, and with bounds that count all the devices or few."""
    monkeypatch.setattr(search, "QUICK_BEAM", quick)
    monkeypatch.setattr(bounds, "MAX_CELLS", cells)
    empty = several = 0
    for seed in range(first, first + PROBLEMS):
        problem = small_problem(np.random.default_rng(seed))
        result, expected = front(problem), brute_force.front(problem)
        assert result.exact
        assert {solution.objectives: devices(problem, solution) for solution in result.solutions} == expected, seed
        empty += not expected
        several += len(expected) > 1
    assert empty > PROBLEMS / 20
    assert several > PROBLEMS / 5


@given(SEEDS)
@settings(max_examples=some(20, 60), deadline=None)
def test_a_front_is_sorted_has_nothing_dominated_and_costs_what_it_says(seed: int) -> None:
    problem = small_problem(np.random.default_rng(seed))
    result = front(problem).solutions
    assert [item.objectives for item in result] == sorted(item.objectives for item in result)
    for item in result:
        assert priced(problem, item.groups, item.cuts) == item
        used = [member for g in item.groups for member in problem.groups[g].members]
        assert len(used) == len(set(used))
        no_worse = [all(a <= b for a, b in zip(other.objectives, item.objectives, strict=True)) for other in result]
        assert sum(no_worse) == 1  # itself
    assert front(problem).solutions == result


@given(SEEDS)
@settings(max_examples=some(20, 60), deadline=None)
def test_how_devices_are_numbered_changes_no_objective(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = small_problem(rng)
    names = rng.permutation(64)
    order = rng.permutation(len(problem.groups)).tolist()
    renamed = tuple(
        replace(problem.groups[g], members=tuple(int(names[m]) for m in problem.groups[g].members)) for g in order
    )
    other = replace(problem, groups=renamed, hop=lambda a, b: problem.hop(order[a], order[b]))
    assert [solution.objectives for solution in front(other).solutions] == [
        solution.objectives for solution in front(problem).solutions
    ]


@given(SEEDS, st.integers(1, 8))
@settings(max_examples=some(20, 60), deadline=None)
def test_a_beam_finds_true_solutions_and_says_whether_there_may_be_better(seed: int, beam: int) -> None:
    problem = small_problem(np.random.default_rng(seed))
    result, best = front(problem, beam=beam), front(problem)
    for solution in result.solutions:
        assert priced(problem, solution.groups, solution.cuts) == solution
        assert any(all(a <= b for a, b in zip(b.objectives, solution.objectives, strict=True)) for b in best.solutions)
    if result.exact:
        assert [item.objectives for item in result.solutions] == [item.objectives for item in best.solutions]


@given(SEEDS, st.integers(1, 3))
@settings(max_examples=some(20, 60), deadline=None)
def test_a_run_with_few_labels_for_each_case_says_whether_it_dropped_any(seed: int, each: int) -> None:
    """Many labels belong to one case, because a device has the same bytes in every stage."""
    problem = replace(small_problem(np.random.default_rng(seed)), caps=None)
    peaks = [np.full((1, problem.n + 1, problem.n + 1), float(0 in group.members)) for group in problem.groups]
    more = with_peaks(problem, peaks, [np.zeros(1)] * len(peaks))
    tables = Tables(more)
    tables.objectives_of, tables.caps, tables.outdone = more.objectives, None, None
    cases, counts, exact = labels.cases_of(tables, [0]), list[int](), list[bool]()
    for most in (None, each):
        run = labels.Search(tables, bounds.Bounds(tables), Best(), None, cases, most)
        exact.append(run.run())
        counts.append(sum(map(len, run.labels)))
    assert exact == [True, counts[0] == counts[1]]


def pipeline(n: int, speeds: list[float], hop_s: float, microbatches: float) -> Problem:
    """Latency, and seconds a token, of layers alike on devices of these speeds; the first stage is on the first."""
    layers = np.arange(n + 1)[None, :] - np.arange(n + 1)[:, None]

    def group(device: int, speed: float) -> Group:
        stage = np.where(layers > 0, 0.1 + layers / speed, np.inf)
        return Group((device,), np.array([stage, stage]), np.array([np.inf if device else 0.0, 0.0]), np.zeros(2))

    def objectives(values: Array) -> Array:
        return np.stack([values[0], np.maximum(values[0] / microbatches, values[1])])

    hop = np.full((2, n + 1), hop_s)
    return Problem(n, 1, tuple(map(group, range(len(speeds)), speeds)), lambda a, b: hop, objectives)


def with_sums(group: Group, factor: float, **changes: Any) -> Group:
    """A group whose stages take so many times as long for one, and keep it busy for as long as before."""
    return replace(group, stage=group.stage * np.array([factor, 1.0])[:, None, None], **changes)


def test_sixteen_devices_in_a_row_come_near_the_least_that_is_possible() -> None:
    """Where each of 8 fast devices has 4 layers and each of 8 slow ones 2, all 48 are done in 2.1 s a stage."""
    problem = pipeline(48, [2.0, 1.0] * 8, 0.01, 100)
    result = front(problem, beam=40)
    assert not result.exact
    assert result.solutions[0].groups == (0,)
    assert result.solutions[-1].objectives[1] == pytest.approx(2.1)


def test_equal_devices_are_interchangeable_and_few_are_preferred() -> None:
    problem = pipeline(12, [1.0] * 6, 0.0, 1)  # one request at a time: others only add their fixed time
    [first] = front(problem).solutions
    assert first.groups == (0,)
    result = front(pipeline(12, [1.0] * 6, 0.0, 100))
    assert result.exact
    assert [len(solution.groups) for solution in result.solutions] == [1, 2, 3, 4, 6]  # five do no better than four


def test_at_most_so_many_labels_are_held_and_then_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = pipeline(24, [3.0, 1.0, 2.5, 1.5, 2.0], 0.05, 100)
    best = front(problem)
    monkeypatch.setattr(search, "QUICK_BEAM", 2)
    monkeypatch.setattr(labels, "MAX_LABELS", 5)
    result = front(problem)
    assert best.exact
    assert not result.exact
    assert result.solutions
    assert all(priced(problem, solution.groups, solution.cuts) for solution in result.solutions)


def test_known_solution_beats_what_is_equal_unless_that_has_fewer_devices() -> None:
    best = Best()
    best.add([Solution(groups=(0,), cuts=(0, 1), measures=(1.0, 2.0), objectives=(1.0, 2.0), devices=2)])
    objectives = np.array([[1.0, 1.0, 1.0, 0.5, 1.0, 1.0], [2.0, 2.0, 2.0, 3.0, 3.0, 1.5]])
    beaten = best.beats(objectives, np.array([1, 2, 3, 9, 1, 9]))
    assert beaten.tolist() == [False, True, True, False, True, False]


def test_nothing_is_possible() -> None:
    problem = pipeline(4, [1.0, 1.0], 0.1, 10)
    capped = replace(problem, caps=np.array([1.0, 1.0]))
    first_nowhere = replace(problem, groups=tuple(replace(g, enter=np.array([np.inf, 0.0])) for g in problem.groups))
    for item in (capped, first_nowhere, replace(problem, groups=())):
        assert front(item) == search.Front((), True)


def test_a_group_that_one_of_its_members_replaces_at_no_cost_is_left_out() -> None:
    problem = pipeline(4, [1.0, 1.0, 1.0], 0.1, 10)
    slower = with_sums(problem.groups[1], 2, members=(1, 2))
    faster = with_sums(problem.groups[1], 1 / 2, members=(1, 2))
    elsewhere = replace(problem.groups[1], members=(2, 3))
    groups = (*problem.groups, slower, faster, elsewhere)
    everywhere = replace(problem, groups=groups)
    assert Tables(everywhere).useful == [0, 1, 2, 4]
    near = np.zeros((2, 5))
    assert Tables(replace(everywhere, hop=lambda a, b: near if b == 3 else problem.hop(a, b))).useful == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_a_case_without_a_device_may_use_those_it_needs_beside_it() -> None:
    """Device 1 has room for nothing but a share of device 2's stages. Device 2 alone has none of its bytes."""
    problem = pipeline(2, [1.0, 1.0], 0.1, 10)
    first, second = problem.groups
    first.stage[0, :, 2] = np.inf
    second = replace(second, members=(2,))
    shared = with_sums(second, 1 / 2, members=(1, 2))
    stages = np.zeros((1, 3, 3))
    more = with_peaks(
        replace(problem, groups=(first, second, shared)), [stages, stages, stages + 8.0], [np.zeros(1)] * 3
    )
    [least] = search.Prepared(more, [1]).front(caps=np.array([np.inf, np.inf, 4.0])).solutions
    assert least.groups == (0, 1)
    assert least.objectives[-1] == 0


def test_devices_are_numbered_below_64() -> None:
    problem = pipeline(2, [1.0], 0.0, 1)
    outside = replace(problem, groups=(replace(problem.groups[0], members=(64,)),))
    with pytest.raises(PlanError, match="numbered below 64"):
        front(outside)


def test_rounding_keeps_twelve_digits_and_the_order() -> None:
    values = np.array([0.0, 1e-3, 0.1 + 0.2, 0.3, 0.3 + 1e-11, 7.0, 123456789012.0, 1e200])
    assert rounded(values).tolist() == sorted(rounded(values).tolist())
    assert rounded(values)[2] == rounded(values)[3] != rounded(values)[4]
    assert rounded(np.arange(1000.0)).tolist() == list(range(1000))
