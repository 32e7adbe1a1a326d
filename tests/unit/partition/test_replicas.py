"""Test plans with replicas: their prediction by hand, and the search against an enumeration."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.errors import PlanError
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.predict.hosts import Host
from partition.predict.predict import predict
from partition.predict.prediction import Prediction
from partition.predict.replicas import distribute, slowdowns
from partition.predict.speeds import DeviceSpeed, LinkSpeed
from tests.support.planning import FAST, MS, device, linked, work

LAYERS = 4


def copy(*devices: str) -> Plan:
    """A pipeline on these devices. Without LOCAL it has a thin owner."""
    names = devices if devices[0] == LOCAL else (LOCAL, *devices)
    shares = [float(name in devices) for name in names]
    return make_plan(work(LAYERS).limits, "m", "", names, "pipeline", shares)


def predicted(plan: Plan, speeds: list[DeviceSpeed], concurrency: int, way: LinkSpeed = FAST) -> Prediction:
    names = [speed.device for speed in speeds]
    by_device = {speed.device: speed for speed in speeds}
    return predict(plan, work(LAYERS, concurrency=concurrency), by_device, linked(names, way))


# ------------------------------------------------------------------------------------------------------- prediction


rates = st.lists(st.floats(0, 100), min_size=4, max_size=4)


@given(st.lists(rates, min_size=1, max_size=4))
def test_distribution_has_the_largest_sum(drawn: list[list[float]]) -> None:
    drawn = [[0.0, *some] for some in drawn]
    requests = len(drawn[0]) - 1
    best = max(
        sum(rate[n] for rate, n in zip(drawn, some, strict=True))
        for some in product(range(requests + 1), repeat=len(drawn))
        if sum(some) == requests
    )
    chosen = distribute(drawn, requests)
    assert sum(chosen) == requests
    assert sum(rate[n] for rate, n in zip(drawn, chosen, strict=True)) == pytest.approx(best)


def test_distribution_finds_gains_that_grow() -> None:
    """A greedy choice would give each copy a request."""
    assert sorted(distribute([[0, 1, 10], [0, 1, 10]], 2)) == [0, 2]


def test_overloaded_resource_slows_its_copies_only() -> None:
    assert slowdowns([10, 10, 10], [{"a": 0.1}, {"a": 0.05, "b": 0.01}, {"b": 0.01}]) == pytest.approx([1.5, 1.5, 1])


def test_two_equal_copies_have_twice_the_throughput() -> None:
    speeds = [device(by_row=True), device("b", by_row=True)]
    plan = replace(copy(LOCAL), replicas=(copy("b"),))
    both = predicted(plan, speeds, 4)
    alone = predicted(copy(LOCAL), speeds, 4)
    assert both.throughput_per_s == pytest.approx(2 * alone.throughput_per_s, rel=1e-4)
    assert (both.latency_s, both.ttft_s, both.stages) == (alone.latency_s, alone.ttft_s, both.copies[0].stages)
    assert sum(one.in_flight for one in both.copies) == 4
    assert both.in_flight == 4
    assert sum(one.throughput_per_s for one in both.copies) == both.throughput_per_s


def test_a_faster_copy_gets_more_requests_and_energy_counts_by_throughput() -> None:
    speeds = [device(step_s=MS, by_row=True, watts=10.0), device("b", 3 * MS, step_s=MS, by_row=True, watts=2.0)]
    both = predicted(replace(copy(LOCAL), replicas=(copy("b"),)), speeds, 5)
    first, second = both.copies
    assert first.in_flight + second.in_flight == 5
    assert first.throughput_per_s > second.throughput_per_s > 0
    assert first.energy_j is not None
    assert second.energy_j is not None
    joules = first.energy_j * first.throughput_per_s + second.energy_j * second.throughput_per_s
    assert both.energy_j == pytest.approx(joules / both.throughput_per_s)


def test_copies_on_one_host_share_its_cores() -> None:
    crowded = [device(name, by_row=True, host=Host("x", 2, 2)) for name in (LOCAL, "b")]
    roomy = [replace(speed, host=Host("x", 4, 2)) for speed in crowded]
    plan = replace(copy(LOCAL), replicas=(copy("b"),))
    alone = predicted(copy(LOCAL), crowded, 2).throughput_per_s
    by_cores = [predicted(plan, speeds, 2).throughput_per_s for speeds in (crowded, roomy)]
    assert by_cores[0] == pytest.approx(by_cores[1] / 2, rel=1e-4)
    assert by_cores[0] == pytest.approx(alone, rel=1e-4)


def test_owner_computes_less_while_it_serves_thin_copies() -> None:
    """The owner's device has 1 ms of a step of 5 ms for the other copy, and loses a sixth."""
    speeds = [device(step_s=MS, by_row=True), device("b", by_row=True)]
    both = predicted(replace(copy(LOCAL), replicas=(copy("b"),)), speeds, 2)
    assert [one.throughput_per_s for one in both.copies] == pytest.approx([200 / 1.2, 200 / 1.2], rel=1e-4)


def test_owner_link_is_shared_by_thin_copies() -> None:
    speeds = [device(), *(device(name, MS / 100) for name in "bcd")]
    plan = replace(copy("b"), replicas=(copy("c"), copy("d")))
    slow = predicted(plan, speeds, 3, LinkSpeed(0.0, 512e3))  # a hidden state takes 1 ms, an answer takes 1 ms
    alone = predicted(copy("b"), speeds, 1, LinkSpeed(0.0, 512e3))
    assert slow.throughput_per_s == pytest.approx(1000)
    assert alone.throughput_per_s < 500
    fast = predicted(plan, speeds, 3, LinkSpeed(0.0, 1e9))
    assert fast.throughput_per_s == pytest.approx(
        3 * predicted(copy("b"), speeds, 1, LinkSpeed(0.0, 1e9)).throughput_per_s
    )


def test_owner_holds_the_runtime_of_each_thin_copy() -> None:
    speeds = [device(runtime_bytes=100, memory_bytes=1 << 30), device("b", runtime_bytes=7), device("c")]
    plan = replace(copy("b"), replicas=(copy("c"),))
    assert predicted(plan, speeds, 2).memory_bytes[LOCAL] == 200
    assert predicted(copy("b"), speeds, 2).memory_bytes[LOCAL] == 100
    own = replace(copy(LOCAL), replicas=(copy("b"), copy("c")))
    need = predicted(copy(LOCAL), speeds, 2).memory_bytes[LOCAL]
    assert predicted(own, speeds, 2).memory_bytes[LOCAL] == need + 200
    short = [replace(speeds[0], memory_bytes=need + 199), *speeds[1:]]
    with pytest.raises(PlanError, match="use a smaller type"):
        predicted(own, short, 2)


def test_copies_without_requests_count_nothing() -> None:
    speeds = [device(), device("b", 2 * MS)]
    one = predicted(replace(copy(LOCAL), replicas=(copy("b"),)), speeds, 1)
    assert one.throughput_per_s == predicted(copy(LOCAL), speeds, 1).throughput_per_s
    assert one.copies[1].throughput_per_s == 0


def test_prediction_of_copies_in_json_and_back() -> None:
    speeds = [device(), device("b")]
    both = predicted(replace(copy(LOCAL), replicas=(copy("b"),)), speeds, 4)
    values = json.loads(json.dumps(both.to_json()))
    assert Prediction.from_json(values) == both
    assert "copies" not in predicted(copy(LOCAL), speeds, 4).to_json()
    assert both.renamed({"b": "pi"}).copies[1].stages[1].devices == ("pi",)
    values["copies"][1]["copies"] = [values["copies"][0]]
    with pytest.raises(PlanError, match=r"predicted\.copies\[1\]: it has copies of its own"):
        Prediction.from_json(values)
