"""Real `edge worker` processes with folders of their own, and helpers for them.

    with worker(tmp_path) as one, one.remote() as remote:
        remote.describe()

At its end a worker is told to end. It must do so with exit code 0, leave no process and no temporary folder, and
everything it said must have been log lines.
"""

import os
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from devices.names import join_address
from edge.cluster.client import Remote
from edge.cluster.session import EngineSession, RemoteSession
from edge.models.digests import Digests
from edge.models.slice_store import SliceStore
from edge.net.channel import open_channel
from edge.net.peers import SECRET_BYTES
from edge.worker import service as inside
from edge.worker.limits import WorkerOptions
from tests.support.forked_server import NAME as FORKED_SERVER
from tests.support.helpers import TIMEOUT_S, begin, until
from transport import edge_pb2 as pb
from transport import rpc
from transport.connection_limit import ConnectionLimiter
from transport.link import DEFAULTS, Deadlines

SECRET = bytes(range(SECRET_BYTES))
LOG_LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} (INFO|WARNING) [a-z-]+"
    r'( [a-z_]+=([\w.:/@+,\[\]-]+|"([^"\\]|\\.)*"))*'
)


class Worker:
    """A worker that runs. `host` and `port` are where it listens."""

    def __init__(
        self,
        folder: Path,
        options: tuple[str | Path, ...],
        listen: str,
        files: int | None = None,
        preexec: Callable[[], None] | None = None,
    ) -> None:
        self.folder = folder
        self.temporary = folder / "t"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.slices = folder / "cache" / "edge" / "slices"
        self.env = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            **{f"XDG_{name.upper()}_HOME": str(folder / name) for name in ("cache", "config", "state")},
        }
        self._log = folder / f"log-{len(list(folder.glob('log-*')))}"  # a worker may follow another one in its folder
        if files:
            preexec = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (files, files))
        command = ("worker", "--listen", listen, *options)
        with self._log.open("wb") as log, open(os.devnull) as nothing:
            self.process = begin(command, self.env, (nothing, log, log), preexec)
        self.host = listen.rpartition(":")[0].strip("[]")
        self.port = 0

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return join_address(self.host, self.port)

    def log(self) -> str:
        """All it said so far."""
        return self._log.read_text(errors="replace")

    def says(self, pattern: str) -> re.Match[str]:
        """Wait until its log has a regular expression."""
        until(lambda: re.search(pattern, self.log()) is not None or self.process.poll() is not None, pattern)
        match = re.search(pattern, self.log())
        assert match, f"{pattern!r} is not in:\n{self.log()}"
        return match

    def remote(self) -> Remote:
        """A connection of its own to it."""
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        channel, _ = open_channel(host, self.port, None, 10.0)
        return Remote(channel, host, self.port, None)

    def children(self) -> list[psutil.Process]:
        """Its engine processes, without the fork server that started them."""
        return [child for child in self._processes() if not is_fork_server(child)]

    def fork_server(self) -> psutil.Process:
        """The process that starts its engine processes."""
        [server] = filter(is_fork_server, self._processes())
        return server

    def _processes(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):  # it is being killed, and who started it has not been told yet
            return [child for child in psutil.Process(self.process.pid).children(recursive=True) if running(child)]
        return []

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Make it end, and check that it leaves nothing."""
        children = self._processes() if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(number)
            assert self.process.wait(TIMEOUT_S) == 0, self.log()
        until(lambda: not any(map(running, children)), f"the end of {children}")
        until(lambda: not list(self.temporary.glob("edge-*")), f"{self.temporary} empty")
        for line in self.log().splitlines():
            assert LOG_LINE.fullmatch(line), line

    def kill(self) -> None:
        """End it whatever it does."""
        self.process.kill()
        self.process.wait()


@contextmanager
def worker(
    folder: Path,
    *options: str | Path,
    listen: str = "127.0.0.1:0",
    files: int | None = None,
    preexec: Callable[[], None] | None = None,
) -> Iterator[Worker]:
    """A worker that listens, and is ended at the end unless the test has done so. files: it may have open.
    preexec: called in its process before it becomes the worker."""
    daemon = Worker(folder, options, listen, files, preexec)
    try:
        daemon.port = int(daemon.says(r"INFO listening .*address=\S+:(\d+)\b")[1])
        yield daemon
        daemon.end()
    finally:
        daemon.kill()


@contextmanager
def served(folder: Path) -> Iterator[Remote]:
    """A worker inside this process, so that a test can change its deadlines, and a connection to it."""
    options = WorkerOptions("inside", "127.0.0.1", 1, None, None, None)
    daemon = inside.Worker(options, SliceStore(folder / "slices", 1 << 30), Digests(folder), ConnectionLimiter(64))
    server = grpc.server(ThreadPoolExecutor(4), interceptors=[rpc.Admission(daemon.admit)])
    server.add_generic_rpc_handlers((daemon.handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with Remote(open_channel("127.0.0.1", port, None, 10.0)[0], "127.0.0.1", port, None) as remote:
            yield remote
    finally:
        daemon.sessions.close()
        server.stop(0).wait()


@contextmanager
def sessions(
    remotes: list[Remote], world_size: int, deadlines: Deadlines = DEFAULTS, secret: bytes = SECRET
) -> Iterator[list[RemoteSession]]:
    """One session for each rank of a group, over these workers in turn."""

    def start(rank: int) -> RemoteSession:
        return RemoteSession(remotes[rank % len(remotes)], rank, world_size, secret, deadlines)

    with ExitStack() as stack, ThreadPoolExecutor(world_size) as pool:
        yield [stack.enter_context(session) for session in pool.map(start, range(world_size))]  # type: ignore[misc]


def load_slice(
    session: EngineSession,
    slice_: str,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[float], None] = lambda fraction: None,
) -> pb.Loaded:
    """Load a slice that is there. options: of EngineOptions, by name. progress: the fraction loaded."""
    command = pb.Command(load=pb.Load(slice=slice_, options=options or {}))
    return session.ask(command, lambda event: progress(event.loading.fraction)).loaded


def health(channel: grpc.Channel, service: str = "", timeout_s: float = 10.0) -> bool:
    """Return whether the standard health service says SERVING."""
    request = health_pb2.HealthCheckRequest(service=service)
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@contextmanager
def watched(daemon: Worker) -> Iterator[list[int]]:
    """Ask for the worker's health all the time, and count the answers. Each must be SERVING."""
    answers = [0]
    failures: list[Exception] = []
    done = threading.Event()

    def ask() -> None:
        with daemon.remote() as remote:
            while not done.is_set():
                try:
                    assert health(remote.channel)
                except Exception as error:  # whatever it is, the test has to see it
                    failures.append(error)
                    return
                answers[0] += 1
                done.wait(0.002)  # the daemon's interpreter has other things to do, too

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        done.set()
        thread.join()
    assert not failures, failures


def stalled(chunks: Iterable[bytes], go: threading.Event) -> Iterator[bytes]:
    """Chunks to upload, and then nothing, not even an end, until `go` is set."""
    yield from chunks
    go.wait(60)


def running(process: psutil.Process) -> bool:
    """Return whether a process is there and does more than wait to be reaped."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_fork_server(process: psutil.Process) -> bool:
    """And not an engine process, whose name and command line are the same."""
    try:
        parent = psutil.Process(process.ppid())
        if process.name() == FORKED_SERVER:
            return parent.name() != FORKED_SERVER
        mine, parents = process.cmdline(), parent.cmdline()
    except psutil.NoSuchProcess:
        return False
    return "edge.worker.rank" in mine and "devices.processes.fork_server" in mine and mine != parents


def gone(pid: int) -> bool:
    """Return whether there is no such process any more."""
    try:
        return not running(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True
