"""Test plans that are measured while other processes use the processor: the choice, and repeated measurements."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.remembered import Remembered
from edge.errors import Interrupted
from edge.models.demo import MODEL_PATH
from edge.planning.arrange import work_of
from edge.planning.front import pick
from edge.planning.llm_space import LlmSpace
from edge.planning.measuring import INTERRUPTED, VISITS, better, in_doubt, is_off, measure
from edge.planning.onnx_space import OnnxSpace
from edge.planning.plan_options import PlanOptions
from edge.profiling.profile import ClusterProfile
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL
from partition.predict.pareto import judged
from partition.predict.speeds import Links
from tests.support.deployments import own_folders
from tests.support.onnx_pipelines import owned, residual
from tests.support.planning import MS, device

AXES = ("latency", "throughput")


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own_folders(monkeypatch, tmp_path)


@dataclass
class Point:
    """A plan that was predicted to take so long, and does take `true_s`."""

    key: str
    predicted_s: float
    true_s: float
    label: str = "a plan"

    @property
    def predicted(self) -> Any:
        values = {"latency_s": self.predicted_s, "throughput_per_s": 1 / self.predicted_s}
        return SimpleNamespace(**values, to_json=lambda: values)

    def objectives(self, axes: Any) -> tuple[float, ...]:
        return self.predicted_s, -1 / self.predicted_s


@dataclass
class Space:
    """Measures plans on a machine that is busy at random."""

    dice: random.Random
    busy: float  # how often
    names: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def can_run(self, point: Point) -> bool:
        return True

    def measured_key(self, point: Point, fleet: Any) -> str:
        return point.key

    def measure(self, point: Point, fleet: Any) -> Any:
        self.order.append(point.key)
        rounds = [
            point.true_s * (self.dice.uniform(1.3, 8) if self.dice.random() < self.busy else self.dice.uniform(1, 1.03))
            for _ in range(3)
        ]
        best = min(rounds)
        values = {"latency_s": best, "throughput_per_s": 1 / best, "ttft_s": best, "memory_bytes": {}}
        return SimpleNamespace(to_json=lambda: values | {"spread": max(rounds) / best - 1})

    def forget(self, point: Point) -> None:
        self.forgotten.append(point.key)


def run(space: Space, points: list[Point], n: int | None = None, *, fresh: bool = False) -> dict[str, dict[str, Any]]:
    most = len(points) if n is None else n
    total = dict.fromkeys([p.key for p in points], space)
    result, errors = {}, {}
    measure(points, total, None, AXES, most, fresh=fresh, measured=result, errors=errors)  # type: ignore[arg-type]
    assert errors == {}
    return result


@pytest.mark.parametrize("seed", range(30))
def test_no_plan_is_chosen_that_is_much_worse(seed: int) -> None:
    """Half of all rounds are in a burst, and predictions are off by up to a factor of four: what is chosen by what was
    measured is within 15 % of the best."""
    dice = random.Random(seed)
    points = [Point(f"k{i}", 1.0, 1.0) for i in range(5)]
    for point in points:
        point.true_s = dice.uniform(0.01, 0.1)
        point.predicted_s = point.true_s * dice.uniform(0.25, 4)
    space = Space(dice, busy=0.5)
    result = run(space, points)
    measured = [(result[p.key]["latency_s"], -result[p.key]["throughput_per_s"]) for p in points]
    front, knee = judged([p.objectives(AXES) for p in points], list(measured))
    assert knee is not None
    assert front[knee]
    assert points[knee].true_s <= 1.15 * min(p.true_s for p in points)
    assert max(space.order.count(p.key) for p in points) <= VISITS


def test_what_is_sure_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(random.Random(0), busy=0.0)
    points = [Point("a", 0.10, 0.10), Point("b", 0.12, 0.11)]
    result = run(space, points)
    assert sorted(space.order) == ["a", "b"]
    assert {item["age_s"] for item in result.values()} == {0.0}
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    again = run(space, points)
    assert sorted(space.order) == ["a", "b"]  # it is remembered
    assert all(3600 <= item["age_s"] < 7200 for item in again.values())
    assert {k: v["latency_s"] for k, v in again.items()} == {k: v["latency_s"] for k, v in result.items()}
    run(space, points, fresh=True)
    assert sorted(space.order) == ["a", "a", "b", "b"]


def test_a_prediction_that_is_far_off_is_looked_at_again() -> None:
    """209 ms predicted, 5.4 measured: it is measured twice, and the device's speeds are measured anew next time."""
    space = Space(random.Random(0), busy=0.0)
    points = [Point("off", 0.209, 0.0054), Point("fine", 0.1, 0.1), Point("slower", 0.05, 0.1)]
    result = run(space, points)
    assert {p.key: space.order.count(p.key) for p in points} == {"off": 2, "fine": 1, "slower": 2}
    assert [result[p.key]["agree"] for p in points] == [True, False, True]
    assert space.forgotten == ["off"]
    assert space.order.index("fine") < len(space.order) - 2  # what is in doubt comes after all others
    assert is_off(points[0].predicted.to_json(), result["off"])
    assert not is_off(points[1].predicted.to_json(), result["fine"])


def test_a_bad_moment_is_not_kept_for_a_day() -> None:
    point = Point("k", 0.1, 0.1)
    bad = {"latency_s": 0.3, "throughput_per_s": 3.0, "ttft_s": 1.0, "memory_bytes": {}, "spread": 2.0}
    Remembered("measured-plans").put("k", bad | {"visits": 1, "agree": False})
    result = run(Space(random.Random(0), busy=0.0), [point])
    assert result["k"]["latency_s"] < 0.104
    assert result["k"]["ttft_s"] < 0.104


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(143), Interrupted("stopped")])
def test_what_was_measured_before_an_interruption_is_kept(stop: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(random.Random(0), busy=0.0)
    points = [Point(key, 0.1, 0.1) for key in "abc"]
    order = iter([None, stop])
    measure_one = space.measure

    def until_stopped(point: Any, fleet: Any) -> Any:
        if (error := next(order)) is not None:
            raise error
        return measure_one(point, fleet)

    monkeypatch.setattr(space, "measure", until_stopped)
    measured: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    total: Any = dict.fromkeys("abc", space)
    with pytest.raises(type(stop)):
        measure(points, total, None, AXES, 3, measured=measured, errors=errors)  # type: ignore[arg-type]
    [done] = measured
    assert errors == dict.fromkeys(set("abc") - {done}, INTERRUPTED)
    monkeypatch.setattr(space, "measure", measure_one)
    space.order.clear()
    assert set(run(space, points)) == set("abc")
    assert done not in space.order  # the next command goes on from there


def test_visits_end() -> None:
    item = {"latency_s": 1.0, "throughput_per_s": 1.0, "memory_bytes": {}, "spread": 0.0}
    first = better(None, item)
    assert (first["visits"], first["agree"]) == (1, False)
    other = better(first, item | {"latency_s": 0.5, "throughput_per_s": 1.5})
    assert (other["visits"], other["agree"], other["spread"]) == (2, False, 1.0)
    assert (other["latency_s"], other["throughput_per_s"]) == (0.5, 1.5)
    point: Any = Point("k", 1.0, 1.0)
    assert in_doubt(point, other)
    same = better(first, item | {"latency_s": 0.95})
    assert same["agree"]
    assert not in_doubt(point, same)
    for latency_s, throughput_per_s in ((1.0, 2.0), (1.0, 0.5), (0.5, 1.0), (2.0, 1.0)):  # one of both differs
        other_visit = item | {"latency_s": latency_s, "throughput_per_s": throughput_per_s}
        apart = better(first, other_visit)
        assert (apart["agree"], apart["spread"]) == (False, 1.0)
        assert apart == better(better(None, other_visit), item)
    third = better(other, item | {"latency_s": 9.0})
    assert third["latency_s"] == 0.5
    assert not in_doubt(point, third)  # often enough


numbers = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(lambda pair: tuple(map(float, pair)))


@given(st.lists(st.tuples(numbers, st.none() | numbers), min_size=1, max_size=12))
def test_the_front_goes_by_measurement(points: list[tuple[tuple[float, ...], tuple[float, ...] | None]]) -> None:
    predicted, measured = [a for a, _ in points], [b for _, b in points]
    front, knee = judged(predicted, measured)
    known = [item for item in measured if item is not None]

    def dominated(values: tuple[float, ...], by: list[tuple[float, ...]]) -> bool:
        return any(o != values and all(x <= y for x, y in zip(o, values, strict=True)) for o in by)

    for i, values in enumerate(measured):
        if values is not None:  # a promise does not dominate it
            assert not (front[i] and dominated(values, known))
            assert front[i] or dominated(values, known) or values in measured[:i]
        elif front[i]:
            assert not dominated(predicted[i], known)
    assert knee is not None
    assert front[knee]
    assert measured[knee] is not None or not known


def test_what_is_picked() -> None:
    def point(id_: str, said: float, was: float | None, **more: Any) -> dict[str, Any]:
        total = {"throughput_per_s": 1.0, "memory_bytes": {"a": 1}, "ttft_s": None, "energy_j": None}
        measured = None if was is None else total | {"latency_s": was}
        return {"id": id_, "predicted": total | {"latency_s": said}, "measured": measured, "on_front": True, **more}

    points = [point("p1", 1, None), point("p2", 2, 9.0, knee=False), point("p3", 3, 4.0, knee=True)]
    assert pick({"points": points}, "latency")["id"] == "p3"
    assert pick({"points": points}, "knee")["id"] == "p3"
    assert pick({"points": points}, "p1")["id"] == "p1"
    assert pick({"points": [{**p, "measured": None} for p in points]}, "latency")["id"] == "p1"


def test_what_a_plan_took_is_remembered_for_its_exchange_alone() -> None:
    """Floats of another type, or another transport, take another time."""
    file, known = ModelFile.open(MODEL_PATH), ClusterProfile((device(LOCAL, MS),), Links({}), ())
    options = PlanOptions(), PlanOptions(wire="q8"), PlanOptions(transport="grpc")
    spaces = [LlmSpace(file, "", work_of(file), known, each) for each in options]
    point, _ = spaces[0].best("latency", {})
    assert len({tuple(space.depends_on(point)) for space in spaces}) == len(options)


def test_what_a_pipeline_took_is_remembered_for_its_exchange_and_inputs_in_flight_alone(tmp_path: Path) -> None:
    model, known = owned(residual(), tmp_path / "residual.onnx"), ClusterProfile[Any]((), Links({}), ())
    options = PlanOptions(), PlanOptions(wire="f16"), PlanOptions(transport="grpc"), PlanOptions(concurrency=4)
    point: Any = SimpleNamespace(key="a plan")
    assert len({tuple(OnnxSpace(model, known, [], each).depends_on(point)) for each in options}) == len(options)
