"""Test plans after a loss: they use the devices that answer, and only if that is clearly better."""

from dataclasses import replace
from typing import Any

import pytest

from edge.cluster import preflight
from edge.cluster.model_slices import ModelSlices
from edge.deployment.replanning import Replanner
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.planning import arrange
from edge.planning.arrange import again
from edge.planning.choice import PlanChoice
from edge.planning.encoder_place import EncoderPlace
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.predict.hysteresis import NEW_PLAN
from partition.predict.predict import predict
from partition.predict.speeds import Curve, LinkSpeed
from partition.search.planner import Planner
from partition.slices.gguf_slice import limits
from tests.support import planning
from tests.support.planning import MIB, MS

FILE = ModelFile.open(MODEL_PATH)
WORK = planning.work(8)
A, B = "a:1", "b:1"


def replanner(plan: Plan, measured: dict[str, float] | None, **goal: Any) -> Replanner:
    """Return the replanner of a plan. measured: seconds of a layer, by device; None: a person gave the plan. goal: an
    objective, limits."""
    planner = None
    if measured is not None:
        speeds = [planning.device(name, seconds) for name, seconds in measured.items()]
        planner = Planner(WORK, speeds, planning.linked(tuple(measured)), "made up", "")
    return Replanner(PlanChoice(MODEL_PATH, plan, "as the plan says", planner=planner, **goal), FILE, "")


def shared(*names: str) -> Plan:
    return make_plan(WORK.limits, "made up", "", names, "tensor")


def test_only_those_that_answer_are_planned_for() -> None:
    first = replanner(shared(LOCAL, A, B), {LOCAL: MS, A: MS, B: MS})
    assert first.addresses == [A, B]
    plan, _ = first.plan([B])
    assert set(plan.devices) == {LOCAL, B}
    alone, why = first.plan([])
    assert (list(alone.devices), why) == ([LOCAL], "no other device answers")
    first.shunned.add(A)
    assert first.addresses == [B]


@pytest.mark.parametrize(("times", "pays"), [(NEW_PLAN * 0.99, False), (NEW_PLAN * 1.01, True)])
def test_another_plan_pays_where_it_is_clearly_better(times: float, pays: bool) -> None:
    """Half of the layers on a device that is faster, so that both together are so many times as fast."""
    alone = make_plan(WORK.limits, "made up", "", [LOCAL], "pipeline")
    both = make_plan(WORK.limits, "made up", "", [LOCAL, A], "pipeline", [8, 8])
    assert [len(stage.layers) for stage in both.stages] == [4, 4]
    own_s = times / (2 - times) * MS
    assert replanner(alone, {LOCAL: own_s, A: MS}).pays(both, alone) == pays


def test_once_the_device_that_encodes_is_lost_this_one_holds_the_encoder() -> None:
    """Its part of the model is then smaller; and where there is no room for both, it is as without an encoder."""
    plan, links = shared(LOCAL, A, B), planning.linked((LOCAL, A, B))

    def planned(own: int, place: str, *workers: str) -> int:
        """Return the bytes that the plan takes of this device, which has `own`."""
        encoder = EncoderPlace(place, place, 24 * MIB)
        memory = {LOCAL: own, A: 200 * MIB, B: 60 * MIB}
        speeds = [planning.device(name, 1 * MS, memory_bytes=memory[name]) for name in memory]
        planner = Planner(WORK, encoder.with_encoder(speeds), links, "made up", "")
        choice = PlanChoice(MODEL_PATH, plan, "planned", planner=planner, encoder=encoder)
        replanned, _ = Replanner(choice, FILE, "").plan(workers)
        by_address = {speed.device: speed for speed in speeds}  # without the encoder
        return predict(replanned, WORK, by_address, links).memory_bytes[LOCAL]

    for encodes, worker, encodes_here in ((A, B, True), (A, A, False), (B, A, True), ("c:1", A, False)):
        assert (planned(52 * MIB, encodes, worker) <= 28 * MIB) == encodes_here, (encodes, worker)
    assert planned(30 * MIB, A, B) > 6 * MIB


def test_it_is_planned_for_the_same_objective_within_the_same_limits() -> None:
    """Or without the limits where those that are left cannot keep to them."""
    both = make_plan(WORK.limits, "made up", "", [LOCAL, A], "pipeline", [8, 8])
    measured = {LOCAL: MS, A: MS}
    fastest, why = replanner(both, measured, objective="throughput").plan([A])
    assert "tokens/s" in why
    assert fastest.world_size == 2
    _, limited = replanner(both, measured, objective="throughput", limits={"latency": 1.0}).plan([A])
    assert "tokens/s" in limited
    _, unlimited = replanner(both, measured, objective="throughput", limits={"latency": 1e-9}).plan([A])
    assert unlimited == why


@pytest.mark.parametrize("limits", [{}, {"latency": 1.0}])
def test_without_room_for_the_encoder_limits_stay(limits: dict[str, float]) -> None:
    plan, links = shared(LOCAL, A, B), planning.linked((LOCAL, A, B))
    speeds = [planning.device(name, 1 * MS, memory_bytes=60 * MIB) for name in (LOCAL, A, B)]
    why = []
    for encoder in (None, EncoderPlace(A, A, 100 * MIB)):
        planner = Planner(WORK, speeds, links, "made up", "")
        choice = PlanChoice(
            MODEL_PATH, plan, "", planner=planner, objective="throughput", limits=limits, encoder=encoder
        )
        why.append(Replanner(choice, FILE, "").plan([B])[1])
    assert why[0] == why[1]


def test_replanning_keeps_more_microbatches_than_stages_over_slow_links() -> None:
    links = planning.linked((LOCAL, A), LinkSpeed(20 * MS, 1e9))
    speeds = [planning.device(name, 2 * MS, by_row=True) for name in (LOCAL, A)]
    planner = Planner(planning.work(8, concurrency=8), speeds, links, "made up", "")
    choice = PlanChoice(MODEL_PATH, shared(LOCAL, A), "planned", planner=planner, objective="throughput")
    left, _ = Replanner(choice, FILE, "").plan([A])
    assert (len(left.stages), left.microbatches) == (2, 8)


@pytest.mark.parametrize(("objective", "pays"), [("latency", False), ("memory", True)])
def test_what_pays_is_a_matter_of_the_objective(objective: str, pays: bool) -> None:
    """Two stages of half the layers, as fast as this device: a token takes as long, and each device holds half."""
    alone = make_plan(WORK.limits, "made up", "", [LOCAL], "pipeline")
    both = make_plan(WORK.limits, "made up", "", [LOCAL, A], "pipeline", [8, 8])
    assert replanner(alone, {LOCAL: MS, A: MS}, objective=objective).pays(both, alone) == pays


def test_a_given_plan_goes_on_with_the_shares_it_had() -> None:
    can = limits(FILE)
    plan = make_plan(can, "", "", (LOCAL, A, B), "tensor", (4, 1, 3))
    first = replanner(plan, None)
    assert first.plan([B, A]) == (plan, "as the plan says")
    left, _ = first.plan([A])
    assert set(left.devices) == {LOCAL, A}
    assert left.microbatches is None
    assert replanner(replace(plan, microbatches=2), None).plan([A])[0] == replace(left, microbatches=2)
    ff = {name: len(left.slice(rank).ff) for rank, name in enumerate(left.devices)}
    assert ff[LOCAL] > 2 * ff[A]
    assert first.pays(left, plan)
    assert not first.pays(plan, plan)


def test_a_given_plan_with_a_thin_owner_keeps_it_thin_while_others_are_there() -> None:
    can = limits(FILE)
    for kind in ("tensor", "pipeline"):
        plan = make_plan(can, "", "", (LOCAL, A, B), kind, (0, 1, 3))
        left, why = replanner(plan, None).plan([B])
        assert why == f"{kind}, with shares as before"
        assert left.stages == make_plan(can, "", "", (LOCAL, B), kind, (0, 1)).stages
        alone, _ = replanner(plan, None).plan([])
        assert alone.devices == (LOCAL,)


def test_a_thin_owner_takes_the_model_where_no_other_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the devices that are left are too many for the layers."""
    plan = make_plan(limits(FILE), "", "", (LOCAL, A, B), "pipeline", (0, 1, 3))

    usual = arrange.shared

    def refuses_workers(shares: Any, kind: str, file: ModelFile, digest: str) -> Plan:
        if len(shares) > 1:
            raise PlanError("too many")
        return usual(shares, kind, file, digest)

    monkeypatch.setattr(arrange, "shared", refuses_workers)
    alone, _ = again(plan, [B], FILE, "")
    assert alone.devices == (LOCAL,)


def test_a_thin_owner_needs_no_memory_for_weights() -> None:
    plan = make_plan(limits(FILE), "", "", (LOCAL, A), "pipeline", (0, 1))
    assert preflight.held_here(plan, ModelSlices(FILE, 64 * "0", ()), EngineOptions(context=256)) == 0


def test_of_too_many_devices_the_weakest_are_left_out() -> None:
    """Ten shared two stages of eight layers; a stage each is more. Those that did most stay."""
    names = [LOCAL, *(f"{letter}:1" for letter in "abcdefghi")]
    shares = [10.0, 9.0, 8.0, 7.0, 1.0, 10.0, 9.0, 8.0, 7.0, 2.0]  # "d" did least, then "i"
    before = make_plan(limits(FILE), "", "", names, stages_of=(5, 5), shares=shares)
    assert [len(stage.layers) for stage in before.stages] == [4, 4]
    plan, why = again(before, [name for name in names[1:] if name != "b:1"], FILE, "")
    assert why == "pipeline, with shares as before"
    assert set(plan.devices) == set(names) - {"b:1", "d:1"}


ALONE = make_plan(WORK.limits, "made up", "", [LOCAL], "pipeline")
PAIR = replace(ALONE, prefill=make_plan(WORK.limits, "made up", "", [LOCAL, A], "pipeline", [0, 1]), prefill_from=100)


def prompts_elsewhere(**laptop_has: Any) -> Planner:
    """Return the planner of this device and a laptop that computes a prompt ten times as fast, and a token no
    faster."""
    way = LinkSpeed(5e-3, 125e6)
    own, laptop = planning.device(LOCAL, 10 * MS, by_row=True), planning.device(A, 10 * MS, by_row=True)
    laptop = replace(laptop, layer_s=Curve(((1, 10 * MS), (512, 512 * MS))), **laptop_has)
    return Planner(planning.work(8, prompt=1000), [own, laptop], planning.linked((LOCAL, A), way), "made up", "")


def test_a_plan_with_phases_keeps_them_where_they_pay() -> None:
    """Planned again, prompts stay on the laptop. A device that is gone takes them along; when it is back, that pays
    although a token takes as long as before."""
    planner, alone = prompts_elsewhere(), ALONE
    replanner = Replanner(PlanChoice(MODEL_PATH, PAIR, "planned", planner=planner), FILE, "")
    again, why = replanner.plan([A])
    assert again.prefill is not None
    assert A in again.prefill.devices
    assert "prompts of" in why
    assert replanner.plan([])[0].prefill is None
    assert replanner.pays(again, again.placements[0])
    assert not replanner.pays(again, again)
    plain = Replanner(PlanChoice(MODEL_PATH, alone, "planned", planner=planner), FILE, "")
    assert plain.plan([A])[0].prefill is None  # nobody asked for a second placement


def test_a_pair_keeps_to_the_limits_of_the_plan() -> None:
    """The laptop's runtime takes more than any device may hold, so only this device is within that limit."""
    planner = prompts_elsewhere(runtime_bytes=500 * MIB)
    free, limited = (
        Replanner(PlanChoice(MODEL_PATH, PAIR, "planned", planner=planner, limits=limits), FILE, "").plan([A])[0]
        for limits in ({}, {"memory": 400.0 * MIB})
    )
    assert free.prefill is not None
    assert limited.prefill is None
    assert limited.devices == (LOCAL,)


def test_a_limit_that_only_a_pair_meets_stays() -> None:
    """A first token within 20 s, of the least latency: no single placement has both, and the pair has."""
    planner = prompts_elsewhere()
    speeds = {speed.device: speed for speed in planner.speeds}
    pair, _ = Replanner(PlanChoice(MODEL_PATH, PAIR, "planned", planner=planner), FILE, "").plan([A])
    pair_s, least_s = (predict(plan, planner.work, speeds, planner.links) for plan in (pair, ALONE))
    assert pair_s.ttft_s is not None
    assert least_s.ttft_s is not None
    assert pair_s.ttft_s < least_s.ttft_s / 2
    limits = {"ttft": 1.05 * pair_s.ttft_s, "latency": 1.001 * least_s.latency_s}
    with pytest.raises(PlanError):
        arrange.chosen(planner, "latency", limits)
    choice = PlanChoice(MODEL_PATH, PAIR, "planned", planner=planner, limits=limits)
    again, why = Replanner(choice, FILE, "").plan([A])
    assert again.prefill is not None
    assert "prompts of" in why
    assert (predict(again, planner.work, speeds, planner.links).ttft_s or 0.0) <= limits["ttft"]


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_a_joining_device_does_not_change_the_kind_that_was_asked_for(kind: str) -> None:
    """The same devices would get the other kind of plan, or fewer devices, if the planner were free to choose."""
    speeds = {LOCAL: MS, A: MS, B: MS * 3}
    first = make_plan(WORK.limits, "made up", "", [LOCAL, A], kind)
    chosen = replanner(first, speeds, parallel=kind, is_given=True)
    plan, why = chosen.plan([A, B])
    assert why == f"{kind} as asked, shares by speed"
    assert arrange.kind_of(plan) == kind
    assert set(plan.devices) == {LOCAL, A, B}
    assert arrange.kind_of(chosen.plan([A])[0]) == kind
    other = make_plan(WORK.limits, "made up", "", [LOCAL, A, B], "pipeline" if kind == "tensor" else "tensor")
    quick = replanner(first, dict.fromkeys(speeds, MS), parallel=kind, is_given=True)
    assert not quick.pays(other, first)


def test_a_kind_that_became_impossible_gives_way_after_a_loss() -> None:
    layers = WORK.shape.n_layers
    names = [LOCAL, *(f"w{n}:1" for n in range(layers + 1))]
    chosen = replanner(shared(*names[:2]), dict.fromkeys(names, MS), parallel="pipeline", is_given=True)
    plan, why = chosen.plan(names[1:])
    assert "as asked" not in why
    assert plan.devices
