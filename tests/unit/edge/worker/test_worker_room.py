"""Test the division of a worker's memory among sessions: the share of each process, and the memory it frees."""

import threading
from pathlib import Path

import pytest

from edge.errors import NotEnoughMemory
from edge.models.slice_store import SliceStore
from edge.weights.elastic.shares import Member
from edge.worker import memory as worker_memory
from edge.worker.limits import WorkerOptions
from edge.worker.memory import WorkerMemory
from edge.worker.sessions import Session, Sessions
from tests.support.helpers import until
from transport import edge_pb2 as pb
from transport.errors import Refused

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


def loaded(memory: WorkerMemory, name: str, n_bytes: int) -> Member:
    """A session that holds so much, and cannot change."""
    member = memory.open(name)
    memory.claim(member, pb.MemoryClaim(least=n_bytes, most=n_bytes))
    return member


def test_a_session_starts_where_the_others_leave_room(memory: WorkerMemory) -> None:
    loaded(memory, "a", 200 * MIB)
    second = memory.open("b")  # which has loaded nothing: it counts with what a process takes
    with pytest.raises(NotEnoughMemory) as refused:
        memory.open("c")
    assert str(refused.value) == (
        "a session that has loaded nothing needs at least 96.0 MiB, and of 324 MiB that are shared 28.0 MiB are"
        " available: other loaded parts need 296 MiB; the daemon takes 76.0 MiB of this worker's 400 MiB: start it"
        " with more --memory, or end a session"
    )
    assert memory.figures().keys() == {"a", "b"}
    memory.leave(second)
    memory.open("c")


def test_what_a_session_unloads_is_free_for_others(memory: WorkerMemory) -> None:
    first = loaded(memory, "a", 300 * MIB)
    with pytest.raises(NotEnoughMemory):
        memory.open("b")
    memory.empty(first, 1)
    assert memory.figures()["a"].limit == 96 * MIB
    memory.open("b")


def test_a_session_that_asks_gets_its_share_or_hears_why_not(
    memory: WorkerMemory, sent: list[tuple[str, pb.MemoryShare]]
) -> None:
    first, second = memory.open("a"), memory.open("b")
    memory.claim(first, pb.MemoryClaim(least=100 * MIB, most=1000 * MIB))
    rest = (324 - 96) * MIB
    assert sent.pop() == ("a", pb.MemoryShare(bytes=rest, coming=rest, number=2, answers=True))
    memory.claim(second, pb.MemoryClaim(least=300 * MIB, most=1000 * MIB))
    name, share = sent.pop()
    assert (name, share.answers, share.bytes) == ("b", True, 96 * MIB)
    assert share.refused == (
        "the part to load needs at least 300 MiB, and of 324 MiB that are shared 224 MiB are available: other loaded"
        " parts need 100 MiB; the daemon takes 76.0 MiB of this worker's 400 MiB: start it with more --memory, or"
        " end a session"
    )
    memory.ask(0)
    assert sent == [("a", pb.MemoryShare(bytes=100 * MIB, coming=100 * MIB, number=3))]


def test_a_session_that_waits_for_others_begins_when_they_have_given_back(
    memory: WorkerMemory, sent: list[tuple[str, pb.MemoryShare]]
) -> None:
    first = memory.open("a")
    memory.claim(first, pb.MemoryClaim(least=100 * MIB, most=1000 * MIB))
    opened = list[Member]()
    waiting = threading.Thread(target=lambda: opened.append(memory.open("b")))
    waiting.start()
    until(lambda: sent[-1][1].bytes == (324 - 96) * MIB, "the word to give back")
    assert not opened
    memory.report(first, pb.MemoryUse(resident=228 * MIB, seen=sent[-1][1].number))
    waiting.join(30)
    assert [member.name for member in opened] == ["b"]


def test_a_worker_that_may_have_no_more_sessions_says_so_before_it_has_room_for_one(tmp_path: Path) -> None:
    """Nobody gives memory back for a session that is refused."""
    sessions = Sessions(SliceStore(tmp_path / "slices", MIB), WorkerOptions("w", "127.0.0.1", 1, MIB, None, None))
    sessions.leave()
    with pytest.raises(Refused, match="accepts no new session"):
        sessions._start(pb.Command(open=pb.Open(world_size=1)))


def test_a_turn_to_load_ends_once(tmp_path: Path) -> None:
    sessions = Sessions(SliceStore(tmp_path / "slices", MIB), WorkerOptions("w", "127.0.0.1", 1, 400 * MIB, None, None))
    first = Session("a", pb.Open(), NoProcess(), threading.Semaphore())  # type: ignore[arg-type]
    assert sessions._turn.acquire(blocking=False)
    first.has_turn = True
    sessions._release(first)
    assert sessions._turn.acquire(blocking=False)
    sessions._release(first)  # of another session now
    assert not sessions._turn.acquire(blocking=False)
