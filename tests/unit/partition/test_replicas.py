"""Test plans with replicas: their prediction by hand, and the search against an enumeration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
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
from partition.predict.speeds import Curve, DeviceSpeed, Links, LinkSpeed
from partition.search.explain import best, kind_of, reason
from partition.search.planner import Planner
from partition.search.replicas import Replicas, replicated
from partition.simulate.arrivals import closed
from partition.simulate.simulate import simulate
from tests.support.planning import FAST, MIB, MS, device, linked, work
from tests.support.random_plans import Case, objectives
from tests.support.thorough import some

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
    assert sum(each.in_flight for each in both.copies) == 4
    assert both.in_flight == 4
    assert sum(each.throughput_per_s for each in both.copies) == both.throughput_per_s


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
    assert [each.throughput_per_s for each in both.copies] == pytest.approx([200 / 1.2, 200 / 1.2], rel=1e-4)


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
    lone = predicted(replace(copy(LOCAL), replicas=(copy("b"),)), speeds, 1)
    assert lone.throughput_per_s == predicted(copy(LOCAL), speeds, 1).throughput_per_s
    assert lone.copies[1].throughput_per_s == 0


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


# ----------------------------------------------------------------------------------------------------------- search


def every_copy(case: Case) -> list[tuple[frozenset[str], Plan]]:
    """Every plan of one copy, and the devices that compute in it."""
    return [(frozenset(plan.computing_devices), plan) for plan in case.plans()]


def enumerated(case: Case, names: Sequence[str]) -> list[tuple[float, ...]]:
    """The costs of every plan with replicas, with any first copy and all numbers of microbatches."""
    counts = sorted({1, 2, 4, case.work.concurrency} & set(range(1, case.work.concurrency + 1)))
    copies = [
        (devices, replace(plan, microbatches=many))
        for devices, plan in every_copy(case)
        for many in (counts if len(plan.computing) > 1 else [None])
    ]
    costs = []

    def extend(so_far: tuple[Plan, ...], used: frozenset[str], start: int) -> None:
        for i in range(start, len(copies)):
            devices, plan = copies[i]
            if used & devices:
                continue
            plans = (*so_far, plan)
            if len(plans) > 1:
                for first in plans:
                    others = tuple(other for other in plans if other is not first)
                    try:
                        said = objectives(case.predict(replace(first, replicas=others), first.microbatches))
                    except PlanError:
                        continue
                    costs.append(tuple(said[name] for name in names))
            extend(plans, used | devices, i + 1)

    extend((), frozenset(), 0)
    return costs


@pytest.mark.parametrize(
    ("seed", "cases", "layers", "devices"),
    [(1700, some(60, 1700), (1, 3), (2, 2)), (300, some(6, 300), (1, 3), (3, 3))],
)
def test_search_finds_what_enumeration_finds(
    seed: int, cases: int, layers: tuple[int, int], devices: tuple[int, int]
) -> None:
    rng = np.random.default_rng(seed)
    n_plans = 0
    for i in range(cases):
        case = Case(
            rng, int(rng.integers(*layers, endpoint=True)), int(rng.integers(*devices, endpoint=True)), i % 3 > 0
        )
        case.work = replace(case.work, concurrency=int(rng.integers(2, 4, endpoint=True)))
        if i % 2:  # copies do not slow each other down
            case.speeds = [replace(speed, host=None, step_s=Curve(((1, 0.0),))) for speed in case.speeds]
            case.links = Links({pair: replace(way, bytes_per_s=1e9) for pair, way in case.links.between.items()})
        names = (("throughput",), ("latency", "throughput"), ("ttft", "throughput"))[i // 2 % 3]
        planner = case.planner()
        ordinary, _ = planner.front(names)
        search = Replicas(planner)
        plans = search.plans(names, others=ordinary)
        for placed in plans:
            said = objectives(case.predict(placed.plan, placed.microbatches))
            assert placed.objectives == pytest.approx(tuple(said[name] for name in names), rel=1e-9)
            assert placed.plan.replicas
        reached = [placed.objectives for placed in (*ordinary, *plans)]
        at = names.index("throughput")
        for costs in enumerated(case, names):
            allowed = (*costs[:at], costs[at] * (1 + search.gap), *costs[at + 1 :])
            assert any(all(a <= b * (1 + 1e-9) for a, b in zip(own, allowed, strict=True)) for own in reached), i
        assert search.exact == (search.gap < 1e-9)
        assert search.exact or i % 2 == 0
        n_plans += bool(plans)
    assert n_plans > cases / 5


def chosen(speeds: list[DeviceSpeed], concurrency: int, objective: str = "throughput") -> Plan | None:
    """The plan with replicas that is chosen beside the best plan without."""
    links = linked([speed.device for speed in speeds], LinkSpeed(2 * MS, 1e10))
    planner = Planner(work(LAYERS, concurrency=concurrency), speeds, links, "m", "")
    placed = replicated(planner, best(planner, objective), objective, {})
    if placed is not None:
        assert reason(planner, placed, objective).startswith("2 copies on 2 devices: ")
        assert kind_of(placed.plan) == "replicas"
    return None if placed is None else placed.plan


def test_two_whole_copies_are_chosen_for_throughput_of_several_requests() -> None:
    speeds = [replace(device(name), layer_s=Curve(((1, MS), (2, 1.1 * MS), (4, 3 * MS)))) for name in (LOCAL, "b")]
    plan = chosen(speeds, 4)
    assert plan is not None
    assert plan.computing_devices == (LOCAL, "b")
    assert chosen(speeds, 1) is None
    assert chosen(speeds, 4, "latency") is None


def test_model_that_no_device_holds_has_no_replicas() -> None:
    assert chosen([device(memory_bytes=20 * MIB), device("b", memory_bytes=30 * MIB)], 4) is None


def test_many_devices_have_copies_and_a_gap() -> None:
    names = [LOCAL, *(f"d{i}" for i in range(11))]
    speeds = [device(name, by_row=True) for name in names]
    planner = Planner(work(2, concurrency=12), speeds, linked(names), "m", "", tensor=False)
    search = Replicas(planner)
    [placed] = search.plans(("throughput",), others=[best(planner, "throughput")])
    assert len(placed.plan.copies) == 12
    assert 1 / placed.objectives[0] == pytest.approx(12 * 500, rel=1e-3)
    assert not search.exact
    assert 0 < search.gap < 1


# ------------------------------------------------------------------------------------------------------- simulation


def test_simulated_copies_reach_the_predicted_throughput() -> None:
    speeds = [device(by_row=True), device("b", 2 * MS, by_row=True)]
    both = predicted(replace(copy(LOCAL), replicas=(copy("b"),)), speeds, 6)
    result = simulate(both, closed(6, 600, 1, 50))
    assert result.throughput_per_s == pytest.approx(both.throughput_per_s, rel=0.05)
    assert result.completed == 600
    assert set(result.devices) == {LOCAL, "b"}


def test_simulated_request_goes_to_the_copy_that_finishes_it_soonest() -> None:
    """A lone client always uses the first copy. The other copy of half its speed stays idle."""
    speeds = [device(), device("b", 2 * MS)]
    both = predicted(replace(copy(LOCAL), replicas=(copy("b"),)), speeds, 2)
    assert simulate(both, closed(1, 5, 1, 20)).devices["b"] == 0
    assert simulate(both, closed(4, 20, 1, 20)).devices["b"] > 0.5
