"""Sessions of several owners on one worker: they share its memory, and each computes what one device would."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import DEFAULT_EXCHANGE, LlmRanks
from edge.errors import EdgeError, WorkerError
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.models import shapes, synth
from partition.model.file import ModelFile
from tests.engine.paging.test_paging_ranks import most_held
from tests.support.deployments import ONE_THREAD, own_folders, pipeline, plan_for
from tests.support.helpers import until
from tests.support.workers import Worker, worker
from transport import edge_pb2 as pb

MIB = 1 << 20
OPTIONS = EngineOptions(threads=1, context=128, batch=32)
MEMORY = 520 * MIB  # the model of 170 MB is in memory whole once, and not twice
PROMPT = [5, 300, 17, 401, 88, 260, 33, 499]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    synth.synthesize(path, shapes.shape("llama", layers=5, embd=1024, ff=4096, heads=8, kv=4, vocab=1024), "f16")
    return path


def tokens(engine: TextEngine, n: int, start: int = 0, last: int | None = None) -> list[int]:
    """The next `n` greedy tokens: from the prompt, or behind `last` at a position."""
    result: list[int] = []
    rows, position = (PROMPT, 0) if last is None else ([last], start)
    while len(result) < n:
        result.append(int(engine.decode(rows, position).argmax()))
        position, rows = position + len(rows), [result[-1]]
    return result


@dataclass(frozen=True)
class Owner:
    """An owner of one session."""

    engine: TextEngine
    fleet: Fleet
    address: str

    def shares(self) -> list[pb.SessionState]:
        """The sessions of the worker, the oldest first."""
        return list(self.fleet.workers[self.address].describe()[1].sessions)


@contextmanager
def owner(device: Worker, model: Path) -> Iterator[Owner]:
    """An owner whose model is on the worker alone."""
    plan = plan_for(model, [device], pipeline(0, 1))
    with (
        Fleet([device.address]) as fleet,
        LlmRanks(fleet, plan, ModelFile.open(model), OPTIONS, DEFAULT_EXCHANGE) as deployment,
    ):
        yield Owner(deployment.engine, fleet, device.address)


def test_a_session_that_comes_later_gets_its_share_and_both_compute_what_one_device_does(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_folders(monkeypatch, tmp_path / "own")
    with Engine(model, OPTIONS) as alone:
        expected = tokens(alone, 12)
    with (
        worker(tmp_path / "w", "--memory", f"{MEMORY}B", *ONE_THREAD) as device,
        most_held(device.process.pid) as peak,
        owner(device, model) as first,
    ):
        answer = tokens(first.engine, 6)
        [before] = first.shares()
        assert before.most_bytes <= before.share_bytes
        until(lambda: peak[0] > 170 * MIB, "the first one to hold the whole model")
        alone_held = peak[0]
        with owner(device, model) as second:
            assert tokens(second.engine, 12) == expected
            behind = len(PROMPT) + 5
            assert answer + tokens(first.engine, 6, behind, answer[-1]) == expected
            states = first.shares()
            for state in states:
                assert state.least_bytes <= state.share_bytes
            assert states[0].share_bytes < before.most_bytes
            assert sum(state.memory_bytes for state in states) < MEMORY
            until(lambda: peak[0] > max(300 * MIB, alone_held), "both to hold what they may")
        until(lambda: len(first.shares()) == 1, "the end of the second session")
        until(lambda: first.shares()[0].share_bytes >= before.most_bytes, "the share of the first one to be as before")
        device.process.send_signal(signal.SIGUSR1)
        until(lambda: first.shares()[0].memory_bytes <= before.least_bytes, "its memory to be given back")
        first.engine.kv_clear()
        assert tokens(first.engine, 12) == expected
        device.process.send_signal(signal.SIGUSR2)
        until(lambda: first.shares()[0].share_bytes >= before.most_bytes, "its share to be there again")
    assert max(300 * MIB, alone_held) < peak[0] <= MEMORY


def test_a_session_that_is_killed_leaves_its_memory_and_one_too_many_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_folders(monkeypatch, tmp_path / "own")
    with worker(tmp_path / "w", "--memory", "430MiB", *ONE_THREAD) as device, owner(device, model) as first:
        expected = tokens(first.engine, 6)
        [before] = first.shares()
        with owner(device, model) as second:
            full = r"needs at least .* of \d+ MiB that are shared .* are available: .*more --memory, or end a session"
            with pytest.raises(WorkerError, match=full), owner(device, model):
                pass
            until(lambda: len(first.shares()) == 2, "the end of the session that was refused")
            assert tokens(second.engine, 6) == expected
            os.kill(second.shares()[1].pid, signal.SIGKILL)
            until(lambda: len(first.shares()) == 1, "the end of the session that was killed")
            until(lambda: first.shares()[0].share_bytes == before.share_bytes, "its memory for the first one")
            with pytest.raises(EdgeError):
                tokens(second.engine, 1)
        first.engine.kv_clear()
        assert tokens(first.engine, 6) == expected
