"""Test plans of a trained model that are made while other processes use the cores: one device alone is preferred.

Nothing here depends on how fast a machine is. What is asserted is the choice, given the figures that were recorded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest

from devices.paths import state_folder
from devices.remembered import Remembered
from edge.planning.choice import PlanChoice
from edge.planning.choose import arrange
from edge.planning.plan_options import PlanOptions
from edge.profiling.cluster import Cluster
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.predict.hysteresis import plan_threshold
from partition.predict.predict import predict
from partition.predict.speeds import speed_to_json
from tests.support.commands import runner
from tests.support.workers import Worker

CONTEXT = 256
LOADED_S = 300.0  # the loops end by themselves then
SLOWED = 4.0  # times that this device was measured to take longer, and that it is faster than any when it is quiet


@pytest.fixture(scope="module")
def beside_load(measured_briefly: None, two: list[Worker], smollm2_file: ModelFile) -> PlanChoice:
    """A plan that was made beside two loops, with nothing remembered. How true its figures are is no matter."""
    loop = f"import time\nend = time.monotonic() + {LOADED_S}\nprint(flush=True)\nwhile time.monotonic() < end: pass"
    with ExitStack() as stack:
        for _ in range(2):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", loop], stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
        with Cluster([item.address for item in two], needs_all=True) as cluster:
            return arrange(smollm2_file, cluster, PlanOptions(context=CONTEXT, concurrency=1, threads=1))


@pytest.fixture(scope="module")
def smollm2_file() -> ModelFile:
    from tests.real import weights

    return ModelFile.open(weights.SMOLLM2.path())


def alone(arranged: PlanChoice) -> Plan:
    assert arranged.planner is not None
    return make_plan(arranged.planner.work.limits, "", "", [LOCAL], "pipeline")


def seconds(arranged: PlanChoice, plan: Plan) -> float:
    """Return seconds of a token, with this device as fast as it may be."""
    planner = arranged.planner
    assert planner is not None
    own, *others = planner.speeds
    return predict(plan, planner.work, {item.device: item for item in (own.at_best, *others)}, planner.links).latency_s


def test_a_plan_made_beside_a_load_is_clearly_better_or_one_device(beside_load: PlanChoice) -> None:
    assert beside_load.planner is not None
    busy = [speed for speed in beside_load.planner.speeds if speed.busy]
    assert ("measured while busy: " + ", ".join(speed.name for speed in busy) in beside_load.why) == bool(busy)
    if beside_load.plan.world_size == 1:
        assert beside_load.why.startswith("use one device: ")
        return
    disturbed = any(speed.device in beside_load.plan.devices for speed in busy)
    gain = seconds(beside_load, alone(beside_load)) / seconds(beside_load, beside_load.plan)
    assert gain > plan_threshold(disturbed)


def test_one_device_runs_where_its_quiet_moment_is_known(
    beside_load: PlanChoice,
    two: list[Worker],
    smollm2_file: ModelFile,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The figures that were recorded, made those of a bad moment: this device is known to do better than they say."""
    assert beside_load.planner is not None
    own = beside_load.planner.speeds[0]
    speeds = Remembered("speeds")
    entry = speeds.get(own.key)
    assert entry is not None
    slow = speed_to_json(own.times(SLOWED)) | {"busy": True}
    speeds.put(own.key, slow)
    fastest_s = min(speed.seconds for speed in beside_load.planner.speeds)
    Remembered("quiet-speeds").put(own.key, fastest_s / SLOWED)
    request = ("-p", "Who wrote Romeo and Juliet?", "--max-tokens", "24", "--context", str(CONTEXT))
    there = ("--workers", ",".join(item.address for item in two), "--parallel", "auto", "--threads", "1")
    code, out, error = runner(capsys, "chat")(smollm2_file.path, *request, *there, "--temperature", "0", "--json")
    assert code == 0, error
    result: dict[str, Any] = json.loads(out)
    assert "William Shakespeare" in result["text"]
    assert result["why"].startswith("use one device: ")
    assert "measured while busy: this device" in result["why"]
    assert len(result["ranks"]) == 1
    saved = json.loads((state_folder() / "speeds.json").read_text())
    assert saved[own.key]["value"] == slow
