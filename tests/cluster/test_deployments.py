"""Test concurrent deployments, deployments in a secure cluster, and successive ones; none leaves anything behind."""

import gc
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest

from devices.paths import authority_folder, credentials_folder
from devices.trust.authority import Authority
from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import Exchange, LlmRanks
from edge.llm.engine import Engine
from edge.models.demo import MODEL_PATH
from partition.model.file import ModelFile
from tests.conftest import Synthetic
from tests.support.deployments import (
    EXACT,
    ONE_THREAD,
    deployed,
    own_folders,
    pipeline,
    plan_for,
    tensor,
)
from tests.support.helpers import until
from tests.support.workers import Worker, worker
from tests.system.test_trust_network import join
from transport.errors import Refused

pytestmark = pytest.mark.usefixtures("two")


def test_two_deployments_at_once(two: list[Worker], synthetic: Synthetic) -> None:
    path = synthetic("llama", "f32")
    with ExitStack() as stack:
        engines = [
            stack.enter_context(opened)
            for opened in (
                LlmRanks(
                    stack.enter_context(Fleet([item.address for item in two])),
                    plan_for(path, two, how),
                    ModelFile.open(path),
                    EXACT,
                )
                for how in (tensor(1, 1, 1), pipeline(1, 1))
            )
        ]
        single = stack.enter_context(Engine(path, EXACT))
        for position in range(6):
            expected = single.decode([5 + position], position).copy()
            for deployment in engines:
                row = deployment.engine.decode([5 + position], position)
                np.testing.assert_allclose(row, expected, atol=1e-5 * expected.std())


def test_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(monkeypatch, tmp_path / "own")
    authority = Authority.create(authority_folder(), "desk", credentials_folder())
    with ExitStack() as stack:
        built = []
        for name in ("pi", "nas"):
            join(authority, tmp_path / name / "config" / "edge" / "credentials", name)
            # Who listens on loopback alone shows no credentials.
            options = (*ONE_THREAD, "--no-announce")
            built.append(stack.enter_context(worker(tmp_path / name, *options, listen="0.0.0.0:0")))
            built[-1].host = "127.0.0.1"
        plain = stack.enter_context(worker(tmp_path / "plain", "--name", "plain", *ONE_THREAD))
        expected = None
        for transport in ("tcp", "grpc"):
            for how in (tensor(1, 1, 1), pipeline(1, 1, 1)):
                with deployed(built, MODEL_PATH, how, exchange=Exchange(transport=transport)) as deployment:
                    assert deployment._fleet.secure
                    assert {session.device for session in deployment._sessions} == {"pi", "nas"}
                    result = int(deployment.engine.decode([5, 6, 7], 0).argmax())
                    assert expected in (None, result)
                    expected = result
        with Fleet([item.address for item in built]) as fleet:
            assert fleet.local_name == "desk"
        for insecure in (False, True):
            with pytest.raises(Refused, match=r"pi encrypt and plain do not, so they cannot be linked"):
                Fleet([built[0].address, plain.address], insecure=insecure)


def test_nothing_is_left_here(two: list[Worker]) -> None:
    """Threads and open files, after some deployments."""

    def one_more() -> tuple[int, int]:
        with deployed(two, MODEL_PATH, tensor(1, 1, 1)) as deployment:
            deployment.engine.decode([5], 0)
        return left()

    def left() -> tuple[int, int]:
        gc.collect()  # mapped files are closed by whoever holds them last
        return threading.active_count(), psutil.Process().num_fds()

    threads, handles = one_more()
    one_more()
    one_more()
    until(lambda: all(now <= then + 2 for now, then in zip(left(), (threads, handles), strict=True)), "the end")
