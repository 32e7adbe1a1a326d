"""Test the daemon `edge worker`: its answers, its end, what it refuses, and attacks by strangers."""

import os
import re
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from edge import log
from edge.cluster.session import RemoteSession, connect_all
from edge.errors import WorkerError
from edge.models.demo import MODEL_PATH
from edge.models.digests import Digests
from edge.worker.limits import ResourceLimits
from partition.slices.recipe import whole
from tests.support.helpers import EDGE, ROOT, assert_one_line_error, run_edge, stand_still, until
from tests.support.workers import LOG_LINE, SECRET, Worker, gone, health, load_slice, sessions, stalled, worker
from transport import edge_pb2 as pb
from transport import rpc
from transport.frame import Kind, pack_header
from transport.link import Deadlines

MIB = 1 << 20
LIMIT = "1GiB"


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that the tests of this file share, with limits of its own."""
    options = ("--name", "one", "--threads", "1", "--memory", LIMIT, "--cache-size", "64MiB")
    with worker(tmp_path_factory.mktemp("w"), *options) as first:
        yield first


def model_digest(folder: Path) -> str:
    """Return the digest of the bundled model."""
    return Digests(folder).model_digest(MODEL_PATH)


# What it answers.


def test_health(one_worker: Worker) -> None:
    with one_worker.remote() as remote:
        assert health(remote.channel)
        assert health(remote.channel, "edge.Worker")
        with pytest.raises(grpc.RpcError) as caught:
            health(remote.channel, "edge.Nothing")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection(one_worker: Worker) -> None:
    with one_worker.remote() as remote:
        request = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(remote.channel).ServerReflectionInfo(request, timeout=10)
        assert "edge.Worker" in [service.name for service in answer.list_services_response.service]


def test_describe_says_what_it_was_told(one_worker: Worker) -> None:
    with one_worker.remote() as remote:
        profile, said = remote.describe()
    assert (profile.name, said.name, remote.name) == ("one", "one", "one")
    assert profile.threads == 1
    assert profile.memory_limit_bytes == 1 << 30
    assert said.slices_limit_bytes == 64 * MIB
    assert not said.secure
    assert not said.sessions


def test_defaults_and_other_options(tmp_path: Path) -> None:
    with worker(tmp_path, "--threads", "2") as other, other.remote() as remote:
        profile, said = remote.describe()
        assert profile.name == said.name != ""
        assert profile.threads == 2
        assert profile.memory_limit_bytes is None
        assert said.slices_limit_bytes == 20 << 30


def test_threads_reach_the_engine_process(one_worker: Worker) -> None:
    with one_worker.remote() as remote, RemoteSession(remote, 0, 1, SECRET) as session:
        command = psutil.Process(session.pid).cmdline()
    assert ResourceLimits.from_text(command[command.index("--limits") + 1]).threads == 1


def test_a_range_of_memory_reaches_the_engine_process(tmp_path: Path) -> None:
    with worker(tmp_path, "--memory", "300MiB..1GiB") as other, other.remote() as remote:
        assert remote.describe()[0].memory_limit_bytes == 1 << 30
        with RemoteSession(remote, 0, 1, SECRET) as session:
            command = psutil.Process(session.pid).cmdline()
        assert ResourceLimits.from_text(command[command.index("--limits") + 1]).gives_back == 724 * MIB
        assert 'range why="sessions with layers on a GPU keep the larger size of --memory' in other.log()


@pytest.mark.parametrize("memory", [("--memory", "1GiB"), ("--memory", "300MiB..1GiB", "--gpu-layers", "0")])
def test_nothing_is_said_of_a_gpu_where_no_range_is_ignored(tmp_path: Path, memory: tuple[str, ...]) -> None:
    with worker(tmp_path, *memory) as other:
        assert " range " not in other.log()


def test_models_are_cut_and_not_sent(tmp_path: Path) -> None:
    recipe = whole(model_digest(tmp_path / "d"), MODEL_PATH.stat().st_size)
    with worker(tmp_path, "--models", MODEL_PATH.parent) as first, first.remote() as remote:
        assert remote.send_slice(recipe, MODEL_PATH, recipe.model_digest) == 0
        assert "slice-cut" in first.log()


# How it ends.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_when_it_is_told(tmp_path: Path, number: signal.Signals) -> None:
    with worker(tmp_path) as first:
        first.end(number)
        assert "INFO ended" in first.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_with_sessions_a_load_and_an_upload_under_way(tmp_path: Path, number: signal.Signals) -> None:
    recipe = whole(model_digest(tmp_path / "d"), MODEL_PATH.stat().st_size)
    with worker(tmp_path) as first, first.remote() as remote:
        remote.send_slice(recipe, MODEL_PATH, recipe.model_digest)
        with sessions([remote], 2) as (loading, stuck):
            stand_still(stuck.pid)
            loading.tell(pb.Command(load=pb.Load(slice=recipe.model_digest)))
            stuck.tell(pb.Command(load=pb.Load(slice=recipe.model_digest)))
            metadata = ((rpc.SLICE_KEY, "ab" * 32), (rpc.SLICE_BYTES_KEY, "1000"), (rpc.OFFSET_KEY, "0"))
            go = threading.Event()
            upload = rpc.stub(remote.channel, "Upload").future(stalled([b"some"], go), metadata=metadata)
            until(lambda: any(first.slices.glob("*.partial")), "the upload")
            first.end(number)
            assert upload.exception() is not None
            go.set()


def test_ends_while_it_reads_a_huge_model(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    with (models / "huge.gguf").open("wb") as file:
        file.truncate(1 << 40)  # takes no room, and 10 minutes to hash
    recipe = whole("ab" * 32, 1 << 40)
    with worker(tmp_path, "--models", models, "--cache-size", "2TiB") as first, first.remote() as remote:
        offer = pb.SliceOffer(slice="ab" * 32, n_bytes=1 << 40, recipe=recipe.to_bytes())
        request = rpc.stub(remote.channel, "Offer")(offer)
        process = psutil.Process(first.process.pid)
        until(lambda: any("huge.gguf" in file.path for file in process.open_files()), "hashing")
        request.cancel()
        until(lambda: not any("huge.gguf" in file.path for file in process.open_files()), "the end of hashing")
        request = rpc.stub(remote.channel, "Offer")(offer)
        until(lambda: any("huge.gguf" in file.path for file in process.open_files()), "hashing")


# What it refuses.


def test_a_port_has_one_worker(one_worker: Worker) -> None:
    done = run_edge("worker", "--listen", one_worker.address, env=one_worker.env)
    assert_one_line_error(
        done, 3, f"cannot listen on {one_worker.address}", "another program uses the port", "--listen"
    )
    with one_worker.remote() as remote:
        assert health(remote.channel)


def test_an_address_of_somebody_else(one_worker: Worker) -> None:
    done = run_edge("worker", "--listen", "203.0.113.7:0", env=one_worker.env)
    assert_one_line_error(done, 3, "cannot listen on 203.0.113.7: it is not an address of this machine")


def test_a_port_alone_is_at_the_usual_address(one_worker: Worker) -> None:
    done = run_edge("worker", "--listen", str(one_worker.port), env=one_worker.env)
    assert_one_line_error(done, 3, f"cannot listen on {one_worker.address}: another program uses the port")


def test_beyond_this_machine_only_with_trust_or_on_request(tmp_path: Path) -> None:
    env = {f"XDG_{name}_HOME": str(tmp_path) for name in ("CONFIG", "CACHE", "STATE")}
    done = run_edge("worker", "--listen", "0.0.0.0:0", env=env)
    assert_one_line_error(done, 7, "--join TOKEN", "--insecure", "others can reach 0.0.0.0")
    with worker(tmp_path, "--insecure", listen="0.0.0.0:0") as first, first.remote() as remote:
        assert health(remote.channel)
        assert re.search(r"WARNING insecure address=0\.0\.0\.0 why=\".*everyone who reaches", first.log())
        assert 'security="in the clear"' in first.log()


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--listen", "127.0.0.1:99999", "HOST:PORT"),
        ("--name", "a name\nof two lines", "name"),
        ("--threads", "0", "needs a whole number from 1 to 512, got 0"),
        ("--memory", "much", "needs a size"),
        ("--cache-size", "-1", "needs a size"),
        ("--models", "/nowhere", "not a folder"),
    ],
)
def test_bad_options(tmp_path: Path, option: str, value: str, why: str) -> None:
    env = {f"XDG_{name}_HOME": str(tmp_path) for name in ("CONFIG", "CACHE", "STATE")}
    done = run_edge("worker", f"{option}={value}", env=env)
    assert_one_line_error(done, 2, why)


# What it says.


@pytest.mark.parametrize("value", ["", "two\nlines", '"', "\\", "a=b c=d", "\x1b[31m", "\u2028\x85", "\udc80", "x" * 9])
def test_a_log_line_is_one_line_whatever_it_says(value: str) -> None:
    line = log._line("event", {"key": value, "none": None, "n": 3})
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert LOG_LINE.fullmatch(f"2026-01-01T00:00:00+0000 INFO {line}")
    assert line.endswith(" n=3")


def test_hostile_values_make_no_lines_of_their_own(tmp_path: Path) -> None:
    models = tmp_path / "a\n2026-01-01T00:00:00+0000 INFO forged"
    models.mkdir()
    with worker(tmp_path, "--models", models) as first, first.remote() as remote:
        forged = "x\n2026-01-01T00:00:00+0000 INFO forged"
        with pytest.raises(WorkerError, match="is not the name of a slice"):
            list_offer(remote.channel, pb.SliceOffer(slice=forged, n_bytes=1))
        with (
            RemoteSession(remote, 0, 1, SECRET) as session,
            pytest.raises(WorkerError, match="is not the name of a slice"),
        ):
            load_slice(session, forged)
        for method in ("Describe", "Offer", "UpdateRevoked"):  # bytes that are no message
            raw = remote.channel.unary_unary(f"/{rpc.SERVICE}/{method}")
            with pytest.raises(grpc.RpcError):
                raw(b"\xff\xff\xff", timeout=10)
        first.end()
        assert not [line for line in first.log().splitlines() if line.endswith("INFO forged")]


def list_offer(channel: grpc.Channel, offer: pb.SliceOffer) -> list[pb.SliceState]:
    """Offer a slice; return the worker's answers, errors in its words."""
    from edge.cluster.client import explained

    with explained("worker"):
        return list(rpc.stub(channel, "Offer")(offer, timeout=30))


# Strangers.

HELLO_OF_TLS = bytes.fromhex("16030100f4010000f00303") + bytes(range(233))
NONSENSE: list[tuple[str, bytes]] = [
    ("noise", os.urandom(70_000)),
    ("zeros", bytes(70_000)),
    ("tls", HELLO_OF_TLS),
    ("http1", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    ("http2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5000),
    ("a frame of 64 MiB", pack_header(Kind.HELLO, 64 << 20, 0) + bytes(1000)),
    ("a wrong secret", pack_header(Kind.HELLO, 20, 0) + bytes(20)),
    ("half a header", pack_header(Kind.HELLO, 20, 0)[:7]),
    ("nothing", b""),
]


def pester(address: tuple[str, int], alive: Callable[[], None]) -> None:
    """Send all kinds of nonsense, some of it in connections that stay open."""
    for round_ in range(10):
        current: list[socket.socket] = []
        for _, nonsense in NONSENSE:
            sock = socket.create_connection(address, timeout=5)
            current.append(sock)
            with suppress(OSError):  # it has hung up
                sock.sendall(nonsense)
        if round_ % 5 == 0:
            alive()
        for sock in current:
            sock.close()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(address, timeout=10) as sock, pytest.raises(OSError):  # noqa: PT011
        context.wrap_socket(sock)
    half_open = [socket.create_connection(address, timeout=5) for _ in range(100)]
    alive()
    for sock in half_open:
        sock.close()


def test_strangers_at_the_daemons_port(one_worker: Worker) -> None:
    process = psutil.Process(one_worker.process.pid)
    with one_worker.remote() as remote:
        assert health(remote.channel)
        before, handles = process.memory_info().rss, process.num_fds()
        pester((one_worker.host, one_worker.port), lambda: serving(one_worker))
        until(lambda: process.num_fds() <= handles + 5, "all connections closed")
        assert process.memory_info().rss < before + 64 * MIB
        assert health(remote.channel)


def serving(item: Worker) -> None:
    """A new caller is answered."""
    with item.remote() as remote:
        assert health(remote.channel, timeout_s=5)


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_strangers_at_a_ranks_port(one_worker: Worker, transport: str) -> None:
    with one_worker.remote() as remote, sessions([remote], 2, Deadlines(connect_timeout_s=2.0)) as pair:
        process = psutil.Process(pair[1].pid)
        before = process.memory_info().rss
        port = pair[1].peer.tcp_port
        pester(("127.0.0.1", port), lambda: None)
        current = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(80)]
        (state,), _ = connect_all(pair, transport)  # also while they hold every place
        assert state.kind == "grpc" or transport == "auto"
        for sock in current:
            sock.close()
        assert process.memory_info().rss < before + 64 * MIB
        for session in pair:
            session.tell(pb.Command(allreduce=pb.Allreduce(n_floats=100, wire="f32", repeats=1)))
        assert pair[0].answer().allreduced.digest == pair[1].answer().allreduced.digest


def test_a_worker_is_a_command(tmp_path: Path) -> None:
    """Its help tells every option, and a pipe that closes is no error."""
    done = subprocess.run([*EDGE, "worker", "--help-all"], cwd=ROOT, capture_output=True, text=True, check=True)
    for option in "--listen --name --memory --threads --models --cache-size --join --insecure --announce".split():
        assert option in done.stdout


def test_the_engine_process_ends_with_its_session(one_worker: Worker) -> None:
    with one_worker.remote() as remote:
        session = RemoteSession(remote, 0, 1, SECRET)
        assert not gone(session.pid)
        (state,) = remote.describe()[1].sessions
        assert (state.pid, state.rank, state.world_size, state.slice) == (session.pid, 0, 1, "")
        session.close()
        until(lambda: gone(session.pid), "the end of the engine process")
        until(lambda: not remote.describe()[1].sessions, "the end of the session")
        until(lambda: not list(one_worker.temporary.glob("edge-*")), "its folder removed")
