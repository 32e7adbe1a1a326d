"""Test the choice of an allreduce: the formulas equal sums by hand, and the cheapest algorithm is chosen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.choice import ALGORITHMS, Algorithm, choose, seconds

FAST = 1e15  # bytes/s: only latency counts

SIZES = st.integers(1, 1 << 22).map(lambda n: 4 * n)
RANKS = st.integers(2, 16)
LATENCIES = st.floats(1e-6, 1.0)
BANDWIDTHS = st.floats(1e4, 1e11)


@pytest.mark.parametrize(("algorithm", "hops"), [("star", 2), ("mesh", 1), ("split", 2)])
def test_a_single_number_costs_latency_alone(algorithm: Algorithm, hops: int) -> None:
    assert seconds(algorithm, 4, 4, 8, 0.001, FAST) == pytest.approx(hops * 0.001)


def test_bytes_by_hand() -> None:
    """32 KiB, as a quarter of that on the wire, 4 ranks, 1 ms, 1 MB/s: w/B = 8.192 ms, S/B = 32.768 ms."""
    d, small, full = 0.001, 0.008192, 0.032768
    assert seconds("star", 32768, 8192, 4, d, 1e6) == pytest.approx(2 * d + 3 * (small + full))
    assert seconds("mesh", 32768, 8192, 4, d, 1e6) == pytest.approx(d + 3 * small)
    assert seconds("split", 32768, 8192, 4, d, 1e6) == pytest.approx(2 * d + 3 / 4 * (small + full))


@given(SIZES, RANKS, LATENCIES, BANDWIDTHS, st.sampled_from((1.0, 0.5, 0.27)))
def test_the_cheapest_is_chosen_of_all(n: int, ranks: int, latency_s: float, bandwidth: float, wire: float) -> None:
    result = choose(n, int(n * wire), ranks, latency_s, bandwidth)
    assert set(result.seconds) == set(ALGORITHMS)
    for algorithm in ALGORITHMS:
        assert result.seconds[algorithm] == seconds(algorithm, n, int(n * wire), ranks, latency_s, bandwidth)
        assert result.seconds[result.algorithm] <= result.seconds[algorithm]
        assert result.seconds[algorithm] > 0
    assert choose(n, int(n * wire), ranks, latency_s, bandwidth) == result  # every rank comes to the same


@given(SIZES, RANKS, LATENCIES, BANDWIDTHS, st.floats(1, 100), st.sampled_from(ALGORITHMS))
def test_more_of_anything_costs_no_less(
    n: int, ranks: int, latency_s: float, bandwidth: float, more: float, algorithm: Algorithm
) -> None:
    cost = seconds(algorithm, n, n, ranks, latency_s, bandwidth)
    slack = 1 - 1e-9
    assert seconds(algorithm, n, n, ranks, latency_s * more, bandwidth) >= cost * slack
    assert seconds(algorithm, n, n, ranks, latency_s, bandwidth / more) >= cost * slack
    assert seconds(algorithm, n, n, ranks + 1, latency_s, bandwidth) >= cost * slack
    assert seconds(algorithm, 2 * n, 2 * n, ranks, latency_s, bandwidth) >= cost * slack
    assert seconds(algorithm, n, n // 2, ranks, latency_s, bandwidth) <= cost / slack


def test_of_equals_the_one_with_fewer_messages() -> None:
    assert choose(4, 4, 2, 0.0, FAST).algorithm in ("mesh", "split", "star")
    for ranks in range(2, 9):
        assert choose(8192, 8192, ranks, 0.01, FAST).algorithm == "mesh"  # one hop, and everything else is free
