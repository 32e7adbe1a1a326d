"""Test the figures of ONNX networks: known runs give known figures."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from apps.commands.run import RunResult
from edge.onnx.bench import FlowSpeed, measure
from edge.onnx.inputs import ReadInputs
from edge.onnx.pipeline import Result
from edge.planning.onnx_sweep import CutSpeed
from edge.profiling.onnx_times import times_of
from partition.plan.onnx_cuts import Cut

MS = 1e-3


def test_latency_is_the_median_and_throughput_is_without_the_warm_up() -> None:
    """Alone inputs take 1 to 10 ms, and the first, which does not count, a second. In flight the first two take a
    second each, then one is complete every 2 ms."""

    def flow(feeds: Iterable[Any], in_flight: int) -> Iterator[Result]:
        clock = 0.0
        for i, _ in enumerate(feeds):
            took = (1.0 if i == 0 else i * MS) if in_flight == 1 else (1.0 if i < 2 else 2 * MS)
            clock += took
            yield Result({}, clock - took, clock, (took / 4, took / 2))

    speed = measure(flow, {}, 10, 2)
    assert speed.latency_ms_median == pytest.approx(5.5)
    assert speed.latency_ms_p90 == pytest.approx(9)
    assert speed.throughput_per_s == pytest.approx(500)
    assert speed.compute_ms == pytest.approx((5.5 / 4, 5.5 / 2))


def test_segments_are_what_their_groups_take_beside_a_stage() -> None:
    """Three groups of 5, 9 and 4 ms, 14 ms as one: 2 ms of each are the stage's own."""
    groups = [range(2), range(2, 3), range(3, 4)]
    result = times_of((1.0, 2.0, 4.0, 1.0), groups, (5 * MS, 9 * MS, 4 * MS), 14 * MS, 100, "pi")
    assert result.stage_s == pytest.approx(2 * MS)
    assert result.segments_s == pytest.approx((1 * MS, 2 * MS, 7 * MS, 2 * MS))
    assert result.estimated == ()
    # The second could not be timed: it needs so many times its estimate as the others do.
    result = times_of((1.0, 2.0, 4.0, 1.0), groups, (5 * MS, None, 3 * MS), None, 100, "pi")
    assert result.stage_s == 0
    assert result.segments_s == pytest.approx((5 / 3 * MS, 10 / 3 * MS, 8 * MS, 3 * MS))
    assert result.estimated == (2,)


SPEED = FlowSpeed(12.0, 15.0, 80.0, (4.0, 6.0), 3, 10)


def test_a_cut_is_expected_to_take_its_stages_and_links() -> None:
    cut = Cut(7, "conv1", True, True, (), 1000, (10, 20), (30, 40))
    first = CutSpeed(cut, (0.004, 0.006), (0.008, 0.001, 0.0005), 0.002, SPEED)
    assert first.expected_latency_s == pytest.approx(0.0215)
    assert first.expected_throughput_per_s == pytest.approx(125)
    result = first.to_json()
    assert result["stage_ms"] == pytest.approx([4, 6])
    assert result["transfer_ms"] == pytest.approx([8, 1, 0.5])
    assert result["expected_latency_ms"] == pytest.approx(21.5)
    assert (result["latency_ms_median"], result["throughput_per_s"], result["in_flight"]) == (12.0, 80.0, 3)
    assert (result["weight_bytes"], result["flops"], result["payload_bytes"]) == ([10, 20], [30, 40], 1000)
    report = RunResult(ReadInputs({}, {}), None, {}, SPEED, {}, ()).to_json(None)
    assert (report["latency_ms_median"], report["latency_ms_p90"], report["throughput_per_s"]) == (12.0, 15.0, 80.0)
