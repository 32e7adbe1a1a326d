"""Test the enumeration of clusters by their cost, each once."""

from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.errors import PlanError
from partition.search.clusters import clusters


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_each_cluster_comes_once_and_none_after_a_dearer_one(kinds: list[tuple[int, int, int]], size: int) -> None:
    costs, most = [(float(a), float(b)) for a, b, _ in kinds], [many for _, _, many in kinds]
    result = list(clusters(costs, most, size))
    assert sorted(result) == sorted(
        members
        for n in range(1, size + 1)
        for members in combinations_with_replacement(range(len(kinds)), n)
        if all(members.count(kind) <= most[kind] for kind in members)
    )
    sums = [tuple(sum(costs[kind][i] for kind in members) for i in range(2)) for members in result]
    assert sums == sorted(sums)


def test_sums_that_are_equal_but_for_rounding_are_equal() -> None:
    """0.1 + 0.2 is above 0.3: the second figure decides all the same."""
    result = list(clusters([(0.1, 1.0), (0.2, 1.0), (0.3, 5.0)], [9, 9, 9], 2))
    assert result.index((0, 1)) < result.index((2,))
    result = list(clusters([(0.1, 1.0), (0.2, 1.0), (0.3, 1.0)], [9, 9, 9], 2))
    assert result.index((2,)) < result.index((0, 1))


def test_more_kinds_than_can_be_tried_are_refused() -> None:
    with pytest.raises(PlanError, match="30 kinds form more than 1,000,000 clusters of up to 8 devices; use fewer"):
        next(clusters([(1.0,)] * 30, [1] * 30, 8))
