"""Test plans: each layer, head, column and row has one place; JSON round trips; invalid plans are refused."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.errors import PlanError
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, NOTHING, Plan, Range, Shard, Sizes, Slice, Stage
from partition.plan.tensor import Limits

DIGEST = "ab" * 32
SIZES = Sizes(layers=6, heads=8, heads_kv=4, ff=256, vocab=1000)
LIMITS = Limits(SIZES, 1, 32, 100.0, 100.0, 300.0, 1.0, (86_000.0,) * 6)


def hybrid() -> Plan:
    """Two stages of two ranks and of one."""
    return make_plan(LIMITS, "a model", DIGEST, [LOCAL, "pi-1", "10.0.0.7:7070"], stages_of=(2, 1))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that is one, also with ranks set up by hand."""
    n = draw(st.integers(1, 6))
    groups = draw(st.sampled_from([(n,), (1,) * n, (1, n - 1), (n - 1, 1)]))
    devices = [LOCAL, *(draw(st.sampled_from(["pi-1", "[::1]:80", "Ålesund"])) for _ in range(n - 1))]
    shares = draw(st.none() | st.lists(st.floats(0.1, 10), min_size=n, max_size=n))
    if shares and n > 1 and groups[0] == 1 and draw(st.booleans()):
        shares[0] = 0.0  # a thin owner
    plan = make_plan(
        LIMITS, draw(st.sampled_from(["", "M 3"])), "", devices, shares=shares, stages_of=[g for g in groups if g]
    )
    none = st.none()
    stages = [
        replace(
            stage,
            shards=tuple(
                replace(
                    shard,
                    threads=draw(none | st.integers(1, 64)),
                    affinity=tuple(draw(st.lists(st.integers(0, 9), unique=True, max_size=3))),
                    gpu_layers=draw(none | st.integers(0, 99)),
                )
                for shard in stage.shards
            ),
        )
        for stage in plan.stages
    ]
    return replace(plan, stages=tuple(stages))


# ---------------------------------------------------------------------------------------------------------- a range


def test_a_range() -> None:
    current = Range(3, 8)
    assert (len(current), bool(current), str(current)) == (5, True, "3-7")
    assert (len(Range(4, 4)), bool(Range(4, 4)), str(Range(4, 4)), str(Range(4, 5))) == (0, False, "none", "4")
    for start, stop in ((-1, 3), (4, 3)):
        with pytest.raises(PlanError, match="expected 0 <= start <= stop"):
            Range(start, stop)


# ----------------------------------------------------------------------------------------------------- ranks of a plan


def test_ranks_are_numbered_stage_by_stage() -> None:
    plan = hybrid()
    assert plan.world_size == 3
    assert plan.devices == (LOCAL, "pi-1", "10.0.0.7:7070")
    assert [plan.stage_of(rank) for rank in range(3)] == [0, 0, 1]
    assert [plan.group(rank) for rank in range(3)] == [(0, 1), (0, 1), (2,)]
    assert plan.shard(2) is plan.stages[1].shards[0]
    assert plan.slice(0) == Slice(Range(0, 4), Range(0, 4), Range(0, 128), Range(0, 0), first=True)
    assert plan.slice(1) == Slice(Range(0, 4), Range(4, 8), Range(128, 256), Range(0, 0), first=False)
    assert plan.slice(2) == Slice(Range(4, 6), Range(0, 8), Range(0, 256), Range(0, 1000), first=True)
    for rank in (-1, 3):
        with pytest.raises(PlanError, match=f"there is no rank {rank}; the plan has ranks 0 to 2"):
            plan.slice(rank)


@given(plans())
def test_each_thing_has_one_place(plan: Plan) -> None:
    places = [
        (layer, kind, i)
        for rank in range(plan.world_size)
        for layer in range(plan.slice(rank).layers.start, plan.slice(rank).layers.stop)
        for kind in ("heads", "ff")
        for i in range(getattr(plan.slice(rank), kind).start, getattr(plan.slice(rank), kind).stop)
    ]
    assert len(places) == len(set(places)) == SIZES.layers * (SIZES.heads + SIZES.ff)
    rows = [row for r in range(plan.world_size) for row in range(plan.slice(r).vocab.start, plan.slice(r).vocab.stop)]
    assert rows == list(range(SIZES.vocab))
    assert [plan.slice(rank).first for rank in range(plan.world_size)].count(True) == len(plan.stages)


# ------------------------------------------------------------------------------------------------------- builders


def test_tensor_and_pipeline_plans() -> None:
    devices = [LOCAL, "b", "c"]
    plan = make_plan(LIMITS, "m", "", devices, shares=[2, 1, 1])
    assert [len(stage.shards) for stage in plan.stages] == [3]
    assert [len(shard.heads) for shard in plan.stages[0].shards] == [4, 2, 2]
    plan = make_plan(LIMITS, "m", "", devices, "pipeline", [1, 2, 3])
    assert [stage.layers for stage in plan.stages] == [Range(0, 1), Range(1, 3), Range(3, 6)]
    assert [len(shard.vocab) for stage in plan.stages for shard in stage.shards] == [0, 0, 1000]


@pytest.mark.parametrize(
    ("how", "layers", "widths"),
    [
        ({"parallel": "pipeline"}, [(0, 0), (0, 2), (2, 6)], (0, 1, 1)),
        ({"parallel": "tensor"}, [(0, 0), (0, 6)], (0, 2)),
        ({"stages_of": (1, 2)}, [(0, 0), (0, 6)], (0, 2)),
    ],
)
def test_a_thin_owner_has_no_share(how: dict[str, Any], layers: list[tuple[int, int]], widths: tuple[int, ...]) -> None:
    plan = make_plan(LIMITS, "m", "", [LOCAL, "b", "c"], shares=[0, 1, 2], **how)
    assert plan.thin_owner
    assert plan.widths == widths
    assert plan.computing == plan.stages[1:]
    assert [(stage.layers.start, stage.layers.stop) for stage in plan.stages] == layers
    assert plan.slice(0) == Slice(NOTHING, Range(0, 8), Range(0, 256), NOTHING, first=True)
    others = make_plan(LIMITS, "m", "", [LOCAL, "c"], shares=[1, 2], **(how if "parallel" in how else {}))
    for mine, theirs in zip(plan.computing[-1].shards, others.stages[-1].shards, strict=True):
        assert (mine.heads, mine.ff, mine.vocab) == (theirs.heads, theirs.ff, theirs.vocab)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_plans_with_layers_have_no_thin_owner() -> None:
    for plan in (hybrid(), make_plan(LIMITS, "m", "", [LOCAL])):
        assert not plan.thin_owner
        assert plan.computing == plan.stages
        assert plan.widths == tuple(len(stage.shards) for stage in plan.stages)


def test_a_thin_owner_is_alone_and_first() -> None:
    plan = make_plan(LIMITS, "m", "", [LOCAL, "b"], "pipeline", [0, 1])
    own, whole = plan.stages
    with pytest.raises(PlanError, match="part 0 is \\[0, 0\\], which is empty"):
        replace(plan, stages=(own,))
    with pytest.raises(PlanError, match="part 1 is \\[6, 6\\], which is empty"):
        replace(plan, stages=(own, whole, replace(own, layers=Range(6, 6))))
    with pytest.raises(PlanError, match="stage 0 has no layers, begins with layer 3 and has 1 shards; expected"):
        replace(plan, stages=(replace(own, layers=Range(3, 3)), whole))
    halves = [replace(own.shards[0], ff=part) for part in (Range(0, 128), Range(128, 256))]
    with pytest.raises(PlanError, match=r"begins with layer 0 and has 2 shards; expected .* and one shard"):
        replace(plan, stages=(replace(own, shards=(halves[0], replace(halves[1], device="c"))), whole))


def test_a_stage_counts_for_all_its_ranks() -> None:
    plan = make_plan(LIMITS, "m", "", [LOCAL, "b", "c"], shares=[1, 1, 1], stages_of=(2, 1))
    assert [len(stage.layers) for stage in plan.stages] == [4, 2]
    plan = make_plan(LIMITS, "m", "", [LOCAL, "b", "c"], shares=[1, 1, 4], stages_of=(1, 2))
    assert [len(shard.vocab) for shard in plan.stages[1].shards] == [192, 808]


def test_one_device() -> None:
    for parallel in ("tensor", "pipeline"):
        plan = make_plan(LIMITS, "m", DIGEST, [LOCAL], parallel)
        assert plan.slice(0) == Slice(Range(0, 6), Range(0, 8), Range(0, 256), Range(0, 1000), first=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": "both"}, "parallel is 'both'; known are tensor, pipeline"),
        ({"stages_of": (2, 2)}, "stages of 2, 2 ranks for 3 devices; expected one rank for each"),
        ({"stages_of": (3, 0)}, "stages of 3, 0 ranks for 3 devices; expected one rank for each"),
        ({"shares": [1, 2]}, "2 shares for 3 ranks; give one for each"),
        ({"shares": [1, 2, 0]}, "the share of rank 2 is 0; expected a number above 0"),
        ({"shares": [0, 1]}, "2 shares for 3 ranks; give one for each"),
        ({"shares": [0, 1, 0]}, "the share of rank 2 is 0; expected a number above 0"),
        (
            {"shares": [0, 1, 1], "stages_of": (2, 1)},
            "rank 0 has a share of 0, but is in a stage of 2 ranks; give it a stage of its own",
        ),
    ],
)
def test_builders_refuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as raised:
        make_plan(LIMITS, "m", "", [LOCAL, "b", "c"], **options)
    assert str(raised.value) == message


def test_a_model_without_heads_has_stages_only() -> None:
    sizes = Sizes(4, 0, 0, 0, 100)
    limits = Limits(sizes, 1, 1, 0.0, 0.0, 0.0, 1.0, (5.0,) * 4)
    plan = make_plan(limits, "m", "", [LOCAL, "b"], "pipeline")
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="use one rank a stage"):
        make_plan(limits, "m", "", [LOCAL, "b"], "tensor")
    two = (Shard(LOCAL, Range(0, 0), Range(0, 0), Range(0, 50)), Shard("b", Range(0, 0), Range(0, 0), Range(50, 100)))
    with pytest.raises(PlanError, match="stage 0 has 2 shards of a model without heads; expected one shard"):
        Plan("m", "", sizes, (Stage(Range(0, 4), two),))
    with pytest.raises(PlanError, match="stage 0, heads: 0-3 of a model that has none"):
        Plan("m", "", sizes, (Stage(Range(0, 4), (replace(two[0], heads=Range(0, 4)),)),))


def test_at_most_64_ranks() -> None:
    sizes = Sizes(65, 1, 1, 1, 1)
    limits = Limits(sizes, 1, 1, 1.0, 1.0, 1.0, 1.0, (1.0,) * 65)
    shard = Shard("b", Range(0, 1), Range(0, 1), Range(0, 0))
    stages = [Stage(Range(i, i + 1), (replace(shard, device="b" if i else LOCAL),)) for i in range(65)]
    stages[64] = Stage(Range(64, 65), (replace(shard, vocab=Range(0, 1)),))
    with pytest.raises(PlanError, match="65 ranks; the maximum is 64"):
        Plan("m", "", sizes, tuple(stages))
    assert make_plan(limits, "m", "", [LOCAL, *"b" * 63], "pipeline").world_size == 64


# ------------------------------------------------------------------------------------------------------------ JSON


@given(plans())
def test_json_and_back(plan: Plan) -> None:
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_json_is_for_people() -> None:
    shard = hybrid().to_json()["stages"][1]["shards"][0]
    assert shard == {"device": "10.0.0.7:7070", "heads": [0, 8], "ff": [0, 256], "vocab": [0, 1000]}
    values = hybrid().to_json()
    for shard in values["stages"][0]["shards"]:
        del shard["vocab"]  # may be left out where there is none
    assert Plan.from_json(values) == hybrid()


# ------------------------------------------------------------------------------------------- a placement for prompts


def phases() -> Plan:
    """Two ranks that generate, and three that compute prompts of 200 tokens and more."""
    decode = make_plan(LIMITS, "a model", DIGEST, [LOCAL, "pi-1"])
    return replace(decode, prefill=hybrid(), prefill_from=200)


def test_a_placement_for_prompts_in_json_and_back() -> None:
    plan = phases()
    values = plan.to_json()
    assert (values["prefill"], values["prefill_from"]) == (hybrid().to_json(), 200)
    assert Plan.from_json(json.loads(json.dumps(values))) == plan
    assert plan.placements == (make_plan(LIMITS, "a model", DIGEST, [LOCAL, "pi-1"]), hybrid())
    assert not {"prefill", "prefill_from"} & {*hybrid().to_json(), *values["prefill"]}
    assert hybrid().placements == (hybrid(),)


def test_shards_of_both_placements_are_changed() -> None:
    changed = phases().with_shards(lambda shard: replace(shard, threads=3))
    assert [shard.threads for plan in changed.placements for stage in plan.stages for shard in stage.shards] == [3] * 5
    assert [plan.devices for plan in changed.placements] == [plan.devices for plan in phases().placements]
    assert changed.prefill_from == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill_from": -1}, "prefill_from is -1, expected 0 or more tokens"),
        ({"prefill": None}, "prefill_from is 200, and there is no prefill; leave it out"),
        ({"prefill": phases()}, "prefill: it has a prefill of its own; leave that out"),
        (
            {"prefill": replace(hybrid(), model="b")},
            "prefill, model: b, expected that of the plan it belongs to, a mo",
        ),
        ({"prefill": replace(hybrid(), model_digest="")}, "prefill, model_digest: , expected that of the plan it bel"),
        (
            {"prefill": make_plan(replace(LIMITS, sizes=replace(SIZES, vocab=999)), "a model", DIGEST, [LOCAL])},
            "prefill, sizes: Sizes(layers=6, heads=8,",
        ),
    ],
)
def test_a_placement_for_prompts_is_one_of_the_same_model(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as raised:
        replace(phases(), **change)
    assert str(raised.value).startswith(message)


def test_placements_nested_deep_are_refused_before_they_are_read() -> None:
    values, plan = dict[str, Any](), hybrid().to_json()
    for _ in range(100_000):
        values = {**plan, "prefill": values}
    with pytest.raises(PlanError, match="prefill: it has a prefill of its own; leave that out"):
        Plan.from_json(values)


# ---------------------------------------------------------------------------------------------------------- replicas


def behind_thin_owner(*devices: str) -> Plan:
    """A pipeline on these devices, whose owner has no layer."""
    shares = [0.0, *(1.0 for _ in devices)]
    return make_plan(LIMITS, "a model", DIGEST, [LOCAL, *devices], "pipeline", shares)


def replicated() -> Plan:
    """A copy on three devices that has a prefill placement, and two copies on other devices."""
    return replace(
        hybrid(),
        prefill=make_plan(LIMITS, "a model", DIGEST, [LOCAL, "pi-1"]),
        prefill_from=200,
        replicas=(behind_thin_owner("pi-2"), behind_thin_owner("pi-3", "pi-4")),
    )


@given(st.permutations(["a", "b", "c:81", "[::1]:80", "Ålesund"]), st.data())
def test_replicas_in_json_and_back(devices: list[str], data: st.DataObject) -> None:
    replicas = []
    while devices and data.draw(st.booleans()):
        n = data.draw(st.integers(1, len(devices)))
        replica, devices = behind_thin_owner(*devices[:n]), devices[n:]
        if data.draw(st.booleans()):
            prefill = behind_thin_owner(*data.draw(st.permutations(replica.devices[1:])))
            replica = replace(replica, prefill=prefill, prefill_from=data.draw(st.integers(0, 99)))
        replicas.append(replica)
    own = make_plan(LIMITS, "a model", DIGEST, [LOCAL, *devices])
    plan = replace(own, replicas=tuple(replicas))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.copies == (own, *replicas)
    assert plan.all_devices == tuple(dict.fromkeys([*own.devices, *(d for copy in replicas for d in copy.devices)]))
    assert ("replicas" in plan.to_json()) == bool(replicas)


def test_placements_are_those_of_the_first_copy() -> None:
    plan = replicated()
    assert plan.placements == plan.copies[0].placements
    assert plan.world_size == hybrid().world_size
    assert plan.computing_devices == (LOCAL, "pi-1", "10.0.0.7:7070", "pi-2", "pi-3", "pi-4")


def test_shards_of_replicas_are_changed() -> None:
    changed = replicated().with_shards(lambda shard: replace(shard, threads=3))
    stages = [stage for copy in changed.copies for placement in copy.placements for stage in placement.stages]
    assert {shard.threads for stage in stages for shard in stage.shards} == {3}
    assert changed.all_devices == replicated().all_devices


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ((hybrid(),), "replicas[0]: it computes on this device, and so does the first copy; expected a thin owner"),
        (
            (behind_thin_owner("pi-2"), behind_thin_owner("PI-1:7070")),
            "replicas[1]: it computes on PI-1:7070, and so does the first copy; a device has one copy",
        ),
        (
            (behind_thin_owner("pi-2"), behind_thin_owner("pi-3", "pi-2")),
            "replicas[1]: it computes on pi-2, and so does replicas[0]; a device has one copy",
        ),
        (
            (replace(behind_thin_owner("pi-2"), prefill=make_plan(LIMITS, "a model", DIGEST, [LOCAL])),),
            "replicas[0]: it computes on this device, and so does the first copy; expected a thin owner",
        ),
        (
            (replace(behind_thin_owner("pi-2"), replicas=(behind_thin_owner("pi-3"),)),),
            "replicas[0]: it has replicas of its own; list them in the outer plan",
        ),
        (
            (replace(behind_thin_owner("pi-2"), model="b"),),
            "replicas[0], model: b, expected that of the plan it belongs to, a model",
        ),
        (
            (behind_thin_owner("pi-2"), replace(behind_thin_owner("pi-3"), model_digest="")),
            "replicas[1], model_digest: , expected that of the plan it belongs to, abab",
        ),
        ((behind_thin_owner("pi-2"),) * 64, "64 replicas; the maximum is 63"),
    ],
)
def test_replicas_are_copies_of_the_same_model_on_other_devices(replicas: tuple[Plan, ...], message: str) -> None:
    with pytest.raises(PlanError) as raised:
        replace(hybrid(), replicas=replicas)
    assert str(raised.value).startswith(message)


def test_prefill_placement_with_replicas_is_refused() -> None:
    prefill = replace(hybrid(), replicas=(behind_thin_owner("pi-2"),))
    with pytest.raises(PlanError, match="prefill: it has replicas of its own"):
        replace(hybrid(), prefill=prefill)


@pytest.mark.parametrize("key", ["replicas", "prefill"])
def test_nested_replicas_are_refused_before_they_are_read(key: str) -> None:
    values, plan = dict[str, Any](), hybrid().to_json()
    for _ in range(100_000):
        values = {**plan, key: [values] if key == "replicas" else values}
    with pytest.raises(PlanError, match=r"it has (replicas|a prefill) of its"):
        Plan.from_json({**plan, "replicas": [values]})


Edit = Callable[[dict[str, Any]], Any]


def put(*path: Any) -> Edit:
    """An edit of a plan's JSON: the last of `path` is put at the place the others name."""

    def edit(values: Any) -> None:
        for key in path[:-2]:
            values = values[key]
        values[path[-2]] = path[-1]

    return edit


SHARD = ("stages", 0, "shards", 1)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (put("format", "edge-plan-9"), "plan: format is 'edge-plan-9', known is 'edge-plan-1'"),
        (put("colour", 1), "plan: unknown field 'colour'; known are format, model, model_digest, sizes, stages,"),
        (lambda v: v.pop("sizes"), "plan: sizes is missing"),
        (put("model", 7), "model: 7; expected printable text of up to 255 characters"),
        (put("model", "a\nb"), "model: 'a\\nb'; expected printable text of up to 255 characters"),
        (put("model_digest", "abc"), "model_digest is 'abc'; expected a SHA-256 in hexadecimal, or nothing"),
        (put("sizes", []), "sizes: a list; expected an object with layers, heads, heads_kv, ff, vocab"),
        (put("sizes", "heads", -1), "sizes.heads: -1; expected a whole number from 0 to 2147483647"),
        (put("sizes", "ff", True), "sizes.ff: True; expected a whole number from 0 to 2147483647"),
        (put("sizes", "ff", 10**30), "sizes.ff: a number of more than 20 digits; expected a whole number from"),
        (put("sizes", "vocab", 0), "sizes: vocab is 0, expected 1 or more"),
        (put("sizes", "layers", 7), "layers of the stages: the parts end at 6, expected 7"),
        (put("sizes", "heads", 9), "stage 0, heads: the parts end at 8, expected 9"),
        (put("prefill", 3), "prefill: 3; expected an object with format, model, model_digest, sizes, stages"),
        (put("prefill", {**hybrid().to_json(), "format": "x"}), "prefill: format is 'x', known is 'edge-plan-1'"),
        (put("prefill", {**hybrid().to_json(), "model": 7}), "prefill.model: 7; expected printable text of up to"),
        (put("prefill", {**hybrid().to_json(), "stages": []}), "prefill: layers of the stages: the parts end at 0,"),
        (put("prefill_from", 1.5), "prefill_from: 1.5; expected a whole number from 0 to 2147483647"),
        (put("prefill_from", 9), "prefill_from is 9, and there is no prefill; leave it out"),
        (put("replicas", 3), "replicas: 3; expected a list"),
        (put("replicas", [3]), "replicas[0]: 3; expected an object with format, model, model_digest, sizes, stages"),
        (put("replicas", [{**hybrid().to_json(), "model": 7}]), "replicas[0].model: 7; expected printable text of"),
        (put("replicas", [{**hybrid().to_json(), "stages": []}]), "replicas[0]: layers of the stages: the parts end"),
        (put("replicas", [hybrid().to_json()]), "replicas[0]: it computes on this device, and so does the first"),
        (put("stages", {}), "stages: a dict; expected a list"),
        (put("stages", []), "layers of the stages: the parts end at 0, expected 6"),
        (put("stages", 0, None), "stages[0]: None; expected an object with layers, shards"),
        (put("stages", 0, "shards", []), "stage 0, heads: the parts end at 0, expected 8"),
        (put("stages", 1, "layers", [3, 6]), "layers of the stages: part 1 is [3, 6], expected one that starts at 4"),
        (put("stages", 1, "layers", [4, 4]), "layers of the stages: part 1 is [4, 4], which is empty; leave that part"),
        (put("stages", 1, "shards", 0, "vocab", [0, 999]), "stage 1, vocab: the parts end at 999, expected 1000"),
        (put(*SHARD, "vocab", [0, 1]), "stage 0, vocab: it is not the last stage, so it holds no vocabulary rows"),
        (put(*SHARD, "heads", [4, 7]), "stage 0, heads: the parts end at 7, expected 8"),
        (put(*SHARD, "heads", [8, 4]), "stages[0].shards[1].heads: [8, 4]; expected start <= stop"),
        (put(*SHARD, "heads", [4]), "stages[0].shards[1].heads: 1 numbers; expected two, [start, stop]"),
        (put(*SHARD, "ff", [0.0, 9]), "stages[0].shards[1].ff: 0.0; expected a whole number from 0 to 2147483647"),
        (put(*SHARD, "ff", "all"), "stages[0].shards[1].ff: 'all'; expected a list"),
        (put(*SHARD, "device", ""), "stages[0].shards[1]: the device ''; expected an address or a name, 1 to 255"),
        (put(*SHARD, "device", LOCAL), "rank 1 is on 'local'; rank 0, and no other, is 'local'"),
        (put("stages", 0, "shards", 0, "device", "b"), "rank 0 is on 'b'; rank 0, and no other, is 'local'"),
        (put(*SHARD, "threads", 0), "stages[0].shards[1]: pi-1: threads is 0, expected 1 or more"),
        (put(*SHARD, "threads", "4"), "stages[0].shards[1].threads: '4'; expected a whole number from 0 to"),
        (put(*SHARD, "gpu_layers", -1), "stages[0].shards[1].gpu_layers: -1; expected a whole number from 0 to"),
        (put(*SHARD, "affinity", [1, 1]), "stages[0].shards[1]: pi-1: affinity is [1, 1]; expected processors'"),
        (put(*SHARD, "affinity", [None]), "stages[0].shards[1].affinity[0]: None; expected a whole number from 0"),
        (
            put(*SHARD, "gpu", 1),
            "stages[0].shards[1]: unknown field 'gpu'; known are device, heads, ff, vocab, threads,",
        ),
    ],
)
def test_json_that_is_no_plan_is_refused_by_field(edit: Edit, message: str) -> None:
    values = copy.deepcopy(hybrid().to_json())
    edit(values)
    with pytest.raises(PlanError) as raised:
        Plan.from_json(values)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(json_values, st.data())
def test_any_json_is_a_plan_or_refused(value: Any, data: st.DataObject) -> None:
    """Also where one value, anywhere in a good plan, is replaced."""
    with pytest.raises(PlanError):
        Plan.from_json(value)
    values = copy.deepcopy(hybrid().to_json())
    inner: Any = values
    while True:
        key = data.draw(st.sampled_from(list(inner) if isinstance(inner, dict) else range(len(inner))))
        if not (isinstance(inner[key], dict | list) and inner[key] and data.draw(st.booleans())):
            break
        inner = inner[key]
    inner[key] = value
    try:
        plan = Plan.from_json(values)
    except PlanError:
        return
    assert Plan.from_json(plan.to_json()) == plan
