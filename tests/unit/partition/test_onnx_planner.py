"""Test the planner for ONNX models: its predictions, and that it finds the best of all plans."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, permutations

import pytest

from edge.onnx.pipeline import MOST_WINDOW
from partition.errors import PlanError
from partition.model.onnx_graph import OnnxGraph
from partition.plan.onnx_cuts import choose
from partition.plan.onnx_plan import OnnxPlan, OnnxStage
from partition.plan.onnx_split import node_seconds
from partition.plan.plan import LOCAL, Range
from partition.predict.hosts import Host
from partition.predict.onnx_predict import MOST_IN_FLIGHT, OnnxDevice, OnnxWork, filling, predict
from partition.predict.speeds import Links, LinkSpeed
from partition.search.onnx_planner import OnnxPlaced, OnnxPlanner
from quant.wire import WIRES
from tests.support.onnx_networks import chain, mobilenet_v2, resnet18
from tests.support.thorough import some

AXES = ("latency", "throughput", "memory", "energy")
LAN = LinkSpeed(5e-4, 125e6)
NETWORKS = {"mobilenet": mobilenet_v2, "resnet": resnet18}


def work_of(crossing: Sequence[int], weights: Sequence[int], again: Sequence[tuple[int, int, int]] = ()) -> OnnxWork:
    n = len(weights)
    labels = ("", *(f"s{i}" for i in range(1, n)), "")
    return OnnxWork(tuple(range(0, 2 * n + 1, 2)), labels, tuple(crossing), tuple(weights), tuple(again), (1,) * n)


def device(name: str, segments_s: Sequence[float], stage_s: float = 0.0, memory: int = 1 << 30) -> OnnxDevice:
    return OnnxDevice(name, name, tuple(segments_s), stage_s, memory, 0, watts=5.0)


def all_links(names: Sequence[str], item: LinkSpeed = LAN) -> Links:
    return Links(dict.fromkeys(permutations({LOCAL, *names}, 2), item))


def planner_of(work: OnnxWork, devices: Sequence[OnnxDevice], links: Links, many: int | None = None) -> OnnxPlanner:
    return OnnxPlanner(work, devices, links, "model.onnx", "", many)


def random_planner(rng: random.Random) -> OnnxPlanner:
    """Up to 6 segments and 4 devices, uneven in all that matters; often the same numbers, so that there are ties."""
    n = rng.randint(1, 6)
    names = [LOCAL, "a", "b", "c"][: rng.choice((1, 2, 2, 3, 3, 3, 4))]
    names = names[1:] if len(names) > 1 and rng.random() < 0.3 else names
    weights = [rng.randint(0, 4) for _ in range(n)]
    again = [(a, b, min(weights[a], weights[b])) for a, b in pairwise(range(n)) if rng.random() < 0.2]
    work = work_of([rng.choice((0, 1, 2, 5, 20)) for _ in range(n + 1)], weights, again)
    seconds: Sequence[float] = (0.0, 1.0, 2.0, 3.0) if rng.random() < 0.5 else [rng.random() for _ in range(9)]
    devices = [
        replace(
            device(name, rng.choices(seconds, k=n), rng.choice((0.0, 0.25)), rng.choice((4, 7, 10, 40))),
            watts=rng.choice((1.0, 5.0)),
            runtime_bytes=rng.choice((0, 2)),
            host=rng.choice((None, None, Host("x", 2, 1), Host("x", 2, 2))),
        )
        for name in names
    ]
    pairs = permutations({LOCAL, *names}, 2)
    links = {pair: LinkSpeed(rng.choice((0.0, 0.1, 2.0)), rng.choice((1.0, 10.0, 1e6))) for pair in sorted(pairs)}
    return planner_of(work, devices, Links(links), rng.choice((None, 1, 2, 7)))


def every_plan(planner: OnnxPlanner) -> Iterator[OnnxPlan]:
    """All that have room, with the owner's device first where it takes part."""
    at, n = planner.work.positions, planner.work.segments
    total = {speed.device: speed for speed in planner.speeds}
    for k in range(1, min(n, len(total)) + 1):
        for order in permutations(total, k):
            if LOCAL in order[1:]:
                continue
            for inner in combinations(range(1, n), k - 1):
                spans = list(zip(order, pairwise((0, *inner, n)), strict=True))
                if all(
                    total[d].runtime_bytes + weight_bytes(planner.work, *span) <= total[d].memory_bytes
                    for d, span in spans
                ):
                    yield OnnxPlan("m", "", at[-1], tuple(OnnxStage(d, Range(at[i], at[j])) for d, (i, j) in spans))


def weight_bytes(work: OnnxWork, start: int, stop: int) -> int:
    """Weights and activations, counted the long way."""
    shared = [n for a, b, n in work.again if start <= a < stop and start <= b < stop]
    return sum(work.weight_bytes[start:stop]) - sum(shared) + max(work.activation_bytes[start:stop])


def values(planner: OnnxPlanner, plan: OnnxPlan) -> tuple[float, ...]:
    """As AXES, each to be small."""
    result = planner.predict(plan)
    assert result.energy_j is not None
    return result.latency_s, 1 / result.throughput_per_s, max(result.memory_bytes.values()), result.energy_j


def same(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x == pytest.approx(y, rel=1e-9, abs=1e-11) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("seed", range(some(3, 6)))
def test_the_front_is_that_of_all_plans(seed: int) -> None:
    rng = random.Random(seed)
    several, n = 0, some(100, 250)
    for _ in range(n):
        planner = random_planner(rng)
        axes = sorted(rng.sample(range(4), rng.choice((1, 2, 2, 3, 4))))
        placed, exact = planner.front([AXES[i] for i in axes])
        assert exact
        # To 12 digits: what differs by rounding alone is equal.
        every = {tuple(float(f"{values(planner, p)[i]:.11e}") for i in axes) for p in every_plan(planner)}
        best = sorted(a for a in every if not any(b != a and all(map(float.__le__, b, a)) for b in every))
        assert len(placed) == len(best)
        for item, expected in zip(placed, best, strict=True):
            assert same(item.objectives, expected)
            assert same([values(planner, item.plan)[i] for i in axes], expected)
            assert item.predicted == planner.predict(item.plan)
        several += len(best) > 1
    assert several > n / 5


def test_caps_leave_what_is_under_them() -> None:
    rng = random.Random(7)
    checked = 0
    for _ in range(60):
        planner = random_planner(rng)
        placed, _ = planner.front(("latency", "memory"))
        if len(placed) > 1:
            cap = placed[-1].objectives[1]
            capped, _ = planner.front(("latency", "memory"), caps=(float("inf"), cap))
            assert [item.objectives for item in capped] == [placed[-1].objectives]
            checked += 1
    assert checked > 5


def test_no_plan_is_worse_than_the_best_device_alone() -> None:
    rng = random.Random(8)
    for _ in range(100):
        planner = random_planner(rng)
        for axis in ("latency", "throughput"):
            result, _ = planner.front((axis,))
            alone = planner.singles((axis,))
            assert len(alone) <= len(planner.speeds)
            assert all(len(item.plan.stages) == 1 for item in alone)
            if alone:
                assert result[0].objectives <= min(item.objectives for item in alone)


def test_it_is_fast_also_with_many_devices() -> None:
    rng = random.Random(9)
    n, names = 40, [LOCAL, *(f"d{i}" for i in range(31))]
    work = work_of([rng.randint(10**4, 10**6) for _ in range(n + 1)], [10**6] * n)
    devices = [device(name, [rng.uniform(0.5, 2) * (1 + i % 5) * 1e-3] * n, 3e-4) for i, name in enumerate(names)]
    for many, exactly in ((8, True), (32, False)):
        placed, exact = planner_of(work, devices[:many], all_links(names)).front()
        assert exact or not exactly
        assert len(placed) > 1


# ---------------------------------------------------------------------------------------------------------- formulas


def two_stages(many: int | None = None, slow: float = 10.0) -> OnnxPlaced:
    """a: 1 + 2 s, 50 bytes to b: 4 s; 10 bytes in, 20 out; links of 0.5 s and `slow` bytes/s."""
    work = work_of((10, 999, 50, 20), (5, 6, 7))
    devices = [device("a", (1, 2, 9), 0.25), device("b", (9, 9, 4), 0.125)]
    planner = planner_of(work, devices, all_links(("a", "b"), LinkSpeed(0.5, slow)), many)
    plan = OnnxPlan("m", "", 6, (OnnxStage("a", Range(0, 4)), OnnxStage("b", Range(4, 6))))
    return OnnxPlaced(plan, planner.predict(plan), ())


def test_latency_and_throughput_by_hand() -> None:
    result = two_stages().predicted
    assert result.enter_s == pytest.approx(0.5 + 1)
    assert [stage.compute_s for stage in result.stages] == [3.25, 4.125]
    assert [stage.transfer_s for stage in result.stages] == pytest.approx([5.5, 2.5])
    assert [stage.transfer_busy_s for stage in result.stages] == pytest.approx([5, 2])
    assert result.latency_s == pytest.approx(1.5 + 3.25 + 5.5 + 4.125 + 2.5)
    assert result.throughput_per_s == pytest.approx(1 / 5)  # the link between is the busiest
    assert result.in_flight == 4
    assert result.memory_bytes == {"a": 12, "b": 8}
    assert result.energy_j == pytest.approx(5 * (3.25 + 4.125))
    assert [stage.what for stage in result.stages] == ["up to s2", "up to its end"]
    assert (result.ttft_s, result.prompt) == (None, None)


def test_a_smaller_window_is_what_limits() -> None:
    alone, full = two_stages(1).predicted, two_stages().predicted
    assert alone.latency_s == full.latency_s
    for many in (1, 2, 3):
        assert two_stages(many).predicted.throughput_per_s == pytest.approx(many / full.latency_s)
    assert two_stages(50).predicted.throughput_per_s == full.throughput_per_s
    far = planner_of(
        work_of((1, 1), (1,)), [device("a", (1e-3,))], all_links(("a",), LinkSpeed(0.5, 1e6))
    ).front()[0][0].predicted  # fmt: skip
    assert far.in_flight == MOST_IN_FLIGHT
    assert far.throughput_per_s == pytest.approx(64 / far.latency_s)
    assert filling(0.0, 0.0) == MOST_IN_FLIGHT


def test_as_many_are_in_flight_as_a_pipeline_takes() -> None:
    assert MOST_IN_FLIGHT == MOST_WINDOW


def test_the_owner_hands_over_to_others_only() -> None:
    work = work_of((10, 5, 20), (1, 1))
    planner = planner_of(work, [device(LOCAL, (1, 1)), device("a", (1, 1))], all_links(("a",), LinkSpeed(0.5, 10)))
    own, other = planner.singles()
    assert own.predicted.latency_s == 2
    assert own.predicted.enter_s == own.predicted.stages[0].transfer_s == 0
    assert other.predicted.latency_s == pytest.approx(0.5 + 1 + 2 + 0.5 + 2)
    both, _ = planner.front(("throughput",))
    assert both[0].plan.devices == (LOCAL,)  # another would be held up by 20 bytes on their way back, as long
    assert planner.only_own().front(("latency",))[0][0].plan == own.plan


def test_a_real_graph_in_bytes() -> None:
    model = mobilenet_v2(1)
    graph = OnnxGraph.from_model(model)
    cuts = choose(graph, "blocks")
    work = OnnxWork.from_graph(graph, cuts)
    assert work.segments == len(cuts) + 1
    assert work.crossing_bytes[0] == 4 * 3 * 224 * 224
    assert work.crossing_bytes[1:-1] == tuple(cut.payload_bytes for cut in cuts)
    assert work.crossing_bytes[-1] == 4 * 1000
    assert work.weights_before[-1] == sum(graph.weight_bytes.values()) + sum(n for _, _, n in work.again)
    for start, stop in ((0, 1), (0, work.segments), (3, 9), (5, 6)):
        weights = graph.stage_weight_bytes(work.positions[start], work.positions[stop])
        assert work.held_bytes(start, stop) == weights + max(work.activation_bytes[start:stop])
    half = OnnxWork.from_graph(graph, cuts, "f16")
    assert half.crossing_bytes[0] == work.crossing_bytes[0]
    assert all(2 * a == b for a, b in zip(half.crossing_bytes[1:-1], work.crossing_bytes[1:-1], strict=True))
    for wire in WIRES:
        assert OnnxWork.from_graph(graph, cuts, wire).crossing_bytes[1] <= work.crossing_bytes[1]


def test_weights_that_segments_share_count_once() -> None:
    graph = OnnxGraph.from_model(chain(("Relu", "a"), ("Relu", "b"), ("Relu", "c"), ("Relu", "d")))
    nodes = [replace(node, weights=("w",), weight_bytes=8) if i != 1 else node for i, node in enumerate(graph.nodes)]
    work = OnnxWork.from_graph(replace(graph, nodes=tuple(nodes), weight_bytes={"w": 8}), choose(graph, "all"))
    most = max(work.activation_bytes)
    assert [work.held_bytes(0, stop) - most for stop in (1, 2, 3, 4)] == [8, 8, 8, 8]
    assert [work.held_bytes(start, 4) - most for start in (1, 2, 3)] == [8, 8, 8]
    assert work.held_bytes(1, 2) == most


# ------------------------------------------------------------------------------------------------------ as published


@cache
def network(name: str) -> tuple[OnnxWork, tuple[float, ...]]:
    """A network with its candidate cuts, and the seconds of its segments on one core, estimated."""
    graph = OnnxGraph.from_model(NETWORKS[name](1))
    cuts = choose(graph, "auto")
    ends = (0, *(cut.position for cut in cuts), len(graph.nodes))
    return OnnxWork.from_graph(graph, cuts), tuple(sum(map(node_seconds, graph.nodes[a:b])) for a, b in pairwise(ends))


def fronts(name: str, speeds: dict[str, float], link: LinkSpeed) -> OnnxPlanner:
    work, seconds = network(name)
    devices = [device(who, [second / by for second in seconds], 3e-4) for who, by in speeds.items()]
    return planner_of(work, devices, all_links(tuple(speeds), link))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("speeds", [{LOCAL: 1, "a": 1}, {LOCAL: 1, "a": 2, "b": 0.5}, {LOCAL: 0.2, "a": 1, "b": 3}])
def test_the_slower_the_link_the_less_crosses(name: str, speeds: dict[str, float]) -> None:
    """From a LAN to 5 and to 1.5 Mbit/s with 200 ms, the largest payload at the throughput's optimum never grows."""
    moved = []
    for link in (LAN, LinkSpeed(0.2, 5e6 / 8), LinkSpeed(0.2, 1.5e6 / 8)):
        planner = fronts(name, speeds, link)
        [best], _ = planner.front(("throughput",))
        whom = pairwise((LOCAL, *best.plan.devices, LOCAL))
        crossing = [planner.work.crossing_bytes[i] for i in planner.work.bounds(best.plan)]
        moved.append(max(n if a != b else 0 for (a, b), n in zip(whom, crossing, strict=True)))
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > moved[-1]


@pytest.mark.parametrize("name", NETWORKS)
def test_the_front_collapses_to_a_device_that_is_ten_times_faster(name: str) -> None:
    equal, _ = fronts(name, {LOCAL: 1, "a": 1, "b": 1}, LAN).front()
    faster, _ = fronts(name, {LOCAL: 1, "a": 10, "b": 1}, LAN).front()
    assert len(faster) < len(equal)
    assert any("a" not in item.plan.devices for item in equal)
    for item in faster:
        assert "a" in item.plan.devices
        [stage] = [stage for stage in item.plan.stages if stage.device == "a"]
        assert len(stage.nodes) > item.plan.n_nodes / 2
    assert faster[0].plan.devices == ("a",)  # alone it is the fastest


# ---------------------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_planned() -> None:
    work, link = work_of((1, 1, 1), (1, 1)), all_links(("a", "b"))
    a, b = device("a", (1, 1)), device("b", (1, 1))
    for devices, words in (
        ([], "expected 1 to 63, each once"),
        ([a, a], "the devices a, a; expected 1 to 63, each once"),
        ([device("a", (1,))], "a: 1 segments were measured, 2 are to be placed; measure it again"),
    ):
        with pytest.raises(PlanError, match=words):
            planner_of(work, devices, link)
    with pytest.raises(PlanError, match="0 inputs in flight; expected 1 to 64"):
        planner_of(work, [a], link, 0)
    planner = planner_of(work, [replace(a, watts=None), b], link)
    with pytest.raises(PlanError, match="the objective 'ttft' of an ONNX model; known are latency, throughput"):
        planner.front(("ttft",))
    with pytest.raises(PlanError, match="give watts of a in the cluster file"):
        planner.front(("energy",))
    with pytest.raises(PlanError, match="the link from a to b was not measured"):
        planner_of(work, [a, b], Links({p: LAN for p in link.between if p != ("a", "b")})).front()
    assert planner_of(work, [replace(a, memory_bytes=1)], link).front() == ([], True)
    with pytest.raises(PlanError, match="no finite time"):
        device("a", (1, float("nan")))
    with pytest.raises(PlanError, match="the wire type 'q1'; known are f32"):
        OnnxWork.from_graph(OnnxGraph.from_model(chain(("Relu", "a"))), [], "q1")


def test_plans_that_were_not_measured() -> None:
    work, total = work_of((1, 1, 1), (1, 1)), {"a": device("a", (1, 1))}
    odd = OnnxPlan("m", "", 4, (OnnxStage("a", Range(0, 1)), OnnxStage("b", Range(1, 4))))
    with pytest.raises(PlanError, match=r"the plan cuts 4 nodes at \[1\]; measured are 4 nodes with cuts at \[2\]"):
        predict(odd, work, total, all_links(("a", "b")))
    whole = OnnxPlan("m", "", 4, (OnnxStage("b", Range(0, 4)),))
    with pytest.raises(PlanError, match="b was not measured; measured are a"):
        predict(whole, work, total, all_links(("a", "b")))
    assert (
        planner_of(work, [replace(total["a"], watts=None)], all_links(("a",))).front()[0][0].predicted.energy_j is None
    )
