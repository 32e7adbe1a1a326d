"""Test groups of engine processes on real workers: they connect, compute the same, and end or fail correctly."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from edge.cluster.client import Remote
from edge.cluster.session import RemoteSession, answers, connect_all
from edge.errors import WorkerError
from edge.models.demo import MODEL_PATH
from edge.models.digests import Digests
from edge.net.dialling import Dialler
from edge.net.peers import Listener, Peer
from edge.worker import process
from edge.worker.sessions import LINKS_PER_RANK, MAX_SESSIONS
from partition.slices.recipe import whole
from quant.wire import WIRES
from tests.support.helpers import ROOT, TIMEOUT_S, stand_still, until
from tests.support.links import start
from tests.support.thorough import each_once
from tests.support.trust import Cluster, membership_in, shown
from tests.support.workers import SECRET, Worker, gone, load_slice, served, sessions, stalled, worker
from transport import edge_pb2 as pb
from transport import grpc_link, rpc
from transport.errors import LinkClosed, Refused, TransportError
from transport.frame import Kind
from transport.link import Deadlines, Link
from transport.measure import finish
from transport.tcp_link import TcpLink

QUICK = Deadlines(connect_timeout_s=1.0, step_timeout_s=1.5, send_timeout_s=1.5)
ALGORITHMS = ("star", "mesh", "split", "auto")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Two workers that the tests of this file share."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("w")
        yield [stack.enter_context(worker(folder / name, "--name", name)) for name in ("one", "two")]


@pytest.fixture
def remotes(two: list[Worker]) -> Iterator[list[Remote]]:
    """Both, connected and idle."""
    with two[0].remote() as first, two[1].remote() as other:
        for remote in (first, other):
            until(lambda: not remote.describe()[1].sessions, "the end of earlier sessions")  # noqa: B023
        yield [first, other]


@pytest.fixture(scope="module")
def demo(two: list[Worker], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the bundled model, which the first worker has."""
    digest = Digests(tmp_path_factory.mktemp("d")).model_digest(MODEL_PATH)
    with two[0].remote() as remote:
        remote.send_slice(whole(digest, MODEL_PATH.stat().st_size), MODEL_PATH, digest)
    return digest


def allreduce(
    group: list[RemoteSession], n: int = 1000, algorithm: str = "auto", wire: str = "f32", **how: int
) -> list[Any]:
    """The same sum on all ranks."""
    figures = {"repeats": 1, "seed": 7, **how}
    for session in group:
        session.tell(pb.Command(allreduce=pb.Allreduce(n_floats=n, algorithm=algorithm, wire=wire, **figures)))
    return [event.allreduced for event in answers(group)]


def expected(n_ranks: int, n: int, wire: str, seed: int) -> bytes:
    """The digest of the sum in rank order of what each rank makes, once over the wire."""
    parts = []
    for rank in range(n_ranks):
        x = np.random.default_rng([seed, rank]).standard_normal(n, np.float32)
        kind = WIRES[wire]
        if kind is not None and n_ranks > 1:
            data = np.empty(kind.n_bytes(n), np.uint8)
            kind.encode(x, data)
            kind.decode(data, x)
        parts.append(x)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return hashlib.sha256(total.tobytes()).digest()


def connect(session: RemoteSession, *peers: Peer, transport: str = "auto") -> None:
    """Tell one rank alone to connect."""
    fields = ("rank", "name", "host", "port", "tcp_port", "session")
    provided = [pb.Peer(**{field: getattr(peer, field) for field in fields}) for peer in peers]
    session.tell(pb.Command(connect=pb.Connect(peers=provided, transport=transport)))


# Together.


@pytest.mark.parametrize(("n_ranks", "transport"), each_once([2, 3, 5], ["grpc", "tcp", "auto"]))
def test_all_ranks_hold_the_same_sum(remotes: list[Remote], n_ranks: int, transport: str) -> None:
    with sessions(remotes, n_ranks) as group:
        states = connect_all(group, transport)
        for rank, links in enumerate(states):
            assert [link.rank for link in links] == list(range(rank + 1, n_ranks))
            for link in links:
                assert link.kind == ("tcp" if transport == "auto" else transport)
                assert link.round_trip_s > 0
                assert link.why.startswith(f"{link.kind} ")
        for wire in WIRES:
            for n in (1, 1000, 40_000):
                want = expected(n_ranks, n, wire, seed=n)
                for algorithm in ALGORITHMS:
                    result = allreduce(group, n, algorithm, wire, seed=n, repeats=2)
                    assert [item.digest for item in result] == [want] * n_ranks, (algorithm, wire, n)
                    assert {item.algorithm for item in result} == {result[0].algorithm}
                    assert result[0].algorithm == algorithm or algorithm == "auto"


def test_one_rank_alone(remotes: list[Remote]) -> None:
    with sessions(remotes[:1], 1) as group:
        assert connect_all(group) == [[]]
        assert allreduce(group)[0].digest == expected(1, 1000, "f32", 7)


def test_measuring_between_ranks(remotes: list[Remote]) -> None:
    with sessions(remotes, 3) as group:
        connect_all(group)
        group[2].tell(pb.Command(answer=pb.Answer(rank=0)))
        group[0].tell(pb.Command(measure=pb.Measure(rank=2, seconds=0.2)))
        measured = group[0].answer().measured
        assert group[2].answer().WhichOneof("event") == "answered"
        assert 0 < measured.round_trip_best_s <= measured.round_trip_median_s <= measured.round_trip_p99_s
        assert min(measured.send_bytes_per_s, measured.receive_bytes_per_s) > 1e6
        allreduce(group)


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed() -> int:
    """A port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("how", ["silent", "closed"])
@pytest.mark.parametrize(("field", "kind"), [("tcp_port", "grpc"), ("port", "tcp")])
def test_auto_uses_grpc_only_if_tcp_cannot_be_reached(
    remotes: list[Remote], how: str, field: str, kind: str, request: pytest.FixtureRequest
) -> None:
    wrong = request.getfixturevalue(how)
    with sessions(remotes, 2, QUICK) as group:
        low, high = group
        connect(low, replace(high.peer, **{field: wrong}))
        connect(high, low.peer)
        (state,) = low.answer().connected.links
        high.answer()
        assert state.kind == kind
        assert ("tcp failed: " in state.why) == (kind == "grpc")
        assert [item.digest for item in allreduce(group)] == [expected(2, 1000, "f32", 7)] * 2


def test_insecure_workers_reach_each_other_by_grpc(tmp_path: Path) -> None:
    first = worker(tmp_path, "--insecure", listen="0.0.0.0:0")
    with first as insecure, insecure.remote() as remote, sessions([remote], 2) as group:
        for session in group:
            session.peer = replace(session.peer, host="0.0.0.0")  # an address that is not loopback, and arrives
        ((state,), _) = connect_all(group, "grpc")
        assert state.kind == "grpc"
        allreduce(group)


def test_a_worker_of_ipv6(tmp_path: Path) -> None:
    with worker(tmp_path, listen="[::1]:0") as first, first.remote() as remote:
        for transport in ("tcp", "grpc"):
            with sessions([remote], 2) as group:
                connect_all(group, transport)
                allreduce(group)


# Refused.


def test_who_does_not_know_the_secret_is_refused(remotes: list[Remote]) -> None:
    with ExitStack() as stack:
        high = stack.enter_context(RemoteSession(remotes[1], 1, 2, SECRET, QUICK))
        for transport in ("tcp", "grpc", "auto"):
            stranger = stack.enter_context(RemoteSession(remotes[0], 0, 2, SECRET[::-1], QUICK))
            connect(stranger, high.peer, transport=transport)
            with pytest.raises(WorkerError, match="the secret is not this group's") as caught:
                stranger.answer()
            assert caught.value.error == "Refused"
        low = stack.enter_context(RemoteSession(remotes[0], 0, 2, SECRET, QUICK))
        connect_all([low, high])  # it is still there for its own
        allreduce([low, high])  # type: ignore[list-item]


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_another_rank_or_session_than_was_meant(remotes: list[Remote], transport: str) -> None:
    with sessions(remotes, 3, QUICK) as (low, middle, high):
        connect(low, replace(high.peer, rank=1), replace(middle.peer, rank=2), transport=transport)
        with pytest.raises(WorkerError, match="this is rank 2, not 1"):
            low.answer()
        if transport == "grpc":
            connect(middle, low.peer, replace(high.peer, session="0123456789abcdef"), transport=transport)
            with pytest.raises(WorkerError, match=r"has no such session|it ended the stream"):
                middle.answer()


@pytest.mark.parametrize(
    ("rank", "world_size", "secret"),
    [(2, 2, SECRET), (0, 0, SECRET), (0, 1000, SECRET), (0, 1, b""), (0, 1, b"x" * 17)],
)
def test_sessions_that_cannot_be(remotes: list[Remote], rank: int, world_size: int, secret: bytes) -> None:
    with pytest.raises(WorkerError, match="a session needs a rank below"):
        RemoteSession(remotes[0], rank, world_size, secret)
    until(lambda: not remotes[0].describe()[1].sessions, "the end of the session")


def test_a_session_begins_with_open(remotes: list[Remote]) -> None:
    stream = rpc.stub(remotes[0].channel, "Session")(iter([pb.Command(unload=pb.Unload())]), timeout=10)
    with pytest.raises(grpc.RpcError, match="a session begins with Open"):
        next(stream)


def test_a_call_that_asks_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "OPEN_S", 0.3)
    go = threading.Event()
    with served(tmp_path) as remote, RemoteSession(remote, 0, 1, SECRET) as session:
        for call in (
            rpc.stub(remote.channel, "Session")(stalled([], go), timeout=TIMEOUT_S),
            remote.channel.stream_unary("/edge.Worker/Describe").future(stalled([], go), timeout=TIMEOUT_S),
        ):
            until(call.done, "its end")
            assert call.code() is grpc.StatusCode.CANCELLED
        session.unload()  # who has opened one may be silent for longer
    go.set()


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_rank_is_dialled_by_each_lower_one_once(remotes: list[Remote], transport: str) -> None:
    with RemoteSession(remotes[1], 1, 2, SECRET, QUICK) as high:
        how: dict[str, Any] = {"deadlines": QUICK, "credentials": None, "transport": transport, "poll_s": 0}
        for rank in (1, 2, 500):
            with pytest.raises(Refused, match=f"rank {rank} is dialled by rank 1"):
                Dialler(rank, SECRET, **how).dial(high.peer)
        with Dialler(0, SECRET, **how).dial(high.peer).link:

            def refused() -> bool:
                try:
                    Dialler(0, SECRET, **how).dial(high.peer).link.close()
                except Refused as error:
                    return "rank 0 has a link already" in str(error)
                return False

            until(refused, "its use")


def test_a_rank_is_the_device_that_was_named(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "c", time.time())
    cluster.joined("pi")
    own = {name: shown(membership_in(cluster.at(name))) for name in ("desk", "pi")}
    for claimed, why in (("desk", None), ("mallory", "rank 0 should be mallory, but desk")):
        for relayed in (False, True):
            door = tmp_path / f"door-{claimed}-{relayed}"
            listener = Listener("127.0.0.1", door, 1, SECRET, QUICK, lambda: own["pi"], 0)
            peer = Peer(1, "pi", "127.0.0.1", 0, listener.tcp_port, "")
            if relayed:
                link = at_the_door(door, b"desk")
            else:
                how: dict[str, Any] = {"deadlines": QUICK, "transport": "tcp", "poll_s": 0}
                link = Dialler(0, SECRET, credentials=lambda: own["desk"], **how).dial(peer).link
            try:
                if why is None:
                    with listener.wait_for({0: claimed}, 5)[0] as result:
                        assert result.peer == "rank 0"
                else:
                    with pytest.raises(Refused, match=why):
                        listener.wait_for({0: claimed}, 5)
            finally:
                listener.close()
                link.close()


def at_the_door(door: Path, name: bytes) -> Link:
    """A link of rank 0 to rank 1, as the daemon brings it that admitted `name`."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(door))
    link = TcpLink(sock, "rank 1", QUICK)
    link.send(name, Kind.CONTROL)
    hello = SECRET + bytes([0, 0, 1, 0])
    link.send(hello, Kind.HELLO)
    assert bytes(link.receive().payload) == hello
    finish(link)
    return link


def test_only_so_many_links(remotes: list[Remote]) -> None:
    with sessions(remotes[:1], 1) as (first,), ExitStack() as stack:

        def dialled() -> Link:
            return stack.enter_context(grpc_link.dial(remotes[0].channel, "it", first.peer.session))

        def is_passed_on() -> bool:
            """Return whether the engine process itself refuses us, who begin with anything."""
            link = dialled()
            try:
                with suppress(LinkClosed):  # it was refused before
                    link.send(bytes(8))
                link.receive(TIMEOUT_S)
            except TransportError as error:
                return "its maximum number of links" not in str(error)
            raise AssertionError("it was answered")

        links = [dialled() for _ in range(LINKS_PER_RANK + 1)]
        waiting = [start(link.receive, TIMEOUT_S) for link in links]
        until(lambda: any(done.done() for done in waiting), "a refusal")
        refused = [i for i, done in enumerate(waiting) if done.done()]
        assert len(refused) == 1
        with pytest.raises(Refused, match="its maximum number of links"):
            waiting[refused[0]].result()
        assert not is_passed_on()
        links[refused[0] - 1].close()
        until(is_passed_on, "a free place")


def test_only_so_many_sessions(remotes: list[Remote]) -> None:
    with sessions(remotes[:1], MAX_SESSIONS) as group:
        with pytest.raises(Refused, match=f"runs {MAX_SESSIONS} sessions already"):
            RemoteSession(remotes[0], 0, 1, SECRET)
        assert len(remotes[0].describe()[1].sessions) == MAX_SESSIONS
        group[3].close()
        until(lambda: len(remotes[0].describe()[1].sessions) < MAX_SESSIONS, "a free place")
        RemoteSession(remotes[0], 0, 1, SECRET).close()


# Commands that cannot be followed.


def test_commands_that_fail_leave_the_session_as_it_was(remotes: list[Remote], demo: str) -> None:
    with sessions(remotes[:1], 2, QUICK) as group:
        first, other = group

        def refused(words: str, error: str = "EdgeError", **command: Any) -> None:
            with pytest.raises(WorkerError, match=words) as caught:
                first.ask(pb.Command(**command))
            assert caught.value.error == error

        def options(**values: Any) -> dict[str, Any]:
            return {"load": pb.Load(slice=demo, options=values)}

        not_yet = "the ranks are not connected yet"
        refused(not_yet, measure=pb.Measure(rank=1, seconds=0.1))
        refused(not_yet, answer=pb.Answer(rank=1))
        refused(not_yet, allreduce=pb.Allreduce(n_floats=1, wire="f32", repeats=1))
        refused("does not know the command open", open=pb.Open(rank=0, world_size=1, secret=SECRET))
        refused("does not know the command None")
        refused(r"was given the peers \[\]", connect=pb.Connect())
        refused(r"was given the peers \[0\]", connect=pb.Connect(peers=[pb.Peer(rank=0)]))
        refused("'pigeon' is not a transport", connect=pb.Connect(peers=[pb.Peer(rank=1)], transport="pigeon"))
        refused("is not in", "SliceError", load=pb.Load(slice="0" * 64))
        refused("is not the name of a slice", "SliceError", load=pb.Load(slice="../../etc/passwd"))
        refused("is not the name of a slice", "SliceError", load=pb.Load(slice="", path=str(MODEL_PATH)))
        for name, value in {"context": 0, "threads": 100_000, "flash_attention": "maybe", "sequences": -1}.items():
            refused(f"{name} must be", "EngineError", **options(**{name: value}))
        refused("cannot store a KV cache", "UnknownTypeError", **options(kv_type="q3_k"))
        odd = pb.Stage(takes={"passed": 65})
        refused(
            "the description of this stage is invalid: takes.passed: 65 stages", load=pb.Load(slice=demo, stage=odd)
        )
        connect_all(group)
        refused("already connected", connect=pb.Connect(peers=[pb.Peer(rank=1)]))
        refused("no link to rank 5", measure=pb.Measure(rank=5, seconds=0.1))
        for n in (0, (16 << 20) + 1, 2**32 - 1):
            refused("an allreduce takes 1 to", allreduce=pb.Allreduce(n_floats=n, wire="f32", repeats=1))
        refused("1 to 10000 times", allreduce=pb.Allreduce(n_floats=1, wire="f32", repeats=10_001))
        refused("'f99' is not a wire type", allreduce=pb.Allreduce(n_floats=1, wire="f99", repeats=1))
        for session in group:
            session.tell(pb.Command(allreduce=pb.Allreduce(n_floats=1, wire="f32", repeats=1, algorithm="bus")))
        for session in group:
            with pytest.raises(WorkerError, match="'bus' is not an allreduce algorithm"):
                session.answer()
        first.unload()  # nothing
        loaded = load_slice(first, demo, {"context": 64})
        assert (loaded.context, loaded.layers > 0, loaded.memory_bytes > 1 << 20) == (64, True, True)
        refused("loaded already", load=pb.Load(slice=demo))
        refused("loaded already", load=pb.Load(slice="0" * 64))
        mine = {state.rank: state for state in remotes[0].describe()[1].sessions}
        assert (mine[0].slice, mine[0].memory_bytes) == (demo, loaded.memory_bytes)  # still what it was
        assert (mine[1].slice, mine[1].memory_bytes) == ("", 0)
        refused("cannot be timed alone", time=pb.Time(rows=[1], steps=1))  # a whole model
        first.unload()
        refused("no slice is loaded yet", time=pb.Time(rows=[1], steps=1))
        assert [state.slice for state in remotes[0].describe()[1].sessions] == ["", ""]
        allreduce(group)  # and the links are as they were
        assert other.died is None


def test_answers_come_in_the_order_of_the_commands(remotes: list[Remote], demo: str) -> None:
    with sessions(remotes[:1], 1) as (first,):
        connect_all([first])
        commands = [
            pb.Command(allreduce=pb.Allreduce(n_floats=1 << 20, wire="q8", repeats=20)),
            pb.Command(load=pb.Load(slice="0" * 64)),
            pb.Command(load=pb.Load(slice=demo, options={"context": 64})),
            pb.Command(unload=pb.Unload()),
            pb.Command(load=pb.Load(slice=demo, options={"context": 128})),
        ]
        for command in commands:
            first.tell(command)
        assert first.answer().WhichOneof("event") == "allreduced"
        with pytest.raises(WorkerError, match="is not in"):
            first.answer()
        assert first.answer().loaded.context == 64
        assert first.answer().WhichOneof("event") == "unloaded"
        assert first.answer().loaded.context == 128


def test_a_load_that_fails_holds_nothing(remotes: list[Remote], demo: str) -> None:
    with sessions(remotes[:1], 1) as (first,):
        with pytest.raises(WorkerError, match="context must be from 1 to"):
            load_slice(first, demo, {"context": 0})
        (state,) = remotes[0].describe()[1].sessions
        assert (state.slice, state.memory_bytes) == ("", 0)
        load_slice(first, demo, {"context": 64})


# Ends.


def test_the_engine_ends_when_its_owner_closes(remotes: list[Remote], demo: str) -> None:
    with sessions(remotes[:1], 1) as (first,):
        load_slice(first, demo, {"context": 64})
        assert remotes[0].describe()[1].sessions[0].slice == demo
    until(lambda: gone(first.pid), "the end of the engine process")
    until(lambda: not remotes[0].describe()[1].sessions, "the lease given back")


OWNER = """
import sys, time
sys.path.insert(0, {root!r})
from edge.net.channel import open_channel
from edge.cluster.client import Remote
from edge.cluster.session import RemoteSession
from transport import edge_pb2 as pb
channel, _ = open_channel("127.0.0.1", {port}, None, 10.0)
session = RemoteSession(Remote(channel, "127.0.0.1", {port}, None), 0, 1, {secret!r})
session.ask(pb.Command(load=pb.Load(slice={digest!r}, options={{"context": 64}})))
print(session.pid, flush=True)
time.sleep(600)
"""


def test_the_engine_ends_when_its_owner_is_killed(two: list[Worker], remotes: list[Remote], demo: str) -> None:
    code = OWNER.format(root=str(ROOT), port=two[0].port, secret=SECRET, digest=demo)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert not gone(pid)
        owner.kill()
    until(lambda: gone(pid), "the end of the engine process")
    until(lambda: not remotes[0].describe()[1].sessions, "the lease given back")


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_killed_engine_is_noticed_by_all(remotes: list[Remote], transport: str) -> None:
    with sessions(remotes, 3) as group:
        connect_all(group, transport)
        os.kill(group[1].pid, signal.SIGKILL)
        for session in (group[0], group[2]):
            session.tell(pb.Command(allreduce=pb.Allreduce(n_floats=100, wire="f32", repeats=1)))
        with pytest.raises(WorkerError, match="the engine process was killed by SIGKILL"):
            group[1].answer()
        for session in (group[0], group[2]):
            with pytest.raises(WorkerError) as caught:
                session.answer()
            assert caught.value.error in ("LinkClosed", "ProtocolError")
        with pytest.raises(WorkerError, match="SIGKILL"):  # and it stays dead
            group[1].ask(pb.Command(unload=pb.Unload()))
        until(lambda: sum(len(remote.describe()[1].sessions) for remote in remotes) == 2, "two sessions left")


def test_killed_in_the_middle_of_a_sum(remotes: list[Remote]) -> None:
    with sessions(remotes, 3) as group:
        connect_all(group)
        for session in group:
            session.tell(pb.Command(allreduce=pb.Allreduce(n_floats=1 << 20, wire="f32", repeats=10_000)))
        with pytest.raises(AssertionError):
            until(lambda: not group[2]._events.empty(), "an early answer", 0.3)
        os.kill(group[2].pid, signal.SIGKILL)
        for session in group:
            with pytest.raises(WorkerError):
                session.answer()


def test_an_engine_that_aborts_says_so(remotes: list[Remote]) -> None:
    with sessions(remotes[:1], 1) as (first,):
        os.kill(first.pid, signal.SIGABRT)
        with pytest.raises(WorkerError, match="was killed by SIGABRT") as caught:
            first.answer()
        assert "out of memory" not in str(caught.value)
        with sessions(remotes[:1], 1):  # the worker goes on
            pass


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_peer_that_stands_still(remotes: list[Remote], transport: str) -> None:
    with sessions(remotes, 2, QUICK) as group:
        connect_all(group, transport)
        stand_still(group[1].pid)
        began = time.monotonic()
        with pytest.raises(WorkerError, match=r"sent nothing for 1.5 s \(step_timeout_s\)") as caught:
            group[0].ask(pb.Command(allreduce=pb.Allreduce(n_floats=100, wire="f32", repeats=1)))
        assert caught.value.error == "LinkTimeout"
        assert time.monotonic() - began > 1.4
        group[1].close()
        until(lambda: gone(group[1].pid), "the end of what stands still")


def test_nobody_waits_for_an_engine_that_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "EXIT_S", TIMEOUT_S)  # it would be killed after two seconds
    with served(tmp_path) as remote:
        with sessions([remote], 1) as (first,):
            stand_still(first.pid)
        try:
            for _ in range(5):
                assert remote.describe()
            with sessions([remote], 1):
                assert not gone(first.pid)
        finally:
            os.kill(first.pid, signal.SIGCONT)
        until(lambda: gone(first.pid), "the end of the engine process")


def test_engines_end_with_their_daemon(tmp_path: Path) -> None:
    with worker(tmp_path) as first, first.remote() as remote, sessions([remote], 3) as group:
        connect_all(group[:3])
        for session in group:
            session.tell(pb.Command(allreduce=pb.Allreduce(n_floats=1 << 20, wire="f32", repeats=10_000)))
        first.kill()
        until(lambda: all(gone(session.pid) for session in group), "the end of all engine processes")
        for session in group:
            with pytest.raises((LinkClosed, WorkerError)):
                session.answer()
        assert not list(first.temporary.glob("edge-*"))


def test_sessions_of_many_owners_at_once(remotes: list[Remote]) -> None:
    failures: list[BaseException] = []

    def own(seed: int) -> None:
        try:
            secret = bytes([seed]) * 16
            with sessions(remotes, 2, secret=secret) as group:
                connect_all(group, "auto" if seed % 2 else "grpc")
                for _ in range(5):
                    assert allreduce(group, 5000, seed=seed)[0].digest == expected(2, 5000, "f32", seed)
        except (AssertionError, TransportError, WorkerError) as error:
            failures.append(error)

    threads = [threading.Thread(target=own, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_rank_with_credentials_does_not_link_in_the_clear(tmp_path: Path, two: list[Worker]) -> None:
    mine = shown(Cluster(tmp_path / "cluster", time.time()).owner)
    peer = Peer(1, "pi", two[0].host, two[0].port, 0, "session")
    with pytest.raises(Refused, match=r"rank 1 \(pi\) was expected at .*, but a worker without encryption"):
        Dialler(0, SECRET, Deadlines(), lambda: mine, 0, "grpc").dial(peer)
