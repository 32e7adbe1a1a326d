"""Where ranks stand: steps and hidden states reach every rank exactly once, from a rank that has them."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import EdgeError
from edge.parallel.topology import Topology, place
from partition.plan.plan import MAX_WORLD_SIZE

STAGES = st.lists(st.integers(1, 8), min_size=1, max_size=8)


def places(stages: list[int]) -> list[Topology]:
    return [place(rank, stages) for rank in range(sum(stages))]


@given(STAGES)
def test_every_rank_has_one_source_and_its_source_knows(stages: list[int]) -> None:
    found = places(stages)
    for one in found:
        assert (one.source is None) == (one.rank == 0)
        for peer in (*one.mates, *one.feeds):
            assert found[peer].source == one.rank
    reported = sorted(peer for one in found for peer in (*one.mates, *one.feeds))
    assert reported == list(range(1, sum(stages)))


@given(STAGES)
def test_stages_are_groups_in_order(stages: list[int]) -> None:
    found = places(stages)
    starts = list(accumulate(stages, initial=0))
    for one in found:
        assert one.group == tuple(range(starts[one.stage], starts[one.stage + 1]))
        assert one.rank in one.group
        assert one.n_stages == len(stages)
        assert one.last == (one.stage == len(stages) - 1)
        assert one.heads == found[-1].group
        # What it passes on it has: hidden states of its own stage go to the next one.
        assert all(found[peer].stage == one.stage + 1 for peer in one.feeds)
        assert all(found[peer].stage == 0 for peer in one.mates)


@given(STAGES)
def test_a_stage_shares_out_what_it_sends(stages: list[int]) -> None:
    """No rank sends to two of the next stage where another sends to none."""
    for one in places(stages):
        if not one.last:
            mates = [len(place(rank, stages).feeds) for rank in one.group]
            assert max(mates) - min(mates) <= 1


@pytest.mark.parametrize(
    ("rank", "stages"),
    [(0, []), (2, [1, 1]), (0, [0, 1]), (0, [-1, 3]), (-1, [2]), (0, [MAX_WORLD_SIZE + 2]), (5, [64, 2])],
)
def test_ranks_that_are_none(rank: int, stages: list[int]) -> None:
    with pytest.raises(EdgeError, match=f"rank {rank} is none of {len(stages)} stages with {sum(stages)} ranks"):
        place(rank, stages)


def test_two_stages_of_two() -> None:
    first, second, third, fourth = places([2, 2])
    assert (first.mates, first.feeds, second.feeds) == ((1,), (2,), (3,))
    assert (third.source, fourth.source) == (0, 1)
