"""Test the planner: it equals an enumeration, its fronts are Pareto fronts, and published findings about plans hold."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.planning.arrange import allreduce_s
from partition.errors import PlanError
from partition.plan.plan import LOCAL, Plan, Range, Sizes, Stage
from partition.plan.tensor import Limits
from partition.predict.cost import Work
from partition.predict.hysteresis import PLAN
from partition.predict.objectives import SEARCHED
from partition.predict.predict import predict
from partition.predict.speeds import Links, LinkSpeed
from partition.search.explain import best, kind_of
from partition.search.planner import Placed, Planner
from partition.search.stage_group import StageGroup
from quant.front import non_dominated
from tests.support.planning import MIB, MS, best_of, device, linked, model, work
from tests.support.random_plans import NAMES, Case, objectives
from tests.support.thorough import some

BOTH = ("latency", "throughput")
Vector = tuple[float, ...]


def front(vectors: Sequence[Vector]) -> list[Vector]:
    """Those that no other is as good as in everything, up to rounding."""
    saved: list[Vector] = []
    for item in sorted({tuple(float(f"{value:.10g}") for value in vector) for vector in vectors}):
        if not any(all(a <= b for a, b in zip(other, item, strict=True)) for other in saved):
            saved.append(item)
    return saved


@pytest.mark.parametrize(
    ("seed", "cases", "layers", "devices"),
    [
        (1850, some(200, 1850), (1, 3), (1, 2)),
        (150, some(15, 150), (2, 4), (2, 3)),
        (4, some(1, 4), (6, 7), (4, 4)),
    ],
)
def test_the_planner_finds_what_trying_everything_finds(
    seed: int, cases: int, layers: tuple[int, int], devices: tuple[int, int]
) -> None:
    rng = np.random.default_rng(seed)
    empty, names = 0, SEARCHED
    for i in range(cases):
        case = Case(
            rng, int(rng.integers(*layers, endpoint=True)), int(rng.integers(*devices, endpoint=True)), i % 3 > 0
        )
        expected = BOTH if i % 2 else (names[i // 2 % len(names)],)
        if expected == ("energy",) and case.speeds[0].watts is None:
            with pytest.raises(PlanError, match="energy needs the power of each device; give watts of local"):
                case.planner().front(expected)
            continue
        result, exact = case.planner().front(expected)
        every = case.all()
        tolerance = {"rel": 1e-9, "abs": 0.5 if expected == ("memory",) else 0.0}  # predicted are whole bytes
        assert exact
        assert front([placed.objectives for placed in result]) == [
            pytest.approx(item, **tolerance)
            for item in front([tuple(said[name] for name in expected) for said in every])
        ]
        for placed in result:  # and the plans are what they are said to be
            said = objectives(case.predict(placed.plan, placed.microbatches))
            assert placed.objectives == pytest.approx(tuple(said[name] for name in expected), **tolerance)
        empty += not every
    assert 0.02 < empty / cases < 0.3 or cases < 100


# ----------------------------------------------------------------------------------------------------------- fronts


small = st.integers(0, 3).map(float)


@given(st.lists(st.tuples(small, small) | st.tuples(small, small, small), max_size=8))
def test_nothing_on_a_front_is_matched_by_another(drawn: list[Vector]) -> None:
    width = len(drawn[0]) if drawn else 2
    some = [Placed(None, i, item) for i, item in enumerate(drawn) if len(item) == width]  # type: ignore[arg-type]
    saved = non_dominated(some, lambda item: item.objectives)

    def no_worse(a: Placed, b: Placed) -> bool:
        return all(x <= y for x, y in zip(a.objectives, b.objectives, strict=True))

    assert not any(no_worse(a, b) for a in saved for b in saved if a is not b)
    assert all(any(no_worse(a, b) for a in saved) for b in some)
    for item in saved:  # of equals the first
        assert item.microbatches == min(other.microbatches for other in some if other.objectives == item.objectives)


def least(planner: Planner, objective: str) -> float:
    result, _ = planner.front((objective,))
    return result[0].objectives[0] if result else float("inf")


def test_one_more_device_never_makes_it_worse() -> None:
    rng = np.random.default_rng(1)
    better = 0
    for _ in range(some(5, 10)):
        case = Case(rng, int(rng.integers(2, 5)), 4, tensor=True)
        for objective in ("latency", "throughput", "ttft", "memory"):
            by_count = [least(Planner(case.work, case.speeds[:n], case.links, "m", ""), objective) for n in range(1, 5)]
            assert all(after <= before for before, after in pairwise(by_count))
            better += by_count[-1] < by_count[0]
    assert better > some(5, 10)


@pytest.mark.parametrize("disk", [None, 1e9])
def test_a_device_without_memory_is_never_used(disk: float | None) -> None:
    speeds = [device(), device("b", MS / 10, memory_bytes=0, disk_bytes_per_s=disk), device("c", MS / 2)]
    planner = Planner(work(5, concurrency=2), speeds, linked(NAMES[:3]), "m", "")
    result, _ = planner.front(BOTH)
    assert result
    assert {name for placed in result for name in placed.plan.devices} == {LOCAL, "c"}


def test_a_fast_device_with_little_memory_has_the_part_that_fits() -> None:
    """By speed it would have three quarters of 68 MiB; neither can page."""
    speeds = [device(memory_bytes=34 * MIB), device("b", 3 * MS, memory_bytes=44 * MIB)]
    to_do = work(model(8, heads=32, kv=32, ff=256, embd=512), context=1)
    planner = Planner(to_do, speeds, linked(NAMES[:2]), "m", "", pipeline=False)
    (result,), _ = planner.front(("latency",))
    assert kind_of(result.plan) == "tensor"
    current = predict(result.plan, to_do, {s.device: s for s in speeds}, planner.links).memory_bytes
    assert 30 * MIB < current[LOCAL] <= 34 * MIB
    assert current["b"] <= 44 * MIB
    group = StageGroup(to_do, speeds, planner.links, (0, 1))
    for stop in (6, 7, 8):  # stages with the head and without it
        assert [shard.memory for shard in group.shards(0, stop)] == [None, None]


@given(
    stages=st.integers(2, 4), layers=st.integers(4, 9), latency_s=st.floats(0, 2 * MS), layer_s=st.floats(MS, 5 * MS)
)
@settings(max_examples=20)
def test_throughput_is_not_made_of_latency(stages: int, layers: int, latency_s: float, layer_s: float) -> None:
    """Stages all have something to do; the same holds of plans: the best of one need not be that of the other."""
    speeds = [device(name, layer_s, by_row=True) for name in NAMES[:stages]]
    links = linked(NAMES[:stages], LinkSpeed(latency_s, 1e9))
    to_do = work(layers, concurrency=stages)
    planner = Planner(to_do, speeds, links, "m", "", tensor=False)
    cuts = [round(i * layers / stages) for i in range(stages + 1)]
    built = [
        Stage(Range(*cut), StageGroup(to_do, speeds, links, (i,)).shards(*cut)) for i, cut in enumerate(pairwise(cuts))
    ]
    plan = Plan("m", "", to_do.limits.sizes, tuple(built))
    total = {speed.device: speed for speed in speeds}
    predicted = predict(plan, to_do, total, links)
    busiest = max(stop - start for start, stop in pairwise(cuts)) * layer_s
    transfers = predicted.latency_s - layers * layer_s
    assert transfers >= stages * latency_s
    assert predicted.throughput_per_s == pytest.approx(min(1 / busiest, stages / predicted.latency_s), rel=1e-3)
    assert predicted.throughput_per_s > 1.2 / predicted.latency_s
    alone = predict(plan, work(layers), total, links)  # of one request
    assert alone.throughput_per_s == pytest.approx(1 / alone.latency_s)
    result, _ = planner.front(BOTH)
    assert [kind_of(placed.plan) for placed in (result[0], result[-1])] == ["single", "pipeline"]


def test_what_is_above_a_cap_is_left_out() -> None:
    planner = Planner(
        work(8, concurrency=2),
        [device(by_row=True), device("b", by_row=True)],
        linked(NAMES[:2], LinkSpeed(MS, 1e9)),
        "m",
        "",
        tensor=False,
    )
    result, _ = planner.front(BOTH)
    assert [kind_of(placed.plan) for placed in result] == ["single", "pipeline"]
    for i in range(2):
        cap = [float("inf")] * 2
        cap[i] = result[i].objectives[i]
        assert planner.front(BOTH, caps=cap)[0] == [result[i]]
    assert planner.front(BOTH, caps=[0.0, 0.0])[0] == []


def test_requests_form_groups_that_can_be() -> None:
    """Six in four groups are two in each of three, as `predict` and the scheduler have it."""
    two = [device(by_row=True), device("b", by_row=True)]
    planner = Planner(work(4, concurrency=6), two, linked(NAMES[:2], LinkSpeed(MS, 1e6)), "m", "", tensor=False)
    for request, built in ((4, 3), (5, 3), (6, 6), (8, 6)):
        result, _ = planner.front(BOTH, microbatches=[request])
        assert [kind_of(placed.plan) for placed in result] == ["single", "pipeline"]
        for placed in result:
            total = predict(placed.plan, planner.work, {s.device: s for s in two}, planner.links, request)
            assert placed.microbatches == total.microbatches == (built if len(placed.plan.stages) > 1 else 1)
            assert placed.objectives == pytest.approx((total.latency_s, 1 / total.throughput_per_s), rel=1e-9)


def test_more_devices_than_all_groups_are_tried_of() -> None:
    names = [LOCAL, *(f"d{i}" for i in range(9))]
    speeds = [device(name, MS * (1 + i % 3)) for i, name in enumerate(names)]
    planner = Planner(work(12, concurrency=8), speeds, linked(names, LinkSpeed(1e-4, 1e9)), "m", "")
    result, _ = planner.front(BOTH, microbatches=[8])
    assert result[0].objectives[0] < 12 * MS
    assert min(placed.objectives[1] for placed in result) < 12 * MS / 4  # with 7.3 of them at work it would be 1.6 ms
    for placed in result:
        said = objectives(predict(placed.plan, planner.work, {s.device: s for s in speeds}, planner.links, 8))
        assert placed.objectives == pytest.approx((said["latency"], said["throughput"]), rel=1e-9)


# ---------------------------------------------------------------------------------------------- which one is taken


def test_one_device_is_taken_where_others_bring_little() -> None:
    """And it is said in words. A pipeline of two with a request at a time is never better than its faster device."""
    near, far = (linked(NAMES[:2], LinkSpeed(seconds, 1e9)) for seconds in (1e-5, 50 * MS))
    two = [device(), device("b")]
    plan, why = best_of(Planner(work(4), two, far, "m", ""))
    assert plan.world_size == 1
    assert why == (
        "use one device: 4.00 ms a token on this device alone;"
        " with the others it is predicted to be less than 5 % better"
    )
    plan, why = best_of(Planner(work(4), two[:1], far, "m", ""))
    assert why == "use one device: 4.00 ms a token on this device alone"
    plan, why = best_of(Planner(work(4), two, near, "m", ""))
    assert kind_of(plan) == "tensor"
    assert why == "tensor on 2 devices: 2.09 ms a token, 4.00 ms a token on this device alone"
    little = [device(), device("b", 25 * MS)]  # it could have one head of 32
    planner = Planner(work(model(4, heads=32, kv=32, ff=1024, embd=512)), little, linked(NAMES[:2]), "m", "")
    result, _ = planner.front(("latency",))
    assert 4 * MS / PLAN < result[0].objectives[0] < 4 * MS
    assert best(planner, "latency").plan.world_size == 1


def test_the_best_within_limits() -> None:
    two = [device(by_row=True), device("b", by_row=True)]
    planner = Planner(work(8, concurrency=2), two, linked(NAMES[:2], LinkSpeed(MS, 1e9)), "m", "", tensor=False)
    assert kind_of(best(planner, "latency").plan) == "single"
    assert kind_of(best(planner, "throughput").plan) == "pipeline"
    assert kind_of(best(planner, "throughput", {"latency": 9 * MS}).plan) == "single"
    assert kind_of(best(planner, "latency", {"throughput": 6 * MS}).plan) == "pipeline"
    assert kind_of(best(planner, "latency", {"memory": 50.0 * MIB}).plan) == "pipeline"
    with pytest.raises(PlanError) as raised:
        best(planner, "latency", {"latency": 5 * MS})
    assert str(raised.value) == (
        "no plan has latency of at most 5.00 ms a token; the best latency there is is 8.00 ms a token"
    )


def test_what_does_not_fit_is_told_with_need_and_have() -> None:
    speeds = [
        device(memory_bytes=20 * MIB, runtime_bytes=10 * MIB),
        device("b", memory_bytes=MIB, runtime_bytes=2 * MIB),
    ]
    planner = Planner(work(4, context=2048), speeds, linked(NAMES[:2]), "m", "")
    with pytest.raises(PlanError) as raised:
        best_of(planner)
    # KV cache: 4 layers x 2048 tokens x 4 heads x (16 + 16) x 2 bytes
    assert str(raised.value) == (
        "no plan fits: the model needs 38 MiB (weights 32, KV cache 2, head 4), and beside its own process local has"
        " 10; b has 0; use a smaller type or a smaller --context, or add a device"
    )


def test_what_may_be_asked_for() -> None:
    three = [device(name) for name in NAMES[:3]]
    with pytest.raises(PlanError, match="the first device must be the owner's own"):
        Planner(work(4), three[1:], linked(NAMES), "m", "")
    with pytest.raises(PlanError, match="the first device must be the owner's own"):
        Planner(work(4), [], linked(NAMES), "m", "")
    planner = Planner(work(4, concurrency=6), three, linked(NAMES), "m", "", pipeline=False)
    with pytest.raises(PlanError, match="the objective 'speed'; known are latency, throughput, ttft, memory, energy"):
        planner.front(("speed",))
    assert planner.microbatches == [1, 2, 3, 6]  # 4 groups of 2 would be 3
    assert {kind_of(placed.plan) for placed in planner.front(("latency", "memory"))[0]} == {"tensor"}
    assert planner.shares() == pytest.approx([1 / 3] * 3)
    assert planner.only_own().front(("latency",))[0][0].plan.devices == (LOCAL,)
    apart = Planner(work(4, concurrency=6), three, linked(NAMES), "m", "", tensor=False)
    assert {kind_of(placed.plan) for placed in apart.front(BOTH)[0]} <= {"single", "pipeline"}
    with pytest.raises(PlanError, match=r"the link from local to b was not measured; probe the devices again"):
        Planner(work(4), three, Links({}), "m", "")


# ------------------------------------------------------------------------------------------------------- published


def llm(layers: int, layer_s: float, latency_s: float, *memory: int) -> Planner:
    """TinyLlama's sizes at Q4_0, of any depth, on two equal devices."""
    limits = Limits(
        Sizes(layers, 32, 4, 5632, 32000), 1, 32, 147456.0, 147456.0, 3456.0, 1680.0, (24_772_608.0,) * layers
    )
    shape, _ = model([24_772_608 / MIB] * layers, heads=32, kv=4, ff=5632, vocab=32000, embd=2048)
    to_do = Work(shape, limits, 2048, 0, 128, 1, work(1).kv, allreduce_s)
    speeds = [
        device(name, layer_s, memory_bytes=n) for name, n in zip(NAMES, memory or (1 << 40, 1 << 40), strict=False)
    ]
    return Planner(to_do, speeds, linked(NAMES[:2], LinkSpeed(latency_s, 1e9)), "m", "")


@pytest.mark.parametrize(("layers", "layer_s"), [(22, 1.2 * MS), (32, 4 * MS), (8, 0.4 * MS)])
@pytest.mark.parametrize("short", [False, True])
def test_tensor_parallel_gives_way_where_latency_says(layers: int, layer_s: float, short: bool) -> None:
    """d* is near compute / (4 x layers): two sums a layer cost 2 x layers x d, and two gain half of the compute.

    Above it one device is best; where neither has room for the whole, a pipeline is.
    """
    compute_s = layers * layer_s
    memory = (round(0.6 * layers * 24_772_608 + 50e6),) * 2 if short else ()

    def kind(latency_s: float) -> str:
        result, _ = llm(layers, layer_s, latency_s, *memory).front(("latency",))
        return kind_of(result[0].plan)

    low, high = 1e-6, 1.0
    assert kind(low) == "tensor"
    assert kind(high) == ("pipeline" if short else "single")
    for _ in range(9):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if kind(middle) == "tensor" else (low, middle)
    assert high == pytest.approx(compute_s / (4 * layers), rel=0.25)


def test_device_that_cannot_share_layers_has_whole_layers() -> None:
    """Sharing would be faster on both, so it is chosen for the two that can."""
    planner = llm(22, 1.2 * MS, 1e-6, *(round(0.6 * 22 * 24_772_608 + 50e6),) * 2)
    for whole in (1, 2):
        speeds = [*planner.speeds, replace(planner.speeds[1], device="c", name="c")]
        speeds[whole] = replace(speeds[whole], shares_layers=False)
        links = linked([speed.device for speed in speeds], LinkSpeed(1e-6, 1e9))
        result, _ = planner.like(speeds, links).front(("latency",))
        plans = [placed.plan for placed in result]
        groups = [{shard.device for shard in stage.shards} for plan in plans for stage in plan.stages]
        assert all(len(group) == 1 for group in groups if speeds[whole].device in group)
        assert max(map(len, groups)) == 2


def test_a_device_ten_times_as_fast_has_nearly_all_layers() -> None:
    limits = model(22)
    speeds = [device(layer_s=10 * MS), device("b", MS), device("c", 10 * MS)]
    for tensor in (False, True):
        planner = Planner(
            work(limits, concurrency=2), speeds, linked(NAMES[:3], LinkSpeed(2e-4, 1e8)), "m", "", tensor=tensor
        )
        result, _ = planner.front(BOTH)
        assert result
        for placed in result:
            done = dict.fromkeys(NAMES, 0.0)
            for stage in placed.plan.stages:
                for shard in stage.shards:
                    done[shard.device] += len(stage.layers) * len(shard.ff) / 64
            assert done["b"] > 0.75 * 22
        assert done["c"] <= 2.5 or not tensor


@pytest.mark.parametrize(("room", "plans_the_owner"), [(2 * MIB, True), (2 * MIB - 1, False)])
def test_thin_owner_needs_memory_for_its_own_process(room: int, plans_the_owner: bool) -> None:
    """The owner has no room for a layer. Its process alone takes 2 MiB, which must fit exactly."""
    own = replace(device(LOCAL, MS), memory_bytes=room, runtime_bytes=2 * MIB)
    speeds = [own, device("b", MS), device("c", MS)]
    links = linked([speed.device for speed in speeds], LinkSpeed(0.1 * MS, 1e9))
    front, _ = Planner(work(4), speeds, links, "m", "").front(("latency",))
    assert bool(front) == plans_the_owner
    assert all(placed.plan.thin_owner for placed in front)
