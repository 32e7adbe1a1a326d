"""Test several devices of a plan on one machine: its cores count once, in predictions, plans and simulations."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from partition.plan.arrange import make_plan
from partition.plan.onnx_plan import OnnxPlan, OnnxStage
from partition.plan.plan import LOCAL, Range
from partition.predict.cost import chunks
from partition.predict.hosts import Host, crowded, crowding, demand, used
from partition.predict.onnx_predict import OnnxDevice, OnnxWork
from partition.predict.onnx_predict import predict as predict_onnx
from partition.predict.predict import compute_s, predict
from partition.predict.prediction import Prediction
from partition.predict.speeds import DeviceSpeed, together
from partition.search.explain import best
from partition.search.planner import Planner
from partition.simulate.times import capacity_per_s
from tests.support.planning import MS, device, linked, work

NAMES = (LOCAL, "b", "c")


def on(host: str | None, names: Sequence[str] = NAMES, cores: float = 2, threads: int = 2) -> list[DeviceSpeed]:
    return [device(name, host=Host(host, cores, threads) if host else None) for name in names]


def test_threads_of_a_machine_are_counted_against_its_cores() -> None:
    two, four, other = Host("x", 4, 2), Host("x", 4, 4), Host("y", 4, 3)
    assert demand([two, four, None, other]) == {"x": 1.5, "y": 0.75}
    assert used([two, four, None, other]) == {"x": 1.0, "y": 0.75}
    assert crowded([two, four, None, other]) == ["x"]
    assert crowded([two, two]) == []


def test_a_device_alone_was_measured_with_the_cores_that_there_are() -> None:
    assert demand([Host("x", 0.5, 1)]) == {"x": 1.0}  # a lab's quota
    assert demand([Host("x", 2, 8), Host("x", 2, 2)]) == {"x": 1.25}


def test_stages_that_share_cores_take_turns() -> None:
    assert crowding([({"x": 1.0}, 1.0), ({"x": 1.0}, 3.0), ({}, 9.0)]) == pytest.approx([4 / 3, 4 / 3, 1])
    assert crowding([({"x": 0.5}, 2.0), ({"x": 0.5}, 2.0)]) == [1, 1]
    assert crowding([({"x": 0.75}, 2.0), ({"x": 0.75, "y": 1.0}, 2.0)]) == pytest.approx([1.5, 1.5])


def test_ranks_of_one_machine_compute_for_as_long_as_its_cores_take() -> None:
    alone, crowd = together(on(None)), together(on("x"))
    assert [speed.layer_s.at(1) for speed in alone] == pytest.approx([MS] * 3)
    assert [speed.layer_s.at(1) for speed in crowd] == pytest.approx([3 * MS] * 3)  # 6 threads on 2 cores
    assert [speed.layer_s.at(1) for speed in together(on("x", threads=1))] == pytest.approx([1.5 * MS] * 3)
    assert [speed.layer_s.at(1) for speed in together(on("x", NAMES[:2], threads=1))] == pytest.approx([MS] * 2)


def predicted(speeds: list[DeviceSpeed], stages_of: Sequence[int], concurrency: int = 1) -> Prediction:
    names, to_do = [speed.device for speed in speeds], work(12, concurrency=concurrency)
    plan = make_plan(to_do.limits, "m", "", names, stages_of=stages_of)
    return predict(plan, to_do, {speed.device: speed for speed in speeds}, linked(names))


def test_sharing_a_layer_on_one_machine_gains_nothing() -> None:
    apart, crowd = predicted(on(None, NAMES[:2]), [2]), predicted(on("x", NAMES[:2]), [2])
    assert crowd.stages[0].compute_s - crowd.stages[0].sums_s == pytest.approx(
        2 * (apart.stages[0].compute_s - apart.stages[0].sums_s)
    )
    assert crowd.stages[0].sums_s == apart.stages[0].sums_s


def test_stages_on_one_machine_wait_for_each_other_only_with_several_under_way() -> None:
    apart, crowd = (predicted(on(host), [1, 1, 1], 3) for host in (None, "x"))
    assert crowd.latency_s == apart.latency_s
    assert crowd.throughput_per_s == pytest.approx(apart.throughput_per_s / 3, rel=1e-3)
    assert [stage.crowding for stage in crowd.stages] == pytest.approx([3, 3, 3])
    first = predicted(on("x"), [1, 1, 1])
    assert [stage.crowding for stage in first.stages] == [1, 1, 1]
    # 12 layers of 1 ms a chunk: a third of them here and two on the way, or all of them here, where nothing overlaps.
    n = chunks(128)
    assert (crowd.ttft_s, apart.ttft_s) == pytest.approx((n * 12 * MS, n * 4 * MS + 8 * MS), rel=1e-2)


def test_a_prediction_is_read_with_what_stages_share() -> None:
    crowd = predicted(on("x"), [1, 1, 1], 3)
    values = json.loads(json.dumps(crowd.to_json()))
    assert Prediction.from_json(values) == crowd
    for stage in values["stages"]:
        del stage["crowding"]  # as older versions wrote it
    assert [stage.crowding for stage in Prediction.from_json(values).stages] == [1, 1, 1]


def test_a_simulation_does_no_more_than_the_cores() -> None:
    apart, crowd = (predicted(on(host), [1, 1, 1], 3) for host in (None, "x"))
    assert capacity_per_s(crowd, 128, 100) < 0.45 * capacity_per_s(apart, 128, 100)


def test_steps_in_use_are_compared_with_what_ranks_take_together() -> None:
    names, to_do = NAMES[:2], work(12)
    plan = make_plan(to_do.limits, "m", "", names, stages_of=[2])
    apart, crowd = (
        compute_s(plan, to_do, {speed.device: speed for speed in on(host, names)}, linked(names))
        for host in (None, "x")
    )
    assert crowd == pytest.approx([2 * seconds for seconds in apart if seconds])


@pytest.mark.parametrize(("host", "cores", "expected"), [(None, 2, 3), ("x", 6, 3), ("x", 4, 2), ("x", 2, 1)])
def test_the_planner_takes_as_many_ranks_as_there_are_cores(host: str | None, cores: int, expected: int) -> None:
    speeds = on(host, cores=cores)
    plan = best(Planner(work(12), speeds, linked(NAMES), "m", ""), "latency").plan
    assert plan.world_size == expected


def test_another_machine_is_preferred_to_a_second_worker_on_this_one() -> None:
    speeds = [*on("x", NAMES[:2]), device("c", 1.4 * MS)]
    plan = best(Planner(work(12), speeds, linked(NAMES), "m", ""), "latency").plan
    assert {shard.device for stage in plan.stages for shard in stage.shards} == {LOCAL, "c"}


def test_stages_of_a_network_that_share_a_machine() -> None:
    to_do = OnnxWork((0, 2, 4), ("", "s1", ""), (1, 1, 1), (1, 1), (), (1, 1))
    plan = OnnxPlan("m", "", 4, (OnnxStage(LOCAL, Range(0, 2)), OnnxStage("b", Range(2, 4))))
    apart = {name: OnnxDevice(name, name, (2.0, 1.0), 0.0, 1 << 30, 0) for name in NAMES[:2]}
    crowd = {name: replace(item, host=Host("x", 2, 2)) for name, item in apart.items()}
    links = linked(NAMES[:2])
    assert 1 / predict_onnx(plan, to_do, apart, links).throughput_per_s == pytest.approx(2)
    assert 1 / predict_onnx(plan, to_do, crowd, links).throughput_per_s == pytest.approx(3)
    alone = predict_onnx(plan, to_do, crowd, links, in_flight=1)
    assert [stage.crowding for stage in alone.stages] == [1, 1]
