"""Test that serving plans for throughput, within a tenth more latency than the best plan has."""

from types import SimpleNamespace
from typing import Any

import pytest

from edge.models.demo import MODEL_PATH
from edge.planning import spaces
from edge.planning.choice import PlanChoice
from edge.planning.choose import SLOWER, arrange
from edge.planning.plan_options import PlanOptions
from edge.profiling.profile import ClusterProfile
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL, Plan
from partition.predict.speeds import Curve, DeviceSpeed, LinkSpeed
from tests.support.planning import linked

PI = "pi:7070"


def speed(name: str) -> DeviceSpeed:
    """A device that computes 8 rows of a layer in twice the time of one row."""
    return DeviceSpeed(
        name, name, step_s=Curve(((1, 0.0),)), layer_s=Curve(((1, 0.01), (8, 0.02))), token_s=1e-9,
        half_layer_s=Curve(((1, 0.009), (8, 0.018))), head_s=Curve(((1, 0.001),)),
        memory_bytes=1 << 34, runtime_bytes=0,
    )  # fmt: skip


def arranged(monkeypatch: pytest.MonkeyPatch, objective: str, concurrency: int) -> PlanChoice:
    devices = (speed(LOCAL), speed(PI))
    known = ClusterProfile(devices, linked([LOCAL, PI], LinkSpeed(0.02, 1e7)), ())
    monkeypatch.setattr(spaces, "measured_speeds", lambda *_, **__: ("", known))
    cluster: Any = SimpleNamespace(fleet=object(), devices=[], notes=(), addresses=[PI], insecure=False)
    options = PlanOptions(concurrency=concurrency, context=4096)
    return arrange(ModelFile.open(MODEL_PATH), cluster, options, objective=objective)


def test_several_requests_get_a_copy_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = arranged(monkeypatch, "latency", 8)
    choice = arranged(monkeypatch, "throughput", 8)
    assert isinstance(choice.plan, Plan)
    assert isinstance(fastest.plan, Plan)
    assert [copy.computing_devices for copy in choice.plan.copies] == [(LOCAL,), (PI,)]
    assert choice.predicted is not None
    assert fastest.predicted is not None
    assert choice.predicted.latency_s <= SLOWER * fastest.predicted.latency_s
    assert choice.objective == "throughput"


@pytest.mark.parametrize(("objective", "concurrency"), [("latency", 8), ("throughput", 1)])
def test_one_request_or_latency_gets_the_plan_of_the_fastest_token(
    monkeypatch: pytest.MonkeyPatch, objective: str, concurrency: int
) -> None:
    choice = arranged(monkeypatch, objective, concurrency)
    assert isinstance(choice.plan, Plan)
    assert not choice.plan.replicas
    assert choice.objective == "latency"
