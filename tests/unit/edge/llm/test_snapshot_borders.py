"""Test the positions of a prompt that get snapshots, and the snapshots that stay in memory."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge.llm.snapshots import LAST_TOKENS, SnapshotCache, borders


def test_borders_of_some() -> None:
    assert borders(31, 8) == borders(32, 8) == borders(39, 8) == []
    assert borders(40, 8) == [8]
    assert borders(1050, 8) == [24, 536, 792, 920, 984, 1016]


@given(st.integers(1, 100_000), st.integers(1, 16), st.integers(0, 100_000))
def test_a_prompt_that_differs_at_its_end_computes_little_more(n_tokens: int, block: int, differs: int) -> None:
    result = borders(n_tokens, block)
    assert result == sorted(set(result))
    assert all(0 < at < n_tokens and at % block == 0 for at in result)
    shared = max(0, n_tokens - differs)
    last = max((at for at in result if at <= shared), default=0)
    assert n_tokens - last <= max(LAST_TOKENS, 2 * differs) + block


def test_those_unused_for_longest_are_dropped() -> None:
    cache, snapshot = SnapshotCache(2 * (100 + 256)), np.zeros(100, np.uint8)
    for name in (b"a", b"b"):
        cache.put(name, snapshot)
    assert cache.get(b"a") is snapshot
    cache.put(b"c", snapshot)
    assert (b"a" in cache, b"b" in cache, b"c" in cache) == (True, False, True)
    assert cache.n_bytes == 2 * (100 + 256)
    cache.put(b"d", np.zeros(1000, np.uint8))  # larger than all may be
    assert (b"d" in cache, cache.get(b"d"), cache.n_bytes) == (False, None, 2 * (100 + 256))
