"""Test deployments that are refused because a device is missing or too small, and models that change."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge.cluster import fleet as fleets
from edge.cluster import preflight
from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import LlmRanks
from edge.errors import NotEnoughMemory, SliceError, WorkerError
from edge.llm.engine import Engine
from edge.models import shapes, synth
from edge.models.demo import MODEL_PATH
from edge.models.digests import Digests
from partition.model.file import ModelFile
from tests.conftest import FIGURES, SMALL, Synthetic
from tests.support.deployments import EXACT, ONE_THREAD, OPTIONS, deployed, idle, plan_for, tensor
from tests.support.fake_worker import fake_worker
from tests.support.workers import Worker, worker
from transport.errors import TransportError

pytestmark = pytest.mark.usefixtures("two")


# Devices that do not fit.


def test_a_worker_that_is_not_there(two: list[Worker], tmp_path: Path) -> None:
    with worker(tmp_path / "gone", *ONE_THREAD) as gone:
        pass
    with pytest.raises(TransportError, match=f"nothing listens at {gone.address}"):
        Fleet([two[0].address, gone.address])


def test_another_version(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "version", lambda package: {"edge-runtime": "9.9.9"}.get(package, "0"))
    with pytest.raises(WorkerError, match=r"one runs edge [0-9.]+\S*, this device 9\.9\.9; install the same version"):
        Fleet([two[0].address])
    monkeypatch.undo()
    with fake_worker() as fake, pytest.raises(WorkerError, match=r"fake runs edge 0, this device [0-9.]+"):
        Fleet([fake.address])


def test_too_many_workers_and_none() -> None:
    for addresses in ([], ["127.0.0.1:1"] * 64):
        with pytest.raises(ValueError, match="1 to 63 are possible"):
            Fleet(addresses)


def test_a_device_without_room(tmp_path: Path, two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModelFile.open(MODEL_PATH)
    with worker(tmp_path / "small", "--name", "small", "--memory", "1MiB", *ONE_THREAD) as small:
        plan = plan_for(MODEL_PATH, [small, two[1]], tensor(1, 1, 1))
        with Fleet([small.address, two[1].address]) as fleet:
            words = r"small needs 64 MiB or more \(runtime 64, KV cache \d\) and has 1: give it a smaller share"
            with pytest.raises(NotEnoughMemory, match=words):
                LlmRanks(fleet, plan, file, OPTIONS)
            monkeypatch.setattr(preflight, "available_memory", lambda: 2 << 20)
            with pytest.raises(NotEnoughMemory, match=r"this device needs \d MiB .* has 2; small needs"):
                LlmRanks(fleet, plan, file, replace(OPTIONS, context=2048))
            idle([small, two[1]], fleet)
        for word in ("slice-received", "slice-cut", "session-opened"):
            assert word not in small.log()


def test_a_device_with_room_for_its_daemon_alone(tmp_path: Path, two: list[Worker]) -> None:
    file = ModelFile.open(MODEL_PATH)
    with worker(tmp_path / "small", "--name", "small", "--memory", "100MiB", *ONE_THREAD) as small:
        plan = plan_for(MODEL_PATH, [two[0], small], tensor(1, 1, 1))
        with Fleet([small.address, two[0].address]) as fleet:
            words = (
                r"small: a session that has loaded nothing needs at least 96\.0 MiB, and of 0 B that are shared 0 B are"
                r" available: other loaded parts need 0 B; the daemon takes \d+ MiB of this worker's 100 MiB: start it"
                r" with more --memory, or end a session$"
            )
            with pytest.raises(WorkerError, match=words) as caught:
                LlmRanks(fleet, plan, file, OPTIONS)
            assert caught.value.error == "NotEnoughMemory"
            idle([small, two[0]], fleet)


# Models that change.


def test_a_model_that_is_not_the_plans(two: list[Worker], synthetic: Synthetic, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(synthetic("llama", "f32"), path)
    digest = Digests(tmp_path).model_digest(path)
    plan = plan_for(path, two[:1], tensor(1, 1), digest)
    with Fleet([two[0].address]) as fleet:
        with LlmRanks(fleet, plan, ModelFile.open(path), EXACT) as deployment:
            deployment.engine.decode([5], 0)
        synthesized(path, seed=8)
        with pytest.raises(
            SliceError, match=f"model.gguf has SHA-256 .* the plan is for {digest[:12]}.*make a new plan"
        ):
            LlmRanks(fleet, plan, ModelFile.open(path), EXACT)
        idle(two[:1], fleet)


def synthesized(path: Path, seed: int) -> None:
    """A small model of the same shape as others, with weights of its own, in the place of what was there."""
    fresh = path.with_suffix(".new")
    synth.synthesize(fresh, shapes.shape("llama", **SMALL, **FIGURES["llama"]), "f32", seed=seed)
    fresh.replace(path)


def test_a_model_that_was_changed_is_cut_again(two: list[Worker], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    results = []
    for seed in (3, 4, 3):
        synthesized(path, seed)
        before = [item.log().count("slice-received") for item in two]
        with deployed(two, path, tensor(1, 1, 1), EXACT) as deployment, Engine(path, EXACT) as single:
            expected = single.decode([5, 6, 7], 0)
            np.testing.assert_allclose(deployment.engine.decode([5, 6, 7], 0), expected, atol=1e-5 * expected.std())
            results.append(expected.copy())
        sent = [item.log().count("slice-received") for item in two]
        assert [now - then for now, then in zip(sent, before, strict=True)] == ([1, 1] if len(results) < 3 else [0, 0])
    assert np.abs(results[0] - results[1]).max() > 0.1
    np.testing.assert_array_equal(results[0], results[2])
