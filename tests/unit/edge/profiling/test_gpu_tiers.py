"""The GPU of a device's profile: how its memory is read, and which of its processor and its GPU are timed."""

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.llama import own_gpu
from edge.llm.options import MAX_GPU_LAYERS
from edge.models.demo import MODEL_PATH
from edge.parallel.engine_kinds import EngineKind
from edge.planning.describe import prediction_rows
from edge.profiling import llm_survey
from edge.profiling.layer_times import LayerTimes
from edge.profiling.survey import Devices
from edge.tasks import CancelScope
from edge.worker.limits import WorkerOptions
from partition.model.file import ModelFile
from partition.predict.prediction import Prediction, StagePrediction
from partition.predict.residency import fixed_bytes
from partition.predict.speeds import Curve, DeviceSpeed
from tests.support.deployments import own_folders

FILE = ModelFile.open(MODEL_PATH)
PROFILE = EngineKind().describe("here", threads=1)
GIB = 1 << 30


def times(layer_s: float) -> LayerTimes:
    """Times of one layer, whose head and chunk take as long."""
    layer = Curve(((1, layer_s),))
    steps = {"layers": layer, "head": layer.times(2), "half": layer.times(0.5), "more": layer.times(2)}
    return LayerTimes(1, steps, 0.0, 50 << 20, 1e9)


def surveyed(monkeypatch: pytest.MonkeyPatch, free: int | None, gpu_s: float = 0.001) -> tuple[DeviceSpeed, list[Any]]:
    """Return the speed of a device with this much free GPU memory, and the `gpu_layers` of each measurement."""
    requests: list[Any] = []

    def timed(*_: Any, gpu_layers: int | None, **__: Any) -> LayerTimes:
        requests.append(gpu_layers)
        return times(0.004 if gpu_layers == 0 else gpu_s)

    monkeypatch.setattr(llm_survey, "timed", timed)
    devices = Devices(None, 1)
    devices.profiles[0] = replace(devices.profiles[0], gpu="Any", gpu_total_bytes=free, gpu_free_bytes=free)
    with CancelScope() as scope:
        profiler = llm_survey._LayerProfiler(devices, FILE, "0" * 64, {}, {}, scope)
        session: Any = SimpleNamespace(rank=0)
        measured = profiler.time(session, lambda: None, math.inf)
        values = json.loads(json.dumps(profiler.to_json(measured)))
        again = profiler.read(0, values)
        assert again is not None
        return profiler.described(0, again), requests


def test_a_gpu_that_may_be_too_small_is_timed_beside_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_folders(monkeypatch, tmp_path)
    small = FILE.size_bytes
    speed, requests = surveyed(monkeypatch, small)
    assert requests == [MAX_GPU_LAYERS, 0]
    assert speed.gpu is not None
    assert (speed.seconds, speed.gpu.seconds) == pytest.approx((0.004, 0.001))
    fixed = fixed_bytes(512, max(FILE.shape.n_embd, *FILE.shape.n_ff))
    assert (speed.gpu.memory_bytes, speed.gpu.runtime_bytes) == (small, fixed)
    speed, requests = surveyed(monkeypatch, small, gpu_s=0.0039)  # about as fast: weights may as well be in memory
    assert requests == [MAX_GPU_LAYERS, 0]
    assert (speed.seconds, speed.gpu) == (pytest.approx(0.004), None)


@pytest.mark.parametrize("free", [None, 0, 100 * GIB])
def test_other_devices_are_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    own_folders(monkeypatch, tmp_path)
    speed, requests = surveyed(monkeypatch, free)
    assert requests == [None]
    assert (speed.seconds, speed.gpu) == (pytest.approx(0.001), None)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (b'{"name": "CUDA0 (A)", "total_bytes": 10, "free_bytes": 9}', own_gpu.OwnGpu("CUDA0 (A)", 10, 9)),
        (b"null", None),
        (b"", None),
        (b"[1]", None),
        (b'{"name": "A"}', None),
        (b'{"name": "A", "total_bytes": 10, "free_bytes": 11}', None),
    ],
)
def test_the_gpu_is_read_from_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: bytes, expected: own_gpu.OwnGpu | None
) -> None:
    def run(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(stdout=printed)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    assert own_gpu.own_gpu.__wrapped__() is None  # a build without a backend for GPUs starts no process
    monkeypatch.setattr(own_gpu, "may_have_gpu", lambda: False)
    (tmp_path / "libggml-vulkan.so").touch()
    assert own_gpu.own_gpu.__wrapped__() is None  # nor does a build with Vulkan without a GPU's device file
    (tmp_path / "libggml-cuda.so").touch()
    assert own_gpu.own_gpu.__wrapped__() == expected


def test_a_worker_reports_the_gpu_memory_that_its_sessions_may_use() -> None:
    options = WorkerOptions("pi", "127.0.0.1", 1, None, None, None)
    profile = replace(PROFILE, gpu="Any", gpu_total_bytes=8 * GIB, gpu_free_bytes=7 * GIB)
    assert options.limited(profile) == profile
    assert replace(options, gpu_memory=GIB).limited(profile).gpu_free_bytes == GIB
    assert replace(options, gpu_layers=0).limited(profile).gpu_free_bytes is None
    assert replace(options, gpu_memory=GIB).limited(PROFILE) == PROFILE


def test_a_plan_says_what_is_where_on_each_device_with_a_gpu() -> None:
    curve = Curve(((1, 0.1),))
    own, other = (
        StagePrediction((name,), "layers", 1.0, 1.0, 0.0, 0.0, {name: 5 * GIB}, curve, paged_bytes=n, gpu_bytes=on_gpu)
        for name, n, on_gpu in (("a:1", GIB, {"a:1": 2 * GIB}), ("b:1", 0, None))
    )
    predicted = Prediction(1.0, 1.0, None, None, None, 0.0, (own, other), 1, 1)
    rows = prediction_rows(predicted, {"a:1": "desktop", "b:1": "pi"})
    assert ("desktop", "2.00 GiB on the GPU, 3.00 GiB in memory, 1.00 GiB on disk") in rows
    assert not any(name == "pi" for name, _ in rows)
