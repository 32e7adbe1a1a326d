"""Test the loss of devices, engine processes and owners of a distributed model: the reports, and no leftovers."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge.cluster import client
from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import Exchange, LlmRanks
from edge.errors import WorkerError
from edge.models.demo import MODEL_PATH
from edge.parallel.engine import DistributedEngine
from partition.model.file import ModelFile
from tests.support.deployments import (
    ONE_THREAD,
    OPTIONS,
    deployed,
    idle,
    pipeline,
    plan_for,
    stages,
    tensor,
)
from tests.support.helpers import ROOT, TIMEOUT_S, stand_still, until
from tests.support.links import start
from tests.support.thorough import each_once
from tests.support.workers import Worker, running, worker
from transport.errors import LinkTimeout, TransportError
from transport.link import Deadlines

pytestmark = pytest.mark.usefixtures("two")

LOST = (TransportError, WorkerError)


class Decoding:
    """An engine that decodes in a thread, until it fails."""

    def __init__(self, engine: DistributedEngine) -> None:
        self.steps = 0
        self._engine = engine
        self._done = start(self._run)
        until(lambda: self.steps > 5 or self._done.done(), "some steps")

    def _run(self) -> None:
        while True:
            position = self.steps % 400
            if position == 0:
                self._engine.kv_clear()
            self._engine.decode([5 + self.steps % 100], position)
            self.steps += 1

    def error(self) -> BaseException:
        """Return the error it failed with."""
        error = self._done.exception(TIMEOUT_S)
        assert error is not None
        return error


def pid_of(deployment: LlmRanks, rank: int) -> int:
    """The engine process of a rank."""
    result = deployment._by_rank[rank].pid
    assert result > 0
    return result


@pytest.mark.parametrize(
    ("how", "victim", "transport"),
    [
        (tensor(1, 1, 1), 2, "tcp"),
        (pipeline(1, 1, 1), 1, "grpc"),
        (stages(1, 2), 1, "tcp"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                (tensor(1, 1, 1), 2, "grpc"),
                (pipeline(1, 1, 1), 1, "tcp"),
                (pipeline(1, 1, 1), 2, "tcp"),
                (pipeline(1, 1, 1), 2, "grpc"),
                (stages(1, 2), 1, "grpc"),
                (stages(2, 1), 1, "tcp"),
                (stages(2, 1), 1, "grpc"),
            ]
        ),
    ],
    ids=str,
)
def test_an_engine_process_that_is_killed(two: list[Worker], how: dict[str, Any], victim: int, transport: str) -> None:
    name = ("one", "two")[(victim - 1) % 2]
    with deployed(two, MODEL_PATH, how, exchange=Exchange(transport=transport)) as deployment:
        decoding = Decoding(deployment.engine)
        os.kill(pid_of(deployment, victim), signal.SIGKILL)
        error = decoding.error()
        assert isinstance(error, WorkerError), repr(error)
        assert f"{name}: the engine process was killed by SIGKILL" in str(error)
        for call in (
            lambda: deployment.engine.decode([5], 0),
            deployment.engine.times,
            deployment.engine.kv_clear,
            lambda: deployment.engine.kv_remove(0, 0),
        ):
            with pytest.raises(WorkerError) as again:
                call()
            assert str(again.value) == str(error)


@pytest.mark.parametrize("how", [tensor(1, 1, 1), pipeline(1, 1, 1)], ids=lambda how: how["parallel"])
def test_a_daemon_that_is_killed(tmp_path: Path, two: list[Worker], how: dict[str, Any]) -> None:
    with worker(tmp_path / "doomed", "--name", "doomed", *ONE_THREAD) as doomed:
        with deployed([doomed, two[1]], MODEL_PATH, how) as deployment:
            decoding = Decoding(deployment.engine)
            children = doomed.children()
            assert len(children) == 1
            doomed.kill()
            error = decoding.error()
            assert isinstance(error, LOST), repr(error)
            assert "doomed" in str(error)
            with pytest.raises(LOST, match="doomed"):
                deployment.engine.decode([5], 0)
        until(lambda: not any(child.is_running() for child in children), "the end of its engine process")


def test_a_rank_that_stands_still(two: list[Worker]) -> None:
    exchange = Exchange(deadlines=Deadlines(step_timeout_s=47.0))
    with deployed(two, MODEL_PATH, tensor(1, 1, 1), exchange=exchange) as deployment:
        deployment.engine.decode([5], 0)
        link = deployment.engine.group.links[2]
        assert link.deadlines.step_timeout_s == 47.0
        link.deadlines = replace(link.deadlines, step_timeout_s=1.5)  # not before: beside a load a start takes longer
        stand_still(pid_of(deployment, 2))
        began = time.monotonic()
        with pytest.raises(TransportError, match=r"rank 2 \(two\) sent nothing for 1.5 s") as caught:
            deployment.engine.decode([5], 1)
        assert isinstance(caught.value, LinkTimeout)
        assert time.monotonic() - began > 1.4


@pytest.mark.parametrize(
    ("lost", "how"),
    each_once(
        [("daemon", 0.01), ("daemon", 0.4), ("daemon", 0.6), ("engine", 0.5)], [tensor(1, 1, 1), pipeline(1, 1, 1)]
    ),
)
def test_a_worker_that_is_lost_while_it_loads(
    tmp_path: Path, two: list[Worker], monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], lost: tuple[str, float]
) -> None:
    what, when = lost
    monkeypatch.setattr(client, "RECONNECT_S", 1.0)
    with worker(tmp_path / "doomed", "--name", "doomed", *ONE_THREAD) as doomed:
        plan = plan_for(MODEL_PATH, [doomed, two[1]], how)
        done: list[float] = []

        def progress(now: float, total: float, doing: str) -> None:
            done.append(now / total)
            if now / total < when or doomed.process.poll() is not None:
                return
            if what == "daemon":
                doomed.kill()
            else:
                for child in doomed.children():
                    with suppress(psutil.NoSuchProcess):  # killed at the last step already
                        child.kill()

        with Fleet([doomed.address, two[1].address]) as fleet:
            file = ModelFile.open(MODEL_PATH)
            with (
                pytest.raises(LOST, match="doomed"),
                LlmRanks(fleet, plan, file, OPTIONS, progress=progress) as deployment,
            ):
                deployment.engine.decode([5], 0)  # where it was lost when all was there already
            assert max(done) >= when
            idle([two[1]], fleet)


OWNER = """
import sys
from pathlib import Path
from edge.models.demo import MODEL_PATH
from edge.cluster.llm_ranks import LlmRanks
from edge.llm.options import EngineOptions
from edge.cluster.fleet import Fleet
from partition.plan.arrange import make_plan
from partition.slices.gguf_slice import limits
from partition.model.file import ModelFile
file = ModelFile.open(MODEL_PATH)
plan = make_plan(limits(file), "model", "", ["local", *sys.argv[2:]], sys.argv[1])
with LlmRanks(Fleet(sys.argv[2:]), plan, file, EngineOptions(threads=1, context=256)) as deployment:
    for position in range(200):
        deployment.engine.decode([5], position)
        print(position, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_an_owner_that_is_killed(two: list[Worker], parallel: str) -> None:
    """Its ranks end, whatever they wait for."""
    command = [sys.executable, "-c", OWNER, parallel, *(item.address for item in two)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        while owner.stdout.readline() != "20\n":
            assert owner.poll() is None
        children = [child for item in two for child in item.children()]
        assert len(children) == 2
        owner.kill()
    until(lambda: not any(map(running, children)), "the end of its engine processes")
    with Fleet([item.address for item in two]) as fleet:
        idle(two, fleet)
