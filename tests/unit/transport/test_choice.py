"""Which allreduce: the formulas by hand, and that the cheapest is chosen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.choice import ALGORITHMS, RING_CHUNK_BYTES, RING_WINDOW, Algorithm, choose, ring_chunks, seconds

FAST = 1e15  # bytes/s: only latency counts
MBIT_100 = 100e6 / 8

SIZES = st.integers(1, 1 << 22).map(lambda n: 4 * n)
RANKS = st.integers(2, 16)
LATENCIES = st.floats(1e-6, 1.0)
BANDWIDTHS = st.floats(1e4, 1e11)


@pytest.mark.parametrize(("algorithm", "hops"), [("star", 2), ("mesh", 1), ("split", 2), ("ring", 14)])
def test_a_single_number_costs_latency_alone(algorithm: Algorithm, hops: int) -> None:
    assert seconds(algorithm, 4, 4, 8, 0.001, FAST) == pytest.approx(hops * 0.001)


def test_bytes_by_hand() -> None:
    """32 KiB, as a quarter of that on the wire, 4 ranks, 1 ms, 1 MB/s: w/B = 8.192 ms, S/B = 32.768 ms."""
    d, small, full = 0.001, 0.008192, 0.032768
    assert seconds("star", 32768, 8192, 4, d, 1e6) == pytest.approx(2 * d + 3 * (small + full))
    assert seconds("mesh", 32768, 8192, 4, d, 1e6) == pytest.approx(d + 3 * small)
    assert seconds("split", 32768, 8192, 4, d, 1e6) == pytest.approx(2 * d + 3 / 4 * (small + full))
    chunks = 8  # 2 x 4 ranks; 4 would be enough for chunks of 8 KiB
    s = full / chunks
    assert ring_chunks(32768, 4) == chunks
    assert seconds("ring", 32768, 8192, 4, d, 1e6) == pytest.approx(6 * (d + s) + 2 * (chunks - 1) * s)


def test_chunks_of_the_ring() -> None:
    assert ring_chunks(0, 8) == 1
    assert ring_chunks(4, 8) == 1
    assert ring_chunks(1024, 8) == 2  # pieces below 128 floats are not worth a frame
    assert ring_chunks(16384, 8) == 16
    assert ring_chunks(RING_CHUNK_BYTES * 100, 8) == 100
    assert ring_chunks(RING_CHUNK_BYTES * 100 + 4, 8) == 101


def test_the_window_bounds_a_ring_of_great_latency() -> None:
    """16 of 100 chunks are under way at a time; the next 16 go out when the first sum came round, 4 hops later."""
    n_bytes = RING_CHUNK_BYTES * 100
    assert RING_WINDOW == 16
    assert seconds("ring", n_bytes, n_bytes, 4, 0.5, FAST) == pytest.approx((2 * 3 + 6 * 4) * 0.5)


def ring_minus_star(latency_s: float) -> float:
    ring, star = (seconds(a, 32768, 32768, 8, latency_s, MBIT_100) for a in ("ring", "star"))
    return ring - star


def test_ring_against_star_at_100_mbit() -> None:
    """8 ranks, 32 KiB: the star's rank 0 moves 14 tensors, the ring takes 14 hops. They cross at about 2.7 ms."""
    assert ring_minus_star(0.001) < 0 < ring_minus_star(0.005)
    low, high = 0.001, 0.005
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ring_minus_star(middle) < 0 else (low, middle)
    assert low == pytest.approx(0.0027, rel=0.15)


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
    assert seconds(algorithm, n, n, ranks + 1, latency_s, bandwidth) >= cost * slack or algorithm == "ring"
    if algorithm != "ring":  # another size is another number of chunks
        assert seconds(algorithm, 2 * n, 2 * n, ranks, latency_s, bandwidth) >= cost * slack
        assert seconds(algorithm, n, n // 2, ranks, latency_s, bandwidth) <= cost / slack


@given(SIZES, RANKS, LATENCIES, BANDWIDTHS)
def test_a_ring_of_twice_the_bytes_costs_more(n: int, ranks: int, latency_s: float, bandwidth: float) -> None:
    if n >= 2 * ranks * RING_CHUNK_BYTES:
        once, twice = (seconds("ring", k * n, k * n, ranks, latency_s, bandwidth) for k in (1, 2))
        assert twice > once


def test_of_equals_the_one_with_fewer_messages() -> None:
    assert choose(4, 4, 2, 0.0, FAST).algorithm in ("mesh", "split", "star")
    for ranks in range(2, 9):
        assert choose(8192, 8192, ranks, 0.01, FAST).algorithm == "mesh"  # one hop, and everything else is free
