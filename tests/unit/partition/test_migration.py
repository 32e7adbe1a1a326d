"""The choice which request moves to another placement: never without room, never to and fro, never for a little."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.predict.hysteresis import MIGRATION
from partition.predict.migration import HEADROOM, LEAST_TOKENS, Migration, Pace, PlacementLoad, best
from tests.support.thorough import some

SLOW, FAST = PlacementLoad(4, 0.4, 0), PlacementLoad(1, 0.1, 1000)
ONE = Migration(7, 300, 100, LEAST_TOKENS, 1.5)

seconds = st.floats(1e-3, 10)
loads = st.builds(
    PlacementLoad,
    st.integers(0, 8),
    st.none() | seconds,
    st.integers(0, 2000),
    st.sampled_from((0, 0, 0, 2)),
)
migrations = st.builds(
    Migration,
    st.integers(0, 9),
    st.integers(1, 1500),
    st.integers(0, 5000),
    st.integers(0, 100),
    st.none() | st.floats(0, 100),
)


def test_saved_are_all_tokens_less_the_copy_and_a_pass() -> None:
    assert ONE.saved_s(SLOW, FAST) == pytest.approx(100 * (0.4 - 0.2) - 1.5 - 0.2)
    assert ONE.saved_s(SLOW, replace(FAST, requests=0)) == pytest.approx(100 * (0.4 - 0.1) - 1.5 - 0.1)


@pytest.mark.parametrize(
    ("move", "source", "target"),
    [
        (replace(ONE, since_move=LEAST_TOKENS - 1), SLOW, FAST),
        (replace(ONE, copy_s=None), SLOW, FAST),
        (replace(ONE, copy_s=20.0), SLOW, FAST),
        (replace(ONE, left=8), SLOW, FAST),
        (ONE, SLOW, replace(FAST, token_s=None)),
        (ONE, replace(SLOW, token_s=None), FAST),
        (ONE, SLOW, replace(FAST, waiting=1)),
        (ONE, SLOW, replace(FAST, room=300 + HEADROOM - 1)),
        (ONE, SLOW, replace(FAST, token_s=0.4 / 2 / MIGRATION)),
    ],
    ids=str,
)
def test_who_stays(move: Migration, source: PlacementLoad, target: PlacementLoad) -> None:
    assert ONE.saved_s(SLOW, FAST) > 0
    assert move.saved_s(source, target) <= 0
    assert best([move], source, target) is None


def test_who_gains_most_moves_and_the_first_of_those_that_gain_as_much() -> None:
    more = replace(ONE, number=9, left=200)
    assert best([ONE, more, replace(more, number=8), replace(ONE, number=1)], SLOW, FAST) == replace(more, number=8)


@settings(max_examples=some(300, 20_000))
@given(st.lists(migrations), loads, loads, st.floats(0, 1), st.floats(0, 1))
def test_whoever_moved_has_room_and_no_reason_to_move_back(
    several: list[Migration], source: PlacementLoad, target: PlacementLoad, slower: float, faster: float
) -> None:
    """However far a token there slows down, or here speeds up, by as many requests as there are more or fewer."""
    choice = best(several, source, target)
    if choice is None:
        return
    assert target.room >= choice.n_tokens + HEADROOM
    assert not target.waiting
    assert choice.since_move >= LEAST_TOKENS
    assert source.token_s is not None
    assert target.token_s is not None
    assert target.next_token_s is not None
    left = max(0, source.requests - 1)
    least_s = source.token_s * (left / max(1, source.requests) if left else 1)
    there = PlacementLoad(target.requests + 1, target.token_s + slower * (target.next_token_s - target.token_s))
    here = PlacementLoad(left, least_s + faster * (source.token_s - least_s), 10_000)
    again = replace(choice, since_move=LEAST_TOKENS, copy_s=0.0, left=10_000)
    assert best([again], there, here) is None


def test_a_pace_is_the_median_of_some_gaps() -> None:
    pace = Pace()
    for gap_s in (0.1, 0.2, 9.0):
        pace.add(gap_s)
        assert pace.token_s is None
    pace.add(0.2)
    assert pace.token_s == pytest.approx(0.2)
    pace.clear()
    assert pace.token_s is None
