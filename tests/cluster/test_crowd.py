"""Test a worker whose calls and connections are held by others: members of its cluster are still served."""

import resource
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from devices.paths import authority_folder, credentials_folder
from devices.trust.authority import Authority
from edge.cluster.connect import reach
from edge.net import credentials
from tests.support.commands import ASKED, main
from tests.support.deployments import own_folders
from tests.support.helpers import until
from tests.support.trust import Cluster, shown
from tests.support.workers import Worker, health, stalled, worker
from transport import rpc
from transport.errors import TransportError
from transport.grpc_link import CHANNEL_OPTIONS, MAX_MESSAGE
from transport.security import Credentials, identify, secure_channel

SERVED_S = 20.0  # a worker whose threads are taken by calls without a request needs a minute
CHECK = "/grpc.health.v1.Health/Check"
MIB = 1 << 20


class Owner:
    """The owner's machine, and what it wants of a worker `pi`."""

    def __init__(self, folder: Path, stack: ExitStack, files: int | None = None) -> None:
        self.cluster = Cluster(authority_folder().parent, time.time(), owner=credentials_folder().name)
        self.cluster.joined("pi")
        self._eve = self.cluster.joined("eve").holder.serial
        shutil.copytree(self.cluster.at("pi"), folder / "pi" / "config" / "edge" / "credentials")
        options = ("--no-announce", "--threads", "1")
        self.pi: Worker = stack.enter_context(worker(folder / "pi", *options, listen="0.0.0.0:0", files=files))
        self.address = f"127.0.0.1:{self.pi.port}"
        self._stack = stack

    def channel(self, who: Credentials | None = None) -> grpc.Channel:
        """A connection of its own to the worker, with these credentials or the owner's."""
        who = who or shown(self.cluster.owner)
        result = identify("127.0.0.1", self.pi.port, who, SERVED_S)
        return self._stack.enter_context(secure_channel(self.address, who, result, CHANNEL_OPTIONS))

    def is_let_in(self) -> bool:
        """Return whether a connection of the owner's own is taken and answered."""
        try:
            return health(self.channel(), timeout_s=SERVED_S)
        except (TransportError, grpc.RpcError):  # hung up on, before or behind the handshake
            return False

    def is_served(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Health, `edge devices`, a chat, and a revocation, one after the other."""
        assert health(self.channel(), timeout_s=SERVED_S)
        for command in (
            ("devices", "--no-discover", "--json", self.address),
            ("chat", *ASKED, "--workers", self.address, "--parallel", "pipeline", "--shares", "1,1"),
        ):
            assert main(*command) == 0, capsys.readouterr()
        Authority.open(authority_folder(), credentials_folder()).revoke("eve")
        reach(self.address, timeout_s=SERVED_S).close()
        assert self._eve in credentials.required(self.pi.folder / "config" / "edge" / "credentials").revoked


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """This process is the owner's; what the stack holds ends with the test."""
    own_folders(monkeypatch, tmp_path / "desk")
    with ExitStack() as all_of_it:
        yield all_of_it


@contextmanager
def held_calls(channels: list[grpc.Channel], n: int) -> Iterator[list[grpc.Future]]:
    """So many calls in turn that send no request."""
    go = threading.Event()
    try:
        yield [channels[i % len(channels)].stream_unary(CHECK).future(stalled([], go), timeout=60) for i in range(n)]
    finally:
        go.set()


@pytest.mark.parametrize("role", ["invited", "joined"])
def test_calls_without_a_request(
    role: str, tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = Owner(tmp_path, stack)
    mallory = shown(getattr(owner.cluster, role)("mallory"))
    channels = [owner.channel(mallory) for _ in range(4)]
    with held_calls(channels, 400) as calls:
        until(lambda: sum(call.done() for call in calls) >= 400 - rpc.AWAITED_EACH, "answers to all but two", SERVED_S)
        owner.is_served(capsys)


@pytest.mark.parametrize("files", [None, 64])
def test_connections_of_nobody(
    files: int | None, tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = Owner(tmp_path, stack, files)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    for _ in range(1000):
        stack.enter_context(socket.create_connection(("127.0.0.1", owner.pi.port)))
    until(owner.is_let_in, "room for others", SERVED_S)  # some are hung up on before the crowd is
    owner.is_served(capsys)


def test_large_calls(tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    owner = Owner(tmp_path, stack)
    process = psutil.Process(owner.pi.process.pid)
    before = most = process.memory_info().rss
    channels = ((owner.channel(shown(owner.cluster.joined("mallory"))), CHECK), (owner.channel(), "/edge.Worker/Offer"))
    for n_bytes in (15 * MIB, MAX_MESSAGE - MIB):
        body = b"\x0a" + bytes(n_bytes)  # says it is text, and is none
        calls = [channel.unary_unary(call).future(body, timeout=60) for channel, call in channels for _ in range(50)]
        while not all(call.done() for call in calls):
            most = max(most, process.memory_info().rss)
    assert {call.code() for call in calls} <= {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
    owner.is_served(capsys)
    # Of each that is awaited: as it came, in one piece, and what was parsed of it. The rest is of connections.
    assert most - before < 3 * (rpc.AWAITED + rpc.AWAITED_OTHERS) * MAX_MESSAGE + 64 * MIB
