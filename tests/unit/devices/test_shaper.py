"""Test the times at which packets arrive over a shaped line: the laws of any line, for any packets."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.lab.shaper import JUMBO_MTU, LEAST_QUEUE_BYTES, USUAL_MTU, Port, Shape, Shaper

SLACK_S = 1e-9  # of sums in floating point
seconds = st.floats(0, 5)
shapes = st.builds(Shape, seconds, seconds, st.none() | st.floats(1e3, 1e9), st.just(0.0) | st.floats(0, 0.5))
# Packets by the time since the one before and their size.
packets = st.lists(st.tuples(st.floats(0, 0.5), st.integers(20, 65520)), max_size=60)


def sent(shape: Shape, gaps: list[tuple[float, int]], seed: int = 0) -> list[tuple[float, int, float | None]]:
    """(sent, bytes, arrived or None) of every packet."""
    line, now, results = Shaper(shape, seed), 1000.0, []
    for gap, n_bytes in gaps:
        now += gap
        results.append((now, n_bytes, line.arrival(now, n_bytes)))
    return results


@given(shapes, packets, st.integers(0, 9))
def test_the_order_stays_and_nothing_is_early(shape: Shape, gaps: list[tuple[float, int]], seed: int) -> None:
    before = 0.0
    for at, n_bytes, arrived in sent(shape, gaps, seed):
        if arrived is not None:
            wire_s = n_bytes / shape.bytes_per_s if shape.bytes_per_s else 0.0
            assert arrived >= at + wire_s + shape.delay_s - SLACK_S
            assert arrived >= before
            before = arrived


@given(shapes, packets)
def test_the_bandwidth_is_never_exceeded(shape: Shape, gaps: list[tuple[float, int]]) -> None:
    even = Shape(shape.delay_s, 0.0, shape.bytes_per_s or 1e6, shape.loss)  # jitter may bunch what is on its way
    arrived = [(when, n_bytes) for _, n_bytes, when in sent(even, gaps) if when is not None]
    rate = even.bytes_per_s or 0.0
    for i, (first, _) in enumerate(arrived):
        total = 0
        for when, n_bytes in arrived[i + 1 :]:
            total += n_bytes
            assert total <= rate * (when - first) * (1 + 1e-9) + rate * SLACK_S + 1


@given(shapes, packets)
def test_the_wait_is_bounded_by_the_queue(shape: Shape, gaps: list[tuple[float, int]]) -> None:
    for at, _, arrived in sent(shape, gaps):
        if arrived is not None:
            queue_s = shape.queue_bytes() / shape.bytes_per_s if shape.bytes_per_s else 0.0
            assert arrived <= at + queue_s + shape.delay_s + shape.jitter_s + SLACK_S


@given(packets)
def test_a_line_without_limits_passes_everything_at_once(gaps: list[tuple[float, int]]) -> None:
    assert all(arrived == at for at, _, arrived in sent(Shape(), gaps))


def test_a_full_queue_drops_and_takes_again_when_it_is_emptier() -> None:
    shape = Shape(bytes_per_s=100_000)
    arrived = [when for _, _, when in sent(shape, [(0.0, 1000)] * 200)]
    assert arrived[LEAST_QUEUE_BYTES // 1000] is None
    assert sum(when is not None for when in arrived) == LEAST_QUEUE_BYTES // 1000
    line = Shaper(shape)
    while line.arrival(0.0, 1000) is not None:
        pass
    assert line.arrival(0.02, 1000) is not None


def test_losses_are_as_many_as_asked_for_and_the_same_again() -> None:
    shape = Shape(loss=0.1)
    arrived = [when for _, _, when in sent(shape, [(0.001, 100)] * 5000, seed=3)]
    assert 400 < sum(when is None for when in arrived) < 600
    assert arrived == [when for _, _, when in sent(shape, [(0.001, 100)] * 5000, seed=3)]


def test_jitter_is_spread_over_its_range() -> None:
    waits = [arrived - at for at, _, arrived in sent(Shape(delay_s=0.01, jitter_s=0.004), [(1, 100)] * 1000) if arrived]
    assert 0.01 <= min(waits) < 0.0101
    assert 0.0139 < max(waits) <= 0.014 + SLACK_S


def test_packets_take_little_time_each() -> None:
    assert Shape().mtu() == Shape(delay_s=1.0).mtu() == JUMBO_MTU
    assert Shape(loss=0.01).mtu() == Shape(bytes_per_s=625_000 / 10).mtu() == USUAL_MTU
    assert Shape(bytes_per_s=1_000_000).mtu() == 5000
    assert math.isinf(Shape(delay_s=1.0).queue_bytes())


def test_packets_of_all_links_pass_a_port_one_after_the_other() -> None:
    out, into = Port(1000.0), Port(1000.0)
    assert [out.send(at, 100) for at in (0.0, 0.0, 0.5)] == pytest.approx([0.0, 0.1, 0.5])
    # What comes alone is there when its link brings it; what comes at the same time takes its own time after it.
    assert [into.receive(at, 100) for at in (1.0, 1.0, 1.15, 5.0)] == pytest.approx([1.0, 1.1, 1.2, 5.0])


def test_a_port_that_is_full_drops_and_takes_again_later() -> None:
    port, n_bytes = Port(1e6), 64 << 10
    sent_bytes = 0
    while port.send(0.0, n_bytes) is not None:
        sent_bytes += n_bytes
    assert Shape(bytes_per_s=1e6).queue_bytes() - n_bytes < sent_bytes <= Shape(bytes_per_s=1e6).queue_bytes()
    assert port.send(0.1, n_bytes) is not None
