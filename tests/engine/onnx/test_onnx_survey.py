"""Test devices that time parts of an ONNX graph, and the figures that follow from such times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from edge.cluster.fleet import Fleet
from edge.errors import EngineError, WorkerError
from edge.onnx.model import OnnxSource
from edge.profiling import onnx_survey as survey_module
from edge.profiling import onnx_times
from edge.profiling.onnx_survey import onnx_survey
from edge.profiling.onnx_times import MOST_PARTS, SegmentTimes, times_of
from edge.profiling.survey import Survey
from partition.errors import PlanError
from partition.plan.onnx_cuts import choose
from partition.plan.plan import LOCAL
from partition.predict.onnx_predict import OnnxDevice, OnnxWork
from partition.search.onnx_planner import OnnxPlanner
from tests.support.deployments import own_folders, shared_workers, survey_is_over
from tests.support.onnx_networks import model_of
from tests.support.onnx_pipelines import at, owned, residual
from tests.support.workers import Worker

pytestmark = pytest.mark.usefixtures("measured_briefly")


@pytest.fixture(autouse=True, scope="module", name="two")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    with shared_workers(tmp_path_factory, "one", "two") as two:
        yield two


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make timing short, as no test here looks at times closely."""
    monkeypatch.setattr(onnx_times, "_LEAST_S", 0.02)


def unruly() -> ModelProto:
    """The third of its four nodes looks rows up that noise, which is 0 or 1, does not find."""
    nodes = [
        helper.make_node("Relu", ["x"], ["h"], "relu"),
        helper.make_node("Exp", ["h"], ["e"], "exp"),
        helper.make_node("Gather", ["e", "ids"], ["rows"], "gather"),
        helper.make_node("Neg", ["rows"], ["y"], "neg"),
    ]
    model = model_of(nodes, {"x": [1, 8]}, [])
    model.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, [64]))
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 8]))
    return model


def segments(result: Survey[OnnxDevice]) -> list[tuple[float, ...]]:
    """Seconds of each, by device."""
    return [speed.segments_s for speed in result.speeds]


def surveyed(
    two: list[Worker], model: OnnxSource, which: str, **how: Any
) -> tuple[Survey[OnnxDevice], list[tuple[float, float]]]:
    steps: list[tuple[float, float]] = []
    with Fleet([item.address for item in two]) as fleet:
        result = onnx_survey(
            fleet, model, choose(model.graph, which), threads=1,
            on_step=lambda done, total: steps.append((done, total)), **how,
        )  # fmt: skip
        survey_is_over(two)  # though the fleet is still there
    return result, steps


# ----------------------------------------------------------------------------------------------------- on real devices


def test_devices_are_measured_and_remembered(two: list[Worker], tmp_path: Path) -> None:
    model = owned(residual(), tmp_path / "residual.onnx")
    result, steps = surveyed(two, model, "blocks")
    names = [LOCAL, *(item.address for item in two)]
    assert [speed.device for speed in result.speeds] == names
    assert [speed.name for speed in result.speeds] == ["this device", "one", "two"]
    cuts = choose(model.graph, "blocks")
    n = len(cuts) + 1
    for seconds in segments(result):
        assert len(seconds) == n
        assert 0 < sum(seconds) < 1
    assert set(result.links.between) == {(a, b) for a in names for b in names if a != b}
    for speed in result.speeds:
        assert 1e-4 < speed.stage_s < 1
        assert speed.memory_bytes > speed.runtime_bytes > 0
        assert speed.age_s == 0
    assert result.estimated == ()
    all_steps = 3 * (n + 1) + 3
    assert steps == [(i, all_steps) for i in range(1, all_steps + 1)]

    again, steps = surveyed(two, model, "blocks")
    assert len(steps) == 3  # the links alone
    assert segments(again) == segments(result)
    assert all(item.age_s > 0 for item in again.speeds)

    planner = OnnxPlanner(OnnxWork.from_graph(model.graph, cuts), result.speeds, result.links, model.name, model.digest)
    placed, exact = planner.front()
    assert exact
    for speed in placed:  # type: ignore[assignment]
        model.check(speed.plan)  # type: ignore[attr-defined]
    assert len(planner.singles()) == 3


def test_what_does_not_run_on_noise_is_estimated(two: list[Worker], tmp_path: Path) -> None:
    model = owned(unruly(), tmp_path / "unruly.onnx")
    result, _ = surveyed(two, model, "all")
    [label] = result.estimated
    assert "gather" in label
    assert [cut.label for cut in choose(model.graph, "all")].index(label) == 2
    for seconds in segments(result):
        assert 0 < seconds[2] < 1


def test_nothing_runs_on_noise(two: list[Worker], tmp_path: Path) -> None:
    model = owned(unruly(), tmp_path / "unruly.onnx")
    with Fleet([two[0].address]) as fleet:
        with pytest.raises(EngineError, match="no part of the model fits and runs on random input"):
            onnx_survey(fleet, model, [], threads=1)
        survey_is_over(two)


def test_this_device_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = owned(residual(), tmp_path / "residual.onnx")
    timed: list[Any] = []  # the sessions that measured

    def counted(session: Any, *rest: Any) -> SegmentTimes:
        timed.append(session)
        return replace(measure(session, *rest), busy=False)  # figures of a busy device may stay the older ones

    measure = survey_module.timed  # type: ignore[attr-defined]
    monkeypatch.setattr(survey_module, "timed", counted)
    result = onnx_survey(None, model, at(model, 3), threads=1, provider="cpu")
    assert [speed.device for speed in result.speeds] == [LOCAL]
    assert len(segments(result)[0]) == 2
    assert result.links.between == {}
    again = onnx_survey(None, model, at(model, 3), threads=1, provider="cpu")
    assert (segments(again), len(timed)) == (segments(result), 1)
    fresh = onnx_survey(None, model, at(model, 3), threads=1, provider="cpu", fresh=True)
    assert len(timed) == 2
    assert fresh.speeds[0].age_s == 0
    whole = onnx_survey(None, model, [], threads=1)
    assert len(segments(whole)[0]) == 1


def test_what_cannot_be_measured(two: list[Worker], tmp_path: Path) -> None:
    model = owned(residual(), tmp_path / "residual.onnx")
    with pytest.raises(PlanError):
        onnx_survey(None, model, at(model, 3)[::-1] + at(model, 1), threads=1)
    with Fleet([two[0].address]) as fleet:
        with pytest.raises(WorkerError, match="there is no provider 'abacus'"):
            onnx_survey(fleet, model, at(model, 3), threads=1, provider="abacus")
        survey_is_over(two)


def test_a_file_of_remembered_times_that_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, two: list[Worker]
) -> None:
    own_folders(monkeypatch, tmp_path)
    model = owned(residual(), tmp_path / "residual.onnx")
    onnx_survey(None, model, at(model, 3), threads=1)
    [path] = tmp_path.rglob("onnx-speeds.json")
    whole = path.read_text()
    for text in (
        "{",
        whole.replace('"segments_s": [', '"segments_s": [1,'),
        whole.replace('"stage_s": ', '"stage_s": -1'),
    ):
        path.write_text(text)
        steps: list[float] = []
        onnx_survey(None, model, at(model, 3), threads=1, on_step=lambda done, total: steps.append(total))  # noqa: B023
        assert steps == [3, 3, 3]  # measured again


# --------------------------------------------------------------------------------------------------- what is made of it


def test_what_a_stage_takes_beside_its_nodes() -> None:
    groups = [range(1), range(1, 3), range(3, 4)]
    times = times_of([1.0, 1.0, 3.0, 0.0], groups, [0.5, 0.9, 0.3], 1.5, 7, "a")
    assert times.stage_s == pytest.approx(0.1)  # (1.7 - 1.5) / 2
    assert times.segments_s == pytest.approx([0.4, 0.2, 0.6, 0.2])
    assert sum(times.segments_s) + times.stage_s == pytest.approx(1.5)
    assert times_of([1.0] * 4, groups, [0.5, 0.9, 0.3], 0.0, 7, "a").stage_s == 0.3  # as much as the fastest takes
    assert times_of([1.0] * 4, groups, [0.5, 0.9, 0.3], 9.0, -7, "a") == SegmentTimes(
        (0.5, 0.45, 0.45, 0.3), 0.0, 0, ()
    )
    assert times_of([1.0] * 4, groups, [0.5, 0.9, 0.3], None, 7, "a").stage_s == 0


def test_estimates_go_by_what_was_measured() -> None:
    times = times_of([1.0, 2.0, 5.0], [range(1), range(1, 2), range(2, 3)], [3.0, None, 15.0], 1.0, 0, "a")
    assert times == SegmentTimes((3.0, 6.0, 15.0), 0.0, 0, (1,))
    with pytest.raises(EngineError, match="a: no part of the model fits"):
        times_of([1.0], [range(1)], [None], None, 0, "a")
    nothing = times_of([0.0, 0.0], [range(2)], [4.0], None, 0, "a")  # estimates know nothing of them
    assert nothing.segments_s == (2.0, 2.0)


def test_many_segments_are_timed_in_groups() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, MOST_PARTS, MOST_PARTS + 1, 500):
        seconds = [float(item) for item in rng.exponential(1.0, n)]
        for own in (seconds, [0.0] * n, [1e9, *seconds[1:]]):
            groups = onnx_times._groups(own)
            assert [i for group in groups for i in group] == list(range(n))
            assert len(groups) <= MOST_PARTS
        groups = onnx_times._groups(seconds)
        most = max(sum(seconds[i] for i in group) for group in groups)
        assert most <= 2 * (sum(seconds) / MOST_PARTS + max(seconds))


@pytest.mark.parametrize(
    "edit",
    [
        {"segments_s": [1.0]},
        {"segments_s": [1.0, math.nan]},
        {"segments_s": [1.0, -1.0]},
        {"segments_s": None},
        {"segments_s": [1.0, "x"]},
        {"stage_s": math.inf},
        {"stage_s": None},
        {"runtime_bytes": -1},
        {"runtime_bytes": math.inf},
        {"estimated": [2]},
        {"estimated": 5},
    ],
)
def test_times_of_another_version_are_none(edit: dict[str, Any]) -> None:
    good = SegmentTimes((1.0, 2.0), 0.5, 9, (1,))
    assert SegmentTimes.from_json(good.to_json(), 2) == good
    assert SegmentTimes.from_json(good.to_json() | edit, 2) is None
    assert SegmentTimes.from_json({}, 2) is None
    assert SegmentTimes.from_json([], 2) is None
