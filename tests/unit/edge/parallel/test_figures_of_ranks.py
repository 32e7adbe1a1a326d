"""Test the figures of ranks and layers with a simulated clock: known steps give known figures."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from apps.show import step_table
from edge.parallel import shard
from edge.parallel.busy import ComputeClock
from edge.parallel.shard import Shard
from edge.parallel.step_times import Figure, StepTime, StepTimes
from edge.profiling.layer_times import DEPTH, LayerTimes, _chunk_rows, device_speed
from edge.profiling.llm_survey import with_sums
from partition.predict.speeds import Curve
from tests.support.clock import Clock

MS = 1e-3


def test_a_summary_is_of_its_kind_in_its_units() -> None:
    times = StepTimes()
    for i in range(1, 101):
        times.add(StepTime(1, i * MS, 2 * i * MS, 3 * i * MS, 1000 * i, 2000 * i))
    times.add(StepTime(0, 5.0, 6.0, 7.0, 8_000_000, 9_000_000))
    result = times.summaries()
    assert (result["decode"].steps, result["prefill"].steps) == (100, 1)
    expected = {
        "compute_ms": (50.5, 100),
        "communication_ms": (101, 200),
        "stall_ms": (151.5, 300),
        "sent_bytes": (50_500, 100_000),
        "received_bytes": (101_000, 200_000),
    }
    for name, (median, p99) in expected.items():
        figure: Figure = getattr(result["decode"], name)
        assert (figure.median, figure.p99) == pytest.approx((median, p99))
    first = result["prefill"]
    assert [getattr(first, name).median for name in expected] == pytest.approx([5000, 6000, 7000, 8e6, 9e6])
    decode, prefill = step_table.rows(["desk"], [result])
    assert dict(zip(step_table.NAMES, decode, strict=True)) == {
        "rank": "0",
        "device": "desk",
        "kind": "decode",
        "steps": "100",
        "compute ms": "50.50 / 100.00",
        "communication ms": "101.00 / 200.00",
        "stall ms": "151.50 / 300.00",
        "sent kB": "50.5",
        "received kB": "101.0",
    }
    assert prefill[2:5] == ("prefill", "1", "5000.00 / 5000.00")


def test_a_summary_is_of_so_many_of_the_last_steps() -> None:
    times = StepTimes()
    for ms in (100, 100, 1, 3, 2):
        times.add(StepTime(1, ms * MS))
        times.add(StepTime(0, 10 * ms * MS))
    result = times.summaries(3)
    assert (result["decode"].steps, result["decode"].compute_ms.median) == (3, pytest.approx(2))
    assert (result["prefill"].steps, result["prefill"].compute_ms.p99) == (3, pytest.approx(30))
    assert times.summaries()["decode"].steps == times.decoded == 5


def test_the_slowest_rank_is_the_one_that_computes_the_longest() -> None:
    def rank(compute_s: float, stall_s: float) -> Any:
        times = StepTimes()
        times.add(StepTime(1, compute_s, stall_s, stall_s))
        return times.summaries()

    names = ("here", "pi", "nas")
    assert step_table.slowest_text(names, [rank(1, 9), rank(3, 1), rank(2, 5)])[0].startswith("rank 1 (pi)")
    assert step_table.slowest_text(names, [{}, rank(1, 1)])[0].startswith("rank 1 (pi)")
    assert step_table.slowest_text(names, [{}]) == []


def test_a_steps_seconds_are_computing_sums_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 s in llama.cpp, of which sums took 3; 2 s of sending before, 1 s of receiving after it."""
    clock = Clock().install(monkeypatch, shard)
    link = SimpleNamespace(receive_s=10.0, sent_bytes=100, received_bytes=200)
    first: Any = Shard.__new__(Shard)
    first._feedback = None
    first._links, first._exchange_s, first._compute_s = [link], 5.0, 0.0
    first.times, first.hidden, first._sums_a_layer = StepTimes(), None, 2
    first.clock = ComputeClock(clock.perf_counter)
    first.place = SimpleNamespace(thin=False, last=True, group=(0, 1))
    first.rows = SimpleNamespace(outputs=np.ones(1, np.int8), sequences=np.zeros(1, np.int32))

    def allreduce(*_: Any) -> None:
        clock.now += 1.5
        link.receive_s += 0.5
        link.sent_bytes += 40
        link.received_bytes += 60

    first._group = SimpleNamespace(allreduce=allreduce)
    first._algorithm = first.wire = None
    node: Any = SimpleNamespace(view=lambda: object())

    def decode_rows(*_: Any) -> None:
        clock.now += 5.0
        first._sum(node)
        first._sum(node)

    first.engine = SimpleNamespace(decode_rows=decode_rows, shape=SimpleNamespace(n_layers=1))
    first.begin()
    clock.now += 2.0
    link.sent_bytes += 1000
    first.compute(1)
    clock.now += 1.0
    link.receive_s += 0.75
    result = first.end(first.time_of(1, idle_s=0.25))
    assert result.decode
    assert result.compute_s == pytest.approx(5.0)
    assert first.clock.computed_s == pytest.approx(5.0)
    assert result.communication_s == pytest.approx(2.0 + 3.0 + 1.0)
    assert result.stall_s == pytest.approx(0.25 + 2 * 0.5 + 0.75)
    assert (result.sent_bytes, result.received_bytes) == (1080, 120)


def curve(*points: tuple[int, float]) -> Curve:
    return Curve(points)


def test_a_layer_is_its_part_of_what_was_timed() -> None:
    """A step of 1 ms; a layer of 2 ms for one row and of 10 for 64; half of one of 1.5 and 6; a head of 4 ms and 16."""
    steps = {
        "layers": curve((1, 9 * MS), (64, 41 * MS)),
        "more": curve((1, 17 * MS)),
        "half": curve((1, 7 * MS), (64, 25 * MS)),
        "head": curve((1, 7 * MS), (64, 27 * MS)),
    }
    result = device_speed(LayerTimes(4, steps, 0.512, 300 << 20, 2e8), "pi:1", "pi", 4 << 30)
    assert (result.device, result.name) == ("pi:1", "pi")
    assert result.step_s.at(1) == pytest.approx(1 * MS)
    assert [result.layer_s.at(n) for n in (1, 64)] == pytest.approx([2 * MS, 10 * MS])
    assert [result.half_layer_s.at(n) for n in (1, 64)] == pytest.approx([1.5 * MS, 6 * MS])
    assert [result.head_s.at(n) for n in (1, 64)] == pytest.approx([4 * MS, 16 * MS])
    assert result.token_s == pytest.approx(0.512 / 4 / DEPTH)
    assert (result.memory_bytes, result.runtime_bytes, result.disk_bytes_per_s) == (4 << 30, 300 << 20, 2e8)
    # Without twice as many layers, and without halves: no step of its own, half a layer takes half.
    del steps["more"], steps["half"]
    result = device_speed(LayerTimes(4, steps, 0.0, 1, None), "pi:1", "pi", 1)
    assert result.step_s.at(1) == 0
    assert result.layer_s.at(1) == pytest.approx(9 / 4 * MS)
    assert result.half_layer_s.at(1) == pytest.approx(9 / 8 * MS)


def test_the_round_trip_to_a_page_belongs_to_the_step() -> None:
    """A page takes 10 ms for the round trip, and 1 ms a layer. Without a network so much is noise."""
    steps = {"layers": curve((1, 14 * MS)), "more": curve((1, 18 * MS)), "head": curve((1, 12 * MS))}
    times = LayerTimes(4, steps, 0.0, 1, None)
    page, other = (device_speed(times, "d", "d", 1, network_s) for network_s in (9 * MS, 0.0))
    assert (page.step_s.at(1), page.layer_s.at(1), page.head_s.at(1)) == pytest.approx((10 * MS, 1 * MS, 1 * MS))
    assert other.step_s.at(1) == pytest.approx(0.3 * 14 * MS)


def test_a_step_of_a_long_prompt_is_a_third_point() -> None:
    """By the line through one row and 64, 256 rows of a layer would take 34.4 ms; they took 45. Half a layer is 0.6.

    256 rows share what they read of 256 tokens before them: that takes each of them 50 ns, and a row alone 1 us."""
    steps = {
        "layers": curve((1, 9 * MS), (64, 41 * MS)),
        "more": curve((1, 17 * MS)),
        "half": curve((1, 7 * MS), (64, 25 * MS)),
        "chunk": curve((256, 91 * MS)),
        "head": curve((1, 9 * MS), (4, 12 * MS)),
    }
    depth_s, chunk_depth_s = 4 * 256 * 1e-6, 2 * 256 * 256 * 50e-9
    times = LayerTimes(4, steps, depth_s, 1, None, few_layers=2, chunk_depth_s=chunk_depth_s)
    result = device_speed(times, "pi:1", "pi", 1)
    assert result.head_s.points[0] == (1, pytest.approx(4 * MS))
    assert [n for n, _ in result.head_s.points] == [1, 4]
    assert [n for n, _ in result.layer_s.points] == [1, 64, 256]
    assert [result.layer_s.at(n) for n in (1, 64, 256)] == pytest.approx([2 * MS, 10 * MS, 45 * MS])
    assert result.half_layer_s.points[-1] == (256, pytest.approx(0.6 * 45 * MS))
    assert result.part_s(1.0, 256) == pytest.approx(45 * MS)
    assert (result.token_s, result.prompt_token_s) == (pytest.approx(1e-6), pytest.approx(50e-9))
    noisy = device_speed(replace(times, chunk_depth_s=1.0), "pi:1", "pi", 1)
    assert noisy.prompt_token_s == noisy.token_s  # rows together never cost more than each alone


def test_a_slow_device_is_timed_with_fewer_rows_of_a_prompt() -> None:
    """So many that a step takes a second at most: 64 rows tell how long more of them would take."""
    times = (0.1, 0.25, 0.26, 0.5, 0.51, 10.0)
    assert [_chunk_rows(seconds) for seconds in times] == [(256,), (256,), (128,), (128,), (), ()]


def test_layers_take_time_where_one_row_had_a_bad_moment() -> None:
    steps = {"layers": curve((1, 40 * MS), (2, 10 * MS), (64, 41 * MS)), "more": curve((1, 18 * MS))}
    result = device_speed(LayerTimes(4, {**steps, "head": curve((1, 7 * MS))}, 0.0, 1, None), "pi:1", "pi", 1)
    assert result.step_s.at(1) == pytest.approx(3 * MS)
    assert [result.layer_s.at(n) for n in (1, 2, 64)] == pytest.approx([37 / 4 * MS, 7 / 4 * MS, 38 / 4 * MS])


def test_a_sum_takes_slow_devices_longer() -> None:
    def device(layer_s: float) -> Any:
        return device_speed(
            LayerTimes(1, {"layers": curve((1, layer_s)), "head": curve((1, layer_s))}, 0, 1, None), "d", "d", 1
        )

    fast, slow = with_sums([device(2 * MS), device(6 * MS)])
    assert slow.sum_s == pytest.approx(3 * fast.sum_s)
    assert fast.sum_s == pytest.approx(90e-6)
