"""Test the positions of ranks: steps and hidden states reach every rank exactly once, from a rank that has them."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import EdgeError
from edge.parallel.topology import Topology, place, world_size
from partition.plan.plan import MAX_WORLD_SIZE

COMPUTING = st.lists(st.integers(1, 8), min_size=1, max_size=7)
STAGES = COMPUTING | COMPUTING.map(lambda stages: [0, *stages])  # also with a thin owner


def places(stages: list[int]) -> list[Topology]:
    return [place(rank, stages) for rank in range(world_size(stages))]


@given(STAGES)
def test_every_rank_has_one_source_and_its_source_knows(stages: list[int]) -> None:
    result = places(stages)
    for item in result:
        assert (item.source is None) == (item.rank == 0)
        for peer in (*item.peers, *item.feeds):
            assert result[peer].source == item.rank
    reported = sorted(peer for entry in result for peer in (*entry.peers, *entry.feeds))
    assert reported == list(range(1, world_size(stages)))


@given(STAGES)
def test_stages_are_groups_in_order(stages: list[int]) -> None:
    result = places(stages)
    thin = stages[0] == 0
    assert [item.thin for item in result] == [thin, *(len(result) - 1) * [False]]
    starts = list(accumulate(stages[thin:], initial=int(thin)))
    for item in result[thin:]:
        assert item.group == tuple(range(starts[item.stage], starts[item.stage + 1]))
        assert item.rank in item.group
        assert item.n_stages == len(stages) - thin
        assert item.last == (item.stage == item.n_stages - 1)
        assert item.heads == result[-1].group
        # What it passes on it has: hidden states of its own stage go to the next one.
        assert all(result[peer].stage == item.stage + 1 for peer in item.feeds)
        assert all(result[peer].stage == 0 for peer in item.peers)


@given(STAGES)
def test_a_stage_shares_out_what_it_sends(stages: list[int]) -> None:
    """No rank sends to two of the next stage where another sends to none."""
    for item in places(stages):
        if not item.last and not item.thin:
            peers = [len(place(rank, stages).feeds) for rank in item.group]
            assert max(peers) - min(peers) <= 1


@pytest.mark.parametrize(
    ("rank", "stages"),
    [
        (0, []),
        (0, [0]),
        (2, [0, 1]),
        (2, [1, 1]),
        (0, [0, 0, 1]),
        (0, [1, 0]),
        (0, [-1, 3]),
        (-1, [2]),
        (0, [MAX_WORLD_SIZE + 2]),
        (5, [64, 2]),
    ],
)
def test_ranks_that_are_none(rank: int, stages: list[int]) -> None:
    with pytest.raises(
        EdgeError, match=f"rank {rank} does not exist in {len(stages)} stages with {world_size(stages)} ranks"
    ):
        place(rank, stages)


def test_a_thin_owner_sends_hidden_states_to_the_whole_first_stage() -> None:
    owner, first, second, last = places([0, 2, 1])
    assert (owner.group, owner.peers, owner.feeds, owner.heads) == ((0,), (1, 2), (), (3,))
    assert not owner.last
    assert (first.source, second.source, last.source) == (0, 0, 1)
    assert (first.stage, second.stage, last.stage) == (0, 0, 1)


def test_two_stages_of_two() -> None:
    first, second, third, fourth = places([2, 2])
    assert (first.peers, first.feeds, second.feeds) == ((1,), (2,), (3,))
    assert (third.source, fourth.source) == (0, 1)
