"""Memory of a worker that is divided among sessions: what each process has, and what is free again afterwards."""

import threading
from pathlib import Path

import pytest

from edge.errors import NotEnoughMemory
from edge.slices.store import SliceStore
from edge.worker import memory as worker_memory
from edge.worker.limits import ResourceLimits
from edge.worker.memory import WorkerMemory
from edge.worker.sessions import Session, Sessions
from tests.support.helpers import until
from transport import edge_pb2 as pb

MIB = 1 << 20


class NoProcess:
    """An engine process that runs and says nothing."""

    pid = 1


@pytest.fixture
def sent() -> list[tuple[str, pb.MemoryShare]]:
    """Shares that sessions were told, with their names."""
    return []


@pytest.fixture
def memory(sent: list[tuple[str, pb.MemoryShare]], monkeypatch: pytest.MonkeyPatch) -> WorkerMemory:
    """That of a worker that lends 400 MiB and whose daemon takes 76."""
    monkeypatch.setattr(worker_memory, "own_rss", lambda: 52 * MIB)
    monkeypatch.setattr(worker_memory, "rss", lambda pid: 70 * MIB)
    return WorkerMemory(400 * MIB, lambda name, command: sent.append((name, command.share)))


def loaded(memory: WorkerMemory, name: str, n_bytes: int) -> None:
    """A session that holds so much, and cannot change."""
    memory.open(name)
    memory.note(name, pb.MemoryUse(least=n_bytes, most=n_bytes, held=n_bytes))


def test_a_session_starts_where_the_others_leave_room(memory: WorkerMemory) -> None:
    loaded(memory, "a", 200 * MIB)
    memory.open("b")  # which has loaded nothing: it counts with what a process takes
    with pytest.raises(NotEnoughMemory) as refused:
        memory.open("c")
    assert str(refused.value) == (
        "a session that has loaded nothing needs at least 96.0 MiB, and of 324 MiB that are shared 28.0 MiB can be had:"
        " what else is loaded needs 296 MiB; the daemon takes 76.0 MiB of this worker's 400 MiB: start it with more"
        " --memory, or end a session"
    )
    memory.leave("b")
    memory.open("c")


def test_what_a_session_unloads_is_free_for_others(memory: WorkerMemory) -> None:
    loaded(memory, "a", 300 * MIB)
    with pytest.raises(NotEnoughMemory):
        memory.open("b")
    memory.empty("a", 1)
    assert memory.figures()["a"].limit == 96 * MIB
    memory.open("b")


def test_a_session_that_asks_gets_its_share_or_hears_why_not(
    memory: WorkerMemory, sent: list[tuple[str, pb.MemoryShare]]
) -> None:
    for name in ("a", "b"):
        memory.open(name)
    memory.note("a", pb.MemoryUse(least=100 * MIB, most=1000 * MIB))
    until(lambda: len(sent) == 1, "the first share")
    assert sent.pop() == ("a", pb.MemoryShare(first=True, bytes=(324 - 96) * MIB))
    memory.note("b", pb.MemoryUse(least=300 * MIB, most=1000 * MIB))
    until(lambda: len(sent) == 1, "a refusal")
    name, share = sent.pop()
    assert (name, share.first, share.bytes) == ("b", True, 0)
    assert share.refused == (
        "what is to be loaded needs at least 300 MiB, and of 324 MiB that are shared 224 MiB can be had: what else is"
        " loaded needs 100 MiB; the daemon takes 76.0 MiB of this worker's 400 MiB: start it with more --memory, or"
        " end a session"
    )
    memory.ask(0)
    assert sent == [("a", pb.MemoryShare(bytes=100 * MIB))]


def test_a_turn_to_load_ends_once(tmp_path: Path) -> None:
    sessions = Sessions(SliceStore(tmp_path / "slices", MIB), "127.0.0.1", None, ResourceLimits(1), 400 * MIB, 0)
    first = Session("a", pb.Open(), NoProcess(), threading.Semaphore())  # type: ignore[arg-type]
    assert sessions._turn.acquire(blocking=False)
    first.has_turn = True
    sessions._release(first)
    assert sessions._turn.acquire(blocking=False)
    sessions._release(first)  # of another session now
    assert not sessions._turn.acquire(blocking=False)
