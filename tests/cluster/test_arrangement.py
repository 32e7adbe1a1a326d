"""Test the choice of a plan: as requested, else by measurements; one device if more devices gain nothing."""

from dataclasses import replace

import pytest

from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.planning.arrange import allreduce_s, can_share, work_of
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL
from partition.predict.hysteresis import PLAN
from partition.predict.speeds import Curve, DeviceSpeed, Links, LinkSpeed
from partition.search.explain import best, kind_of
from partition.search.planner import Planner
from partition.slices.gguf_slice import limits
from tests.support.planning import best_of
from transport.choice import choose

MS = 1e-3
FILE = ModelFile.open(MODEL_PATH)
ROOM = 1 << 30


def speed(device: str, layer_s: float, room: int = ROOM) -> DeviceSpeed:
    layer = Curve(((1, layer_s), (64, 20 * layer_s)))
    return DeviceSpeed(
        device, device, Curve(((1, 0.0),)), layer, 0.0, layer.times(0.5), layer.times(0.1), room, 1 << 20
    )


def planner(*layers_s: float, latency_s: float = 20e-6, rooms: tuple[int, ...] = ()) -> Planner:
    devices = [LOCAL, *(f"b{i}:1" for i in range(1, len(layers_s)))]
    sizes = rooms or (ROOM,) * len(devices)
    way = LinkSpeed(latency_s, 1e9)
    links = Links({(a, b): way for a in devices for b in devices if a != b})
    speeds = [speed(*item) for item in zip(devices, layers_s, sizes, strict=True)]
    return Planner(work_of(FILE, EngineOptions(context=256)), speeds, links, "m", "", tensor=can_share(FILE))


def test_two_alike_with_a_quick_link_share_every_layer() -> None:
    plan, why = best_of(planner(MS, MS))
    assert kind_of(plan) == "tensor"
    assert why.startswith("tensor on 2 devices: ")
    assert "on this device alone" in why


def test_a_link_that_takes_long_leaves_one_device() -> None:
    plan, why = best_of(planner(MS, MS, latency_s=5 * MS))
    assert plan.devices == (LOCAL,)
    assert why.startswith("use one device: ")


def test_a_fast_device_far_away_gets_all() -> None:
    plan, why = best_of(planner(10 * MS, MS, latency_s=2 * MS))
    assert kind_of(plan) == "pipeline"
    assert [len(stage.layers) for stage in plan.stages] == [0, limits(FILE).sizes.layers]
    assert why.startswith("all layers on b1:1, tokens on this device: ")


def test_a_gain_that_errors_could_explain_is_none() -> None:
    built = planner(MS, MS, latency_s=0.237 * MS)
    result, _ = built.front(("latency",))
    alone, _ = built.only_own().front(("latency",))
    assert result[0].plan.world_size == 2
    assert 1 < alone[0].objectives[0] / result[0].objectives[0] < PLAN
    assert best(built, "latency").plan.world_size == 1


def test_what_has_no_room_says_need_and_have() -> None:
    little = 2 << 20
    with pytest.raises(PlanError, match=r"no plan fits: the model needs \d+ MiB .*local has 1; b1:1 has 1; use"):
        best(planner(MS, MS, rooms=(little, little)), "latency")


def test_what_nothing_can_do_names_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"no plan has latency of at most 0\.00100 ms a token; the best latency"):
        best(planner(MS, MS), "latency", {"latency": 1e-6})


def test_caps_on_others_are_kept() -> None:
    built = planner(MS, MS)
    free, _ = built.front(("latency",))
    current = best(built, "latency", {"memory": 15 << 20})
    assert current.plan != free[0].plan or current.objectives[1] <= 15 << 20
    assert current.objectives[1] <= 15 << 20


def test_energy_needs_watts() -> None:
    with pytest.raises(PlanError, match="give watts of local in the cluster file"):
        planner(MS).front(("energy",))
    with_power = planner(MS).like([replace(speed(LOCAL, MS), watts=10.0)], Links())
    result, _ = with_power.front(("energy",))
    assert result[0].objectives[0] == pytest.approx(10 * MS * (limits(FILE).sizes.layers + 0.1), rel=0.05)


def test_sum_is_predicted_by_the_algorithm_that_ranks_choose() -> None:
    assert allreduce_s(8192, 8192, 2, 1 * MS, 1e9) == pytest.approx(MS + 8192 / 1e9)
    work = work_of(FILE, wire="q8")
    wire_bytes = work.state_bytes(64)
    chosen = choose(4 * 64 * work.shape.n_embd, wire_bytes, 4, 1 * MS, 1e6)
    assert work.sum_s(64, 4, 1 * MS, 1e6) == chosen.seconds[chosen.algorithm]
