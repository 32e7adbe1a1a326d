"""Test that the daemon survives any end of its engine processes, and frees everything of them."""

import os
import random
import signal
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from edge.cluster.client import Remote
from edge.cluster.session import RemoteSession
from edge.errors import WorkerError
from edge.models.demo import MODEL_PATH
from edge.models.digests import Digests
from partition.slices.recipe import whole
from tests.support.helpers import until
from tests.support.thorough import some
from tests.support.workers import SECRET, Worker, gone, load_slice, watched, worker
from transport import edge_pb2 as pb

# How often the process is killed at each moment; early is cheap. Starting takes some 0.3 s, loading 0.1 s.
MOMENTS = {"starting": some(10, 70), "opened": some(4, 12), "loading": some(4, 12), "loaded": some(2, 6)}
ALLOWED_BYTES, ALLOWED_HANDLES = 32 << 20, 10  # that the daemon may grow by


def spent_s(process: psutil.Process) -> float:
    """Processor time of a process: how far it is, also on a busy machine."""
    try:
        return float(sum(process.cpu_times()[:2]))
    except psutil.NoSuchProcess:
        return float("inf")


def kill_starting(item: Worker, remote: Remote, after_s: float) -> None:
    """Kill an engine process when it has computed so long, before or after it has said that it is ready."""

    def own() -> None:
        with suppress(WorkerError):
            RemoteSession(remote, 0, 1, SECRET).close()

    owner = threading.Thread(target=own)
    owner.start()
    until(lambda: bool(item.children()) or not owner.is_alive(), "an engine process")
    until(lambda: not owner.is_alive() or any(spent_s(child) >= after_s for child in item.children()), "some progress")
    for child in item.children():
        with suppress(psutil.NoSuchProcess):
            child.kill()
    owner.join()


def kill_session(remote: Remote, digest: str, moment: str, after_events: int) -> None:
    """Kill an engine process at this moment of its session: its owner is told how it ended."""
    with RemoteSession(remote, 0, 1, SECRET) as session:
        if moment == "loaded":
            load_slice(session, digest, {"context": 64})
        elif moment == "loading":
            session.tell(pb.Command(load=pb.Load(slice=digest, options={"context": 64})))
            until(lambda: session._events.qsize() >= after_events, "some progress")
        os.kill(session.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            list(iter(session.answer, None))  # what it said before
        assert gone(session.pid)


def test_killed_again_and_again(tmp_path: Path) -> None:
    draw = random.Random(3)
    digest = Digests(tmp_path / "d").model_digest(MODEL_PATH)
    recipe = whole(digest, MODEL_PATH.stat().st_size)
    moments = [moment for moment, times in MOMENTS.items() for _ in range(times)]
    assert len(moments) == some(20, 100)
    draw.shuffle(moments)
    with worker(tmp_path) as first, first.remote() as remote:
        remote.send_slice(recipe, MODEL_PATH, digest)
        process = psutil.Process(first.process.pid)
        with watched(first) as answers:
            for i, moment in enumerate(moments):
                if moment == "starting":
                    kill_starting(first, remote, draw.uniform(0, 0.05))
                else:
                    kill_session(remote, digest, moment, draw.randrange(3))  # it says two things at least
                until(lambda: not remote.describe()[1].sessions, "the end of the session")
                if i == 9:  # by now everything is loaded
                    rss, handles = process.memory_info().rss, process.num_fds()
        assert answers[0] > len(moments)  # and each was SERVING
        until(lambda: process.num_fds() <= handles + ALLOWED_HANDLES, "descriptors closed")
        assert process.memory_info().rss <= rss + ALLOWED_BYTES
        assert not first.children()
        assert not list(first.temporary.glob("edge-*"))
        with RemoteSession(remote, 0, 1, SECRET) as session:
            assert load_slice(session, digest, {"context": 64}).layers > 0
