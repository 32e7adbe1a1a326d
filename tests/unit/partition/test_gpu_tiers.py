"""Plans with devices whose GPU holds a part of a stage: compared with brute force, and with devices without a GPU."""

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.plan.plan import LOCAL, Range, Shard
from partition.predict.cost import GroupCost, Work
from partition.predict.prediction import Prediction
from partition.predict.residency import LayerBytes, place_on_gpu
from partition.predict.speeds import DeviceSpeed, Links, speed_of, speed_to_json
from partition.predict.tiers import bytes_before, on_gpu
from partition.search.phases import Phases
from partition.search.planner import Planner
from tests.support.planning import F16, MIB, MS, device, linked, mesh_s, model, work
from tests.support.random_plans import Case, objectives
from tests.support.thorough import some

WHOLE = Shard(LOCAL, Range(0, 8), Range(0, 64), Range(0, 1024))
LAYERS = st.lists(st.integers(1, 12), min_size=1, max_size=5)
EXPERTS, USED = 8, 2


def with_experts(sizes: list[int], experts: list[int], **to_do: Any) -> Work:
    """Dense weights and all experts of each layer, in MiB. A token uses a quarter of the experts."""
    shape, limits = model([dense + n * USED / EXPERTS for dense, n in zip(sizes, experts, strict=True)])
    weights = tuple((dense + n) * MIB for dense, n in zip(sizes, experts, strict=True))
    shape = replace(shape, n_experts=EXPERTS, n_experts_used=USED, layer_bytes=weights)
    return replace(work((shape, limits), **to_do), kv=F16, allreduce_s=mesh_s)


def with_gpu(speed: DeviceSpeed, n_bytes: float, factor: float = 0.25, fixed: int = 0) -> DeviceSpeed:
    """The device with a GPU on which everything takes `factor` of the time."""
    gpu = replace(speed.times(factor), memory_bytes=round(n_bytes), runtime_bytes=fixed, disk_bytes_per_s=None)
    return replace(speed, gpu=gpu)


def seconds_by_hand(to_do: Work, speed: DeviceSpeed, start: int, stop: int, room: int, head: int) -> float:
    """Least seconds of a row over all placements of these layers that fit and read most from the GPU."""
    assert speed.gpu is not None
    n, share = stop - start, USED / EXPERTS if to_do.shape.n_experts else 1.0
    average = sum(to_do.limits.layer_bytes) / len(to_do.limits.layer_bytes)
    parts = to_do.layer_parts[start:stop]
    best, best_s = -1.0, 0.0
    for first, chosen in product(range(n + 1), product((False, True), repeat=n)):
        if any(chosen[:first]):
            continue
        used = head if first < n else 0
        used += sum(part.dense + part.kv for part in parts[first:])
        used += sum(part.experts for part, there in zip(parts, chosen, strict=True) if there)
        read: float = sum(part.dense + part.kv for part in parts[first:])
        read += share * sum(part.experts for part, there in zip(parts, chosen, strict=True) if there)
        if (used > room and first < n) or read <= best + 1e-6:
            continue
        seconds = (speed.gpu if first < n else speed).step_s.at(1)
        for i, part in enumerate(parts):
            of_dense, of_experts = (speed.gpu if there else speed for there in (i >= first, chosen[i]))
            seconds += part.dense / average * of_dense.layer_s.at(1)
            seconds += share * part.experts / average * of_experts.layer_s.at(1)
            units = (part.dense + share * part.experts) / average
            seconds += units * to_do.depth * of_dense.token_s
        if stop == to_do.limits.sizes.layers:
            seconds += (speed.gpu if first < n else speed).head_s.at(1)
        best, best_s = read, seconds
    return best_s


@settings(max_examples=some(100, 2000), deadline=None)
@given(LAYERS, st.integers(0, 30), st.floats(0, 1.2), st.sampled_from([0, 50]), st.floats(0.05, 1), st.data())
def test_a_stage_takes_what_brute_force_finds(
    dense: list[int], experts: int, part: float, depth: int, factor: float, data: st.DataObject
) -> None:
    n = len(dense)
    of_experts = data.draw(st.lists(st.integers(0, experts), min_size=n, max_size=n)) if experts else [0] * n
    to_do = (
        with_experts(dense, of_experts, depth=depth) if experts else work([float(size) for size in dense], depth=depth)
    )
    room = round(part * (sum(to_do.shape.layer_bytes) + to_do.kv_before[-1] + to_do.shape.head_bytes))
    speed = with_gpu(device(layer_s=8 * MS, head_s=3 * MS, step_s=MS, token_s=1e-5), room + 7, factor, fixed=7)
    group = GroupCost(to_do, [speed], [WHOLE], Links({}))
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    k, last = to_do.before[stop] - to_do.before[start], stop == n
    seconds = group.seconds(k, 1, last, group.on_gpu(start, stop))
    expected = seconds_by_hand(to_do, speed, start, stop, room, to_do.shape.head_bytes if last else 0)
    assert float(seconds) == pytest.approx(expected, rel=1e-5)
    starts = np.arange(stop)
    each = group.seconds(to_do.before[stop] - np.array(to_do.before)[:stop], 1, last, group.on_gpu(starts, stop))
    assert each[start] == pytest.approx(float(seconds))


@settings(max_examples=some(300, 2000), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=7),
    st.floats(0.01, 1),
    st.integers(0, 120),
    st.integers(0, 20),
)
def test_a_stage_has_on_the_gpu_what_the_loader_places_there(
    sizes: list[tuple[int, int, int]], share: float, room: int, head: int
) -> None:
    layers, n = [LayerBytes(*size) for size in sizes], len(sizes)
    starts, stops = np.triu_indices(n + 1, 1)
    parts = on_gpu(bytes_before(layers, 1.0, 1.0), share, room, head, starts, stops)
    for i, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        own = layers[start:stop]
        placement = place_on_gpu(own, room - head * (stop == n), share)
        dense = sum(own[k].dense for k in placement.dense)
        experts = sum(own[k].experts for k in placement.experts)
        assert (parts.weights[i], parts.kv[i]) == (dense + experts, sum(own[k].kv for k in placement.dense))
        assert parts.head[i] == bool(placement.dense)
        read = sum(layer.dense + share * layer.experts for layer in own)
        assert parts.layers[i] * max(read, 1) == pytest.approx(dense + share * experts)


def figures(planner: Planner, *names: str) -> list[tuple[float, ...]]:
    return [placed.objectives for placed in planner.front(names)[0]]


def test_a_gpu_without_memory_is_no_gpu_and_one_that_holds_all_has_the_gpus_times() -> None:
    rng, names = np.random.default_rng(5), ("latency", "throughput", "ttft", "memory")
    for _ in range(some(8, 300)):
        case = Case(rng, int(rng.integers(1, 5)), int(rng.integers(1, 3)), tensor=bool(rng.integers(2)))
        speeds = [replace(speed, memory_bytes=1 << 30, disk_bytes_per_s=None) for speed in case.speeds]
        speeds = [replace(speed, step_s=speeds[0].step_s.times(0)) for speed in speeds]  # a thin owner has only this
        on_gpus = [speed.times(0.3) for speed in speeds]
        for n_bytes, same in ((0, speeds), (1 << 40, on_gpus)):
            tiered = [with_gpu(speed, n_bytes, 0.3) for speed in speeds]
            expected, result = (Planner(case.work, each, case.links, "m", "") for each in (same, tiered))
            for name in names:
                assert figures(result, name) == [pytest.approx(each) for each in figures(expected, name)]


def test_more_gpu_memory_never_makes_a_plan_slower() -> None:
    rng = np.random.default_rng(6)
    faster = 0
    for i in range(some(6, 200)):
        n = int(rng.integers(2, 5))
        experts = [int(rng.integers(0, 30)) for _ in range(n)] if i % 2 else [0] * n
        to_do = with_experts([int(rng.integers(1, 9)) for _ in range(n)], experts, prompt=64)
        to_do = replace(to_do, context=0)  # with long contexts the rule weighs the KV cache, too
        whole = sum(to_do.shape.layer_bytes) + to_do.shape.head_bytes
        own, other = device(layer_s=5 * MS, head_s=2 * MS, step_s=MS), device("b", 2 * MS, head_s=MS, step_s=MS)
        paged = replace(own, memory_bytes=round(whole * rng.uniform(0.3, 1)), disk_bytes_per_s=1e9)
        for objective in ("latency", "ttft"):
            seconds = []
            for room in np.linspace(0, 1.1 * whole, 8):
                speeds = [with_gpu(paged if i % 3 else own, room), other]
                planner = Planner(to_do, speeds, linked([LOCAL, "b"]), "m", "", tensor=False)
                seconds.append(planner.front((objective,))[0][0].objectives[0])
            assert all(after <= before * (1 + 1e-9) for before, after in pairwise(seconds))
            faster += seconds[-1] < seconds[0]
    assert faster


@pytest.mark.parametrize("name", ["latency", "throughput", "ttft", "memory"])
def test_the_planner_finds_what_trying_everything_finds(name: str) -> None:
    rng = np.random.default_rng(7)
    for i in range(some(8, 300)):
        case = Case(rng, int(rng.integers(1, 5)), int(rng.integers(1, 4)), tensor=i % 2 > 0)
        whole = sum(case.work.shape.layer_bytes) + case.work.shape.head_bytes
        case.speeds = [
            with_gpu(speed, whole * rng.uniform(0, 1), rng.uniform(0.1, 1.5)) if rng.random() < 0.7 else speed
            for speed in case.speeds
        ]
        result, exact = case.planner().front((name,))
        every = case.all()
        assert exact
        assert bool(result) == bool(every)
        if every:
            tolerance = {"rel": 1e-9, "abs": 0.5 if name == "memory" else 0.0}
            assert result[0].objectives[0] == pytest.approx(min(said[name] for said in every), **tolerance)
            said = objectives(case.predict(result[0].plan, result[0].microbatches))
            assert result[0].objectives[0] == pytest.approx(said[name], **tolerance)


def test_what_the_gpu_holds_is_neither_in_memory_nor_read_from_disk() -> None:
    """4 layers of 8 MiB: two on the GPU behind the head, and of the others half a layer is on disk."""
    to_do = replace(work(4), context=0)
    own = device(layer_s=MS, head_s=MS, memory_bytes=round(20.5 * MIB), runtime_bytes=MIB, disk_bytes_per_s=1e9)
    planner = Planner(to_do, [with_gpu(own, 21 * MIB)], Links({}), "m", "")
    predicted = planner.predict(planner.front(("latency",))[0][0].plan)
    [stage] = predicted.stages
    assert stage.gpu_bytes == {LOCAL: 16 * MIB}  # the head is the token table, too, which is in memory
    assert stage.memory_bytes == {LOCAL: round(36.5 * MIB)}
    assert stage.paged_bytes == MIB // 2
    assert Prediction.from_json(predicted.to_json()) == predicted


def test_layers_of_a_plan_on_the_gpu_are_those_that_the_plan_names() -> None:
    own = with_gpu(device(layer_s=4 * MS, head_s=4 * MS), 1 << 30)
    planner = Planner(work(4), [own], Links({}), "m", "")
    plan = planner.front(("latency",))[0][0].plan
    [stage], [shard] = plan.stages, plan.stages[0].shards
    seconds = [
        planner.predict(replace(plan, stages=(replace(stage, shards=(replace(shard, gpu_layers=n),)),))).latency_s
        for n in (0, 1, 2, 5, 99)
    ]
    assert seconds == pytest.approx([20 * MS, 17 * MS, 14 * MS, 5 * MS, 5 * MS], rel=1e-5)


def test_figures_with_a_gpu_survive_json() -> None:
    speed = with_gpu(replace(device(), disk_bytes_per_s=1e9), 5 * MIB)
    assert speed_of(speed_to_json(speed), LOCAL, LOCAL, 0.0) == replace(
        speed, gpu=speed.gpu and replace(speed.gpu, name="local: gpu")
    )
    assert "gpu" not in speed_to_json(device())


def test_pairs_of_placements_have_the_times_that_are_predicted() -> None:
    """Both placements may be on one device: then the decode placement fills the GPU first."""
    rng = np.random.default_rng(8)
    shared = 0
    for _ in range(some(6, 100)):
        case = Case(rng, int(rng.integers(2, 5)), 2, tensor=False)
        whole = sum(case.work.shape.layer_bytes) + case.work.shape.head_bytes
        case.work = replace(case.work, prompt=300, concurrency=1)
        case.speeds = [with_gpu(speed, whole * rng.uniform(0.3, 1.5)) for speed in case.speeds]
        phases = Phases(case.planner())
        for placed in phases.pairs(("latency", "ttft")):
            said = objectives(case.predict(placed.plan, placed.microbatches))
            assert placed.objectives == pytest.approx((said["latency"], said["ttft"]))
            decode, prefill = (set(placement.computing_devices) for placement in placed.plan.placements)
            shared += bool(decode & prefill)
            assert not (decode & prefill and phases.exact)
    assert shared
