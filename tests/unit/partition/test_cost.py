"""Test the cost formulas of plans against figures worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.parallel import steps
from partition.errors import PlanError
from partition.plan.apportion import parts
from partition.plan.plan import LOCAL, NOTHING, Plan, Range, Shard, Stage
from partition.predict import cost
from partition.predict.cost import DiskSeconds, GroupCost
from partition.predict.predict import predict
from partition.predict.prediction import Prediction
from partition.predict.speeds import Curve, DeviceSpeed, Links, LinkSpeed
from partition.search.planner import Planner
from tests.support.planning import FAST, MIB, MS, device, linked, mesh_s, model, work

# Of a model of tests.support.planning: 8 heads, 64 columns, 1024 rows of the head, 8 MiB a layer, 4 MiB the head.
WHOLE = Shard(LOCAL, Range(0, 8), Range(0, 64), Range(0, 1024))
KV_LAYER = 2 * 128 // 2 * 2  # bytes a token: 4 heads of 16 keys and 16 values, in F16


def only(speed: DeviceSpeed, **to_do: Any) -> GroupCost:
    """One device that has a stage to itself."""
    return GroupCost(work(**to_do), [speed], [WHOLE], Links({}))


def a_pair(a: DeviceSpeed, b: DeviceSpeed, way: LinkSpeed = FAST, **to_do: Any) -> GroupCost:
    """Two that share layers: three quarters of the heads and of the head go to the first, a quarter of the columns."""
    shards = [
        Shard(a.device, Range(0, 6), Range(0, 16), Range(0, 768)),
        Shard(b.device, Range(6, 8), Range(16, 64), Range(768, 1024)),
    ]
    return GroupCost(work(**to_do), [a, b], shards, linked([a.device, b.device], way))


def in_a_row(speeds: list[DeviceSpeed], *cuts: int) -> Plan:
    """A stage for each device."""
    n = cuts[-1]
    built = []
    for speed, start, stop in zip(speeds, (0, *cuts), cuts, strict=False):
        vocab = Range(0, 1024) if stop == n else NOTHING
        built.append(Stage(Range(start, stop), (replace(WHOLE, device=speed.device, vocab=vocab),)))
    return Plan("m", "", model(n)[1].sizes, tuple(built))


def predicted(speeds: list[DeviceSpeed], links: Links, *cuts: int, many: int | None = None, **to_do: Any) -> Prediction:
    total = {speed.device: speed for speed in speeds}
    return predict(in_a_row(speeds, *cuts), work(cuts[-1], **to_do), total, links, many)


# ------------------------------------------------------------------------------------------------------- one stage


def test_one_device_takes_its_step_its_layers_and_the_head() -> None:
    first = only(device(layer_s=2 * MS, head_s=3 * MS, step_s=0.5 * MS, token_s=1e-6), depth=100)
    assert first.seconds(4, 1, False) == pytest.approx((0.5 + 4 * (2 + 0.1)) * MS)
    assert first.seconds(4, 1, True) == pytest.approx((0.5 + 4 * (2 + 0.1) + 3) * MS)
    assert first.seconds(4, 5, True) == pytest.approx((0.5 + 4 * (2 + 0.5) + 3) * MS)  # each row has what is behind it


def test_the_head_is_for_rows_that_give_logits() -> None:
    """Rows of a prompt, of which the last alone does, have nothing behind them that was not measured with them."""
    first = only(device(layer_s=MS, head_s=3 * MS, token_s=1e-6, by_row=True), depth=1000, prompt=8)
    assert first.seconds(1, 8, True) == pytest.approx((8 + 8 + 24) * MS)
    assert first.prompt_s(1, True, 8) == pytest.approx((8 + 3) * MS)


def test_a_prompt_takes_its_chunks_and_all_attention_between_them() -> None:
    """150 tokens in chunks of 64: rows of the second have 64 behind them, of the third 128; layers of 0.5 ms a row."""
    speed = device(layer_s=0.5 * MS, head_s=5 * MS, step_s=2 * MS, token_s=1e-6, by_row=True)
    first = only(speed, depth=1000, prompt=150)
    own = 2 * (64 + 64 + 22)  # a step's own part is by row, too
    attention = 64 * 64 * 1e-3 + 22 * 128 * 1e-3
    assert first.prompt_s(3, False, 64) == pytest.approx((own + 3 * (75 + attention)) * MS)
    assert first.prompt_s(3, True, 64) == pytest.approx((own + 3 * (75 + attention) + 5) * MS)
    assert first.prompt_s(3, False, 64, DiskSeconds(overlapped_s=1.0)) == 3.0  # weights are read in each of them
    waits = first.prompt_s(3, False, 64, DiskSeconds(waited_s=1.0))
    assert waits == pytest.approx(first.prompt_s(3, False, 64) + 3.0)
    first = only(device(layer_s=MS, token_s=2e-6, by_row=True), prompt=4096)
    twice = 2 * 2e-6 * sum(512 * 512 * i for i in range(8))
    assert first.prompt_s(2, False, 512) == pytest.approx(2 * 4.096 + twice)
    first = only(device(layer_s=MS, token_s=2e-6, prompt_token_s=1e-7, by_row=True), prompt=4096)
    assert first.prompt_s(2, False, 512) == pytest.approx(2 * 4.096 + twice / 20)  # rows of a chunk read keys together
    pair = a_pair(device(token_s=1e-6), device("b", token_s=1e-6), prompt=1024)
    assert pair.prompt_s(1, False, 512) == pytest.approx(pair.layer_s(512, 0) + pair.layer_s(512, 512), rel=1e-3)


def test_a_prompt_grows_with_the_square_of_its_length() -> None:
    speed = device(layer_s=MS, token_s=1e-6, by_row=True)
    short, long = (predicted([speed], Links({}), 4, prompt=n).ttft_s for n in (2048, 4096))
    assert short is not None
    assert long is not None
    assert long > 2 * short
    assert long - 2 * short == pytest.approx(4 * 1e-6 * 2048**2)


def test_two_ranks_wait_for_each_other_after_attention_and_after_the_ffn() -> None:
    """2 of a layer's 10 ms do not shrink with the share: half of these go with attention, a quarter of the weights.

    KV heads: 6 query heads have 3 of 4, 2 have one. Attention is a quarter of the layer, 0.2 for query heads.
    """
    a = device(LOCAL, 10 * MS, half_s=6 * MS, head_s=4 * MS, step_s=1 * MS, token_s=1e-6, sum_s=0.1 * MS)
    b = replace(a, device="b", layer_s=Curve(((1, 20 * MS),)), half_layer_s=Curve(((1, 12 * MS),)))
    total = a_pair(a, b, LinkSpeed(0.2 * MS, 512 / (0.3 * MS)), depth=1000)  # a row has 128 floats
    attention = max(1 + 0.75 * 0.25 * 8 + 0.75 + 0.1, 2 + 0.25 * 0.25 * 16 + 0.25 + 0.1)
    ffn = max(1 + 0.25 * 0.75 * 8 + 0.1, 2 + 0.75 * 0.75 * 16 + 0.1)
    assert total.layer_s(1, 1000) == pytest.approx((attention + ffn + 2 * 0.5) * MS)
    assert total.seconds(3, 1, False) == pytest.approx(1 * MS + 3 * total.layer_s(1, 1000))
    assert total.seconds(3, 1, True) == pytest.approx(1 * MS + 3 * total.layer_s(1, 1000) + 0.75 * 4 * MS)
    assert total.sum_s(4) == pytest.approx((0.2 + 4 * 0.3) * MS)


def test_sums_go_by_the_slowest_way() -> None:
    slow = LinkSpeed(5 * MS, 1e6)
    names = [LOCAL, "b", "c"]
    links = linked(names, but={("c", "b"): slow})
    third = [Shard(name, Range(2 * i, 2 * i + 2), Range(16 * i, 16 * i + 16), NOTHING) for i, name in enumerate(names)]
    total = GroupCost(work(), [device(name) for name in names], third, links)
    assert total.sum_s(1) == pytest.approx(mesh_s(512, 512, 3, 5 * MS, 1e6))


@given(st.floats(1e-4, 1), st.floats(0.5, 1), st.floats(0, 1))
def test_a_part_of_a_layer_lies_on_a_line_through_half_and_whole(whole: float, of_it: float, part: float) -> None:
    first = device(layer_s=whole, half_s=whole * of_it)
    assert first.part_s(1, 1) == pytest.approx(whole)
    assert first.part_s(0.5, 1) == pytest.approx(whole * of_it)
    assert first.part_s(part, 1) == pytest.approx(whole * of_it + whole * (1 - of_it) * (2 * part - 1), abs=1e-12)
    assert device(layer_s=whole, half_s=0.4 * whole).part_s(0, 1) == 0  # never less than nothing


# ----------------------------------------------------------------------------------------------- memory and paging


def test_memory_is_weights_kv_cache_and_the_process() -> None:
    first = only(device(runtime_bytes=MIB), context=2048)
    kv = first.work.kv_before[3]
    assert kv == 3 * 2048 * KV_LAYER
    assert first.bytes_needed(24 * MIB, kv, False) == [MIB + 24 * MIB + kv]
    assert first.bytes_needed(24 * MIB, kv, True) == [MIB + 24 * MIB + kv + 4 * MIB]


def test_ranks_hold_their_parts() -> None:
    a, b = device(runtime_bytes=MIB), device("b", runtime_bytes=2 * MIB)
    total = a_pair(a, b)
    needs = total.bytes_needed(80 * MIB, 8 * MIB, True)
    assert needs == pytest.approx(
        [
            MIB + 80 * MIB * (0.75 * 0.25 + 0.25 * 0.75) + 6 * MIB + 3 * MIB,
            2 * MIB + 80 * MIB * (0.25 * 0.25 + 0.75 * 0.75) + 2 * MIB + 1 * MIB,
        ]
    )


def test_ranks_that_each_have_all_of_attention() -> None:
    """The half that was measured had all heads and half of the columns. There is one sum a layer."""
    a = device(LOCAL, 10 * MS, half_s=8 * MS, token_s=1e-6, sum_s=0.1 * MS, runtime_bytes=MIB)
    b = replace(a, device="b")
    shape, shared = model(4)
    limits = replace(shared, head_bytes=0.25 * 8 * MIB / 8, kv_head_bytes=0.0, shares_heads=False)
    shards = [
        Shard(name, Range(0, 8), columns, NOTHING) for name, columns in ((LOCAL, Range(0, 48)), ("b", Range(48, 64)))
    ]
    total = GroupCost(
        work((shape, limits)), [a, b], shards, linked([LOCAL, "b"], LinkSpeed(0.2 * MS, 512 / (0.3 * MS)))
    )
    assert total.layer_s(1, 1000) == pytest.approx((6 + 1 + 0.75 * 4 + 0.1 + 0.5) * MS)
    assert total.bytes_needed(80 * MIB, 8 * MIB, False) == pytest.approx(
        [MIB + 80 * MIB * (0.25 + 0.75 * part) + 8 * MIB for part in (0.75, 0.25)]
    )


@given(st.integers(1, 4000), st.integers(2, 5))
def test_the_kv_cache_grows_with_the_context(context: int, times: int) -> None:
    first, more = (work(4, context=n).kv_before for n in (context, times * context))
    assert [times * n for n in first] == list(more)
    assert first[-1] == 4 * context * KV_LAYER


def test_what_has_no_room_is_read_while_the_rest_is_computed() -> None:
    """10 layers of 8 MiB, 4 MiB of head and 60 free: 24 are read in every pass."""

    def predicted_with(disk: float | None, layer_s: float = 2 * MS) -> Prediction:
        speed = device(layer_s=layer_s, memory_bytes=60 * MIB, disk_bytes_per_s=disk)
        return predicted([speed], Links({}), 10, context=1)

    missing = 24 * MIB + 10 * KV_LAYER
    slow, fast = predicted_with(1e9), predicted_with(1e10)
    assert slow.stages[0].paged_bytes == fast.stages[0].paged_bytes == missing
    assert slow.stages[0].compute_s == pytest.approx(missing / 1e9) == pytest.approx(0.0252, rel=0.01)
    assert fast.stages[0].compute_s == pytest.approx(20 * MS)
    assert slow.memory_bytes == {LOCAL: 60 * MIB}
    with pytest.raises(PlanError, match=r"layers 0-9 on local need 84 MiB there, and 60 are free; use a smaller type"):
        predicted_with(None)


@given(st.integers(0, 200 * MIB), st.integers(1, 7), st.floats(1, 40))
def test_a_pass_reads_only_the_experts_on_disk_that_its_rows_use(short: int, n_used: int, rows: float) -> None:
    """10 layers of 8 MiB for a token, with 8 experts. A layer has 2 MiB that every token uses."""
    shape, limits = model(10)
    used, k = n_used / 8, 10.0
    experts = 10 * 6 * MIB / used  # bytes of all experts
    weights = 10 * 2 * MIB + experts
    todo = work((replace(shape, n_experts=8, n_experts_used=n_used), limits))
    group = GroupCost(todo, [device(disk_bytes_per_s=1e9)], [WHOLE], Links({}))
    dense, routed = max(0.0, short - experts), min(short, experts)
    disk = group.disk([short], k, weights, rows)
    assert float(disk.overlapped_s) == pytest.approx(dense / 1e9)
    assert float(disk.waited_s) == pytest.approx(routed * (1 - (1 - used) ** rows) / 1e9)
    assert float(group.disk([math.inf], k, weights, rows).added_to(1.0)) == math.inf
    whole = GroupCost(work(10), [device(disk_bytes_per_s=1e9)], [WHOLE], Links({}))
    disk = whole.disk([short], k, 80 * MIB, rows)
    assert (float(disk.overlapped_s), float(disk.waited_s)) == (short / 1e9, 0.0)


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, 2.0 * 3 + 0.5 * 3), (7.0, 7.0 + 0.5 * 3)])
def test_dense_weights_are_read_while_others_are_computed_and_experts_are_waited_for(
    seconds: float, expected: float
) -> None:
    assert DiskSeconds(overlapped_s=2.0, waited_s=0.5).added_to(seconds, 3) == expected


def test_paging_needs_room_for_two_layers_at_least() -> None:
    for free, can in ((17 * MIB, True), (15 * MIB, False)):
        speed = device(memory_bytes=free, disk_bytes_per_s=1e9)
        assert math.isfinite(float(only(speed).paged(10.0, 80 * MIB, 0, False)[0])) == can


def test_who_pages_is_given_a_budget() -> None:
    speed = device(memory_bytes=200 * MIB, disk_bytes_per_s=1e9)
    budgets = []
    for layers in (20, 40):
        (result,), _ = Planner(work(layers, context=1), [speed], Links({}), "m", "").front(("latency",))
        budgets.append(result.plan.shard(0).memory)
    assert budgets[0] is None
    assert budgets[1] is not None
    assert 100 * MIB < budgets[1] <= 200 * MIB


# -------------------------------------------------------------------------------------------------- several stages


def test_hidden_states_come_from_rank_t_modulo_the_width_before() -> None:
    ways = {("a", "c"): (1, 512e3), ("b", "d"): (2, 512e3), ("a", "e"): (3, 256e3)}
    links = Links({pair: LinkSpeed(latency * MS, bytes_per_s) for pair, (latency, bytes_per_s) in ways.items()})
    to_do = work()
    assert cost.hop_s(to_do, "ab", "cde", links, 1) == pytest.approx((3 * MS, 2 * MS))  # of 512 bytes
    assert cost.hop_s(to_do, "ab", "cd", links, 4) == pytest.approx((2 * MS, 4 * MS))
    with pytest.raises(PlanError, match="the link from b to e was not measured"):
        cost.hop_s(to_do, "b", "e", links, 1)


def test_states_cross_in_the_type_of_the_wire() -> None:
    sizes = [replace(work(), wire=wire).state_bytes(3) for wire in ("f32", "f16", "q8")]
    assert sizes == [4 * 384, 2 * 384, 384 + 4 * 12]


def test_latency_is_of_one_row_and_throughput_of_all_in_flight() -> None:
    """Stages of 6 and 2 ms and 1 ms for each way: a token takes 10; two in flight wait for the stage of 6."""
    speeds = [device(layer_s=2 * MS), device("b", MS)]
    links = linked([LOCAL, "b"], LinkSpeed(MS, 1e10))
    first = predicted(speeds, links, 3, 5)
    assert first.latency_s == pytest.approx(10 * MS, rel=1e-4)
    assert first.throughput_per_s == pytest.approx(1 / first.latency_s)
    two = predicted(speeds, links, 3, 5, concurrency=2)
    assert (two.microbatches, two.latency_s) == (2, first.latency_s)
    assert two.throughput_per_s == pytest.approx(1 / (6 * MS), rel=1e-4)
    assert predicted(speeds, links, 3, 5, concurrency=2, many=1).throughput_per_s == pytest.approx(200, rel=1e-4)
    assert first.bound == "computing on local takes 6.00 of 10.0 ms"
    assert [stage.what for stage in first.stages] == ["layers 0-2", "layers 3-4"]


def test_a_thin_link_bounds_the_throughput() -> None:
    links = linked([LOCAL, "b"], LinkSpeed(0, 512 / (20 * MS)))  # 20 ms for a row
    result = predicted([device(), device("b")], links, 2, 4, concurrency=4, many=4)
    assert result.throughput_per_s == pytest.approx(50)
    assert result.latency_s == pytest.approx(44 * MS)
    assert result.bound == "the way from local to b takes 20.0 of 44.0 ms"


def test_the_head_is_on_the_last_stage_only() -> None:
    speeds = [device(head_s=9 * MS), device("b", head_s=5 * MS)]
    stages = predicted(speeds, linked([LOCAL, "b"]), 2, 4).stages
    assert [stage.compute_s for stage in stages] == pytest.approx([2 * MS, 7 * MS])
    assert stages[0].memory_bytes[LOCAL] + 4 * MIB == stages[1].memory_bytes["b"]


def test_layers_count_by_their_weights() -> None:
    to_do = work([4, 4, 16])
    assert to_do.before == pytest.approx((0, 0.5, 1, 3))


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=5), st.integers(1, 1000))
def test_a_prompt_goes_through_stages_in_chunks(stages: list[float], prompt: int) -> None:
    """As worked out by playing it: chunk by chunk, stage by stage."""
    n = cost.chunks(prompt)
    free = [0.0] * len(stages)
    for _ in range(n):
        at = 0.0
        for i, seconds in enumerate(stages):
            free[i] = at = max(at, free[i]) + seconds / n
    assert cost.ttft_s(sum(stages), max(stages), prompt) == pytest.approx(at)


@given(st.tuples(*[st.floats(1e-3, 10)] * 2), st.floats(1e3, 1e9), st.floats(0, 0.1), st.integers(1, 5000))
def test_a_prompt_crosses_a_way_while_stages_compute(
    layers: tuple[float, float], bytes_per_s: float, latency_s: float, prompt: int
) -> None:
    """As worked out by playing it: a stage, the way to the next and that stage, chunk by chunk."""
    speeds = [device(layer_s=layers[0]), device("b", layers[1])]  # a chunk takes as long whatever rows it has
    result = predicted(speeds, linked([LOCAL, "b"], LinkSpeed(latency_s, bytes_per_s)), 2, 4, prompt=prompt)
    n = cost.chunks(prompt)
    chunk_s = work(4).state_bytes(prompt / n) / bytes_per_s
    stations, free = (2 * layers[0], chunk_s, 2 * layers[1]), [0.0] * 3
    for _ in range(n):
        at = 0.0
        for i, seconds in enumerate(stations):
            free[i] = at = max(at, free[i]) + seconds
    assert result.ttft_s == pytest.approx(at + 2 * latency_s + 512 / bytes_per_s, rel=1e-6)


def test_how_a_prompt_is_cut() -> None:
    lengths = (1, 32, 63, 64, 255, 256, 1000, 4096, 9999)
    assert [cost.chunk_rows(n) for n in lengths] == [1, 32, 32, 32, 32, 32, 128, 512, 512]
    assert [cost.chunks(n) for n in lengths] == [1, 1, 2, 2, 8, 8, 8, 8, 20]
    assert [cost.chunk_rows(n, 1) for n in lengths] == [1, 32, 63, 64, 255, 256, 512, 512, 512]
    for n in lengths:  # as the runtime cuts them
        assert {cost.chunk_rows(n, stages) - min(n, steps.chunk_rows(n, 512, stages)) for stages in (1, 2)} == {0}


def test_the_first_token_comes_after_the_prompt_and_one_head() -> None:
    """64 tokens in 2 chunks, a millisecond for a row and layer: stages of 192 and 64 ms, and the head once."""
    speeds = [device(by_row=True), device("b", head_s=7 * MS, by_row=True)]
    result = predicted(speeds, linked([LOCAL, "b"], LinkSpeed(5 * MS, 1e10)), 3, 4, prompt=64)
    assert result.ttft_s == pytest.approx((192 + (64 + 7) / 2 + 5 + 5) * MS, rel=1e-4)
    assert result.prompt == 64


@given(st.tuples(*[st.floats(1e-3, 10)] * 3), st.floats(0, 1), st.integers(1, 5000), st.integers(1, 4))
def test_a_prompt_is_handed_over_in_chunks_behind_each_other(
    stations: tuple[float, float, float], pass_s: float, prompt: int, stages: int
) -> None:
    """One stage alone has chunks of 512 tokens."""
    n, free = -(-prompt // 512) if stages == 1 else cost.chunks(prompt), [0.0] * 3
    for _ in range(n):
        at = 0.0
        for i, seconds in enumerate(stations):
            free[i] = at = max(at, free[i]) + seconds / n
    assert cost.pair_ttft_s(*stations, pass_s, prompt, stages) == pytest.approx(at + pass_s)


def test_keys_and_values_take_their_bytes_and_a_latency_for_each_chunk() -> None:
    """256 tokens of 3 layers in 8 chunks; of the pair the first has 3 of 4 KV heads."""
    total = a_pair(device(), device("b"), prompt=256)
    kv = total.work.prompt_kv_before[3]
    assert kv == 3 * 256 * KV_LAYER
    ways = [LinkSpeed(MS, 1e6), LinkSpeed(5 * MS, 1e9)]
    assert float(total.moved_s(kv, ways)) == pytest.approx(max(8 * MS + 0.75 * kv / 1e6, 40 * MS + 0.25 * kv / 1e9))


@given(st.floats(1e-3, 1), st.floats(0.01, 1), st.integers(1, 16), st.integers(1, 16))
def test_a_token_of_many_takes_its_part_of_a_pass_or_of_the_busiest(
    pass_s: float, part: float, concurrency: int, many: int
) -> None:
    rows, busy_s = concurrency / many, pass_s * part
    result = float(cost.per_token_s(pass_s, busy_s, rows, concurrency))
    assert result >= pass_s / concurrency
    assert result >= busy_s / rows
    assert result == pytest.approx(max(pass_s, many * busy_s) / concurrency)


def test_ways_are_those_in_the_direction_of_what_crosses() -> None:
    """From b and c, at the end of a stage, to a: the ways there are others."""
    slow, thin, other = LinkSpeed(0.002, 1e6), LinkSpeed(0.001, 5e5), LinkSpeed(0.5, 1e3)
    links = Links({("b", "a"): slow, ("c", "a"): thin, ("a", "b"): other, ("a", "c"): other})
    assert cost.answer_s(("b", "c"), "a", links, 4) == pytest.approx((0.002, 4 * 512 / 5e5))
    to_do = work()
    n_bytes = 4 * 4 * to_do.shape.n_embd
    assert cost.hop_s(to_do, ("c",), ("a",), links, 4) == pytest.approx((0.001, n_bytes / 5e5))


def test_ranks_of_a_stage_draw_together() -> None:
    assert a_pair(device(watts=5.0), device("b", watts=7.0, idle_watts=1.0)).watts == (11, 1)


def test_energy_is_what_busy_devices_draw() -> None:
    speeds = [device(layer_s=2 * MS, watts=10.0), device("b", MS, watts=5.0)]
    links = linked([LOCAL, "b"])
    assert predicted(speeds, links, 3, 5).energy_j == pytest.approx(6 * MS * 10 + 2 * MS * 5)
    together = predicted(speeds, links, 3, 5, concurrency=4, many=2)  # two rows in each pass
    assert together.energy_j == pytest.approx((6 * MS * 10 + 2 * MS * 5) / 2)
    assert predicted([speeds[0], replace(speeds[1], watts=None)], links, 3, 5).energy_j is None


# ----------------------------------------------------------------------------------------------------------- shares


@st.composite
def ranks(draw: st.DrawFn) -> tuple[list[float], list[float], list[float]]:
    """Draw what some ranks take beside a layer, for all of it, and the most that each has memory for."""
    n = draw(st.integers(1, 8))
    constant, slope, most = st.floats(0, 2 * MS), st.floats(0.1 * MS, 20 * MS), st.floats(0, 1.5)
    return tuple(draw(st.lists(total, min_size=n, max_size=n)) for total in (constant, slope, most))  # type: ignore[return-value]


@given(ranks())
def test_all_ranks_that_are_free_to_end_at_once(given_: tuple[list[float], list[float], list[float]]) -> None:
    constant, slope, most = given_
    result = parts(constant, slope, most)
    assert sum(result) == pytest.approx(1)
    assert min(result) > 0
    caps = [max(0.02, min(1.0, cap)) for cap in most]
    if sum(caps) <= 1:  # nobody has room for its part
        assert [a / b for a, b in zip(result, caps, strict=True)] == pytest.approx([1 / sum(caps)] * len(caps))
        return
    ends = [c + s * part for c, s, part in zip(constant, slope, result, strict=True)]
    free = [i for i, part in enumerate(result) if 0.02 * (1 + 1e-6) < part < caps[i] * (1 - 1e-6)]
    assert all(part <= cap * (1 + 1e-9) for part, cap in zip(result, caps, strict=True))
    assert [ends[i] for i in free] == pytest.approx([ends[i] for i in free[:1]] * len(free), rel=1e-6)
    for i in free[:1]:
        for j, part in enumerate(result):  # who could do more would not end later, who can do no less not earlier
            if j not in free and part < caps[j] * (1 - 1e-6):
                assert ends[j] >= ends[i] * (1 - 1e-6)
            elif j not in free and part > 0.02 * (1 + 1e-6):
                assert ends[j] <= ends[i] * (1 + 1e-6)


def test_shares_of_equal_and_of_unequal_ranks() -> None:
    assert parts([0, 0], [1, 1], [1, 1]) == pytest.approx([0.5, 0.5])
    assert parts([0, 0], [1, 3], [1, 1]) == pytest.approx([0.75, 0.25])
    assert parts([0.2, 0], [1, 1], [1, 1]) == pytest.approx([0.4, 0.6])
    assert parts([0, 0, 0], [1, 1, 1], [0.1, 1, 1]) == pytest.approx([0.1, 0.45, 0.45])
    assert parts([0, 0], [1, 1000], [1, 1]) == pytest.approx([0.98, 0.02])
    assert parts([0, 0], [1, 1], [0.2, 0.6]) == pytest.approx([0.25, 0.75])
    assert parts([1], [1], [1]) == [1]


def test_energy_counts_waiting_devices() -> None:
    """Computing takes 10 - 2 W for 3 ms and 5 - 1 W for 1 ms of each token; waiting 3 W for all of its 4 ms."""
    speeds = [device(watts=10.0, idle_watts=2.0), device("b", watts=5.0, idle_watts=1.0)]
    links = linked([LOCAL, "b"], LinkSpeed(0.0, 5e10))
    result = predicted(speeds, links, 3, 4)
    assert result.energy_j == pytest.approx((8 * 3 + 4 * 1 + 3 * 4) * MS, rel=1e-3)
    idle = replace(speeds[0], idle_watts=0.0), replace(speeds[1], idle_watts=0.0)
    assert predicted(list(idle), links, 3, 4).energy_j == pytest.approx((10 * 3 + 5 * 1) * MS, rel=1e-3)
    with pytest.raises(PlanError, match="idle_watts is 11; expected 0 to watts"):
        replace(speeds[0], idle_watts=11.0)
