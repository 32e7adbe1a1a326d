"""The usual way is kept unless the other is clearly and repeatedly faster, whatever bursts hit the tries."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.net.prefer import ROUNDS, Preference, fast_end, prefer
from partition.predict.hysteresis import LINK

TRIES = 3 * ROUNDS


class Ways:
    """Two ways that take a known time. The tries numbered in `hit` take longer."""

    def __init__(self, usual_s: float, other_s: float, hit: dict[int, float]) -> None:
        self.order: list[str] = []
        self.pauses: list[float] = []
        self._hit = hit
        self.ways = {"usual": usual_s, "other": other_s}

    def decide(self) -> Preference:
        return prefer(self._tries("usual"), self._tries("other"), self.pauses.append)

    def _tries(self, way: str) -> Callable[[], float]:
        def once() -> float:
            self.order.append(way)
            return self.ways[way] + self._hit.get(len(self.order) - 1, 0.0)

        return once


@given(
    usual_s=st.floats(1e-6, 0.1),
    slower=st.floats(1, 10),
    hit=st.sets(st.integers(0, TRIES - 1), max_size=TRIES // 2),
    burst_s=st.floats(1e-5, 0.5),
)
def test_bursts_never_choose_the_slower_way(
    usual_s: float, slower: float, hit: Collection[int], burst_s: float
) -> None:
    ways = Ways(usual_s, usual_s * slower, dict.fromkeys(hit, burst_s))
    result = ways.decide()
    assert not result.other
    assert len(ways.order) <= TRIES


@pytest.mark.parametrize("hit", [{*range(0, TRIES, 3)}, {*range(2, TRIES, 3)}, {0, 2}, {2, 3}, {*range(7)}])
def test_no_set_of_tries_of_the_usual_way_is_enough_to_hit(hit: set[int]) -> None:
    """The worst there is for it: bursts that hit nothing else."""
    assert not Ways(1e-4, 1.01e-4, dict.fromkeys(hit, 0.3)).decide().other


def test_the_other_way_is_taken_where_every_round_says_so() -> None:
    ways = Ways(1e-3, 0.7e-3, {})
    assert ways.decide() == Preference(True, ROUNDS, 1e-3, 0.7e-3)
    assert ways.order == [*chain(["usual", "other", "usual"] * ROUNDS)]
    assert sum(ways.pauses) > 0.5  # longer than one burst


def test_what_is_not_clear_is_not_enough() -> None:
    assert not Ways(1e-3, 1.01 / LINK * 1e-3, {}).decide().other
    assert Ways(1e-3, 0.99 / LINK * 1e-3, {}).decide().other


def test_one_round_against_it_ends_the_comparison() -> None:
    ways = Ways(1e-3, 0.5e-3, {3 * 2 + 1: 1.0})  # the other way's third try
    assert ways.decide() == Preference(False, 3, 1e-3, 0.5e-3)
    assert len(ways.pauses) == 2


def test_the_usual_way_costs_one_round() -> None:
    ways = Ways(1e-3, 2e-3, {})
    assert ways.decide().rounds == 1
    assert (ways.order, ways.pauses) == (["usual", "other", "usual"], [])


def test_the_fast_end_is_a_tenth() -> None:
    assert fast_end([float(i) for i in range(20)]) == 2.0
    assert fast_end([3.0]) == 3.0
