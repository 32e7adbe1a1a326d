"""Daemon of a worker: a gRPC server that runs until a signal, announced by mDNS."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from devices.discovery import Announcement, Announcer, announced_addresses
from devices.errors import DiscoveryError
from devices.names import join_address
from devices.processes.limits import share_one_arena
from devices.trust import credentials as trust_files
from edge import log
from edge.models.digests import Digests
from edge.models.slice_store import SliceStore
from edge.net.channel import check_own, is_loopback
from edge.version import version
from edge.weights.elastic.signals import follow_memory_signals
from edge.worker.limits import WorkerOptions
from edge.worker.service import Worker
from edge.worker.sessions import Sessions
from transport import rpc, security
from transport.connection_limit import FIRST_CALL_S, ConnectionLimiter, connections_allowed
from transport.errors import Refused
from transport.grpc_link import CHANNEL_OPTIONS

_THREADS = 64  # eight sessions and additional calls use one thread each; links have their own threads
_CALLS = 512  # maximum number of concurrent calls, including links
_STREAMS = 128  # maximum number of concurrent calls per connection; a client queues further calls
_HEALTH = f"/{health.SERVICE_NAME}/Check"
LEAVE_S = 30.0  # time for owners to move running sessions to other workers; a second signal ends them immediately
_LEAVE_POLL_S = 0.1
_GRACE_S = 2.0  # time for running calls to end when the daemon ends
_ANNOUNCE_AGAIN_S = 30.0  # interval between checks of the network


@dataclass(frozen=True)
class DaemonOptions:
    """Options of the daemon: the worker's options, its port, and its folders."""

    worker: WorkerOptions
    port: int  # 0: any free port
    insecure: bool  # listen beyond loopback without TLS
    announce: bool | None  # announce by mDNS; None: only if the worker is reachable and secure
    cache: Path
    cache_bytes: int
    state: Path  # folder for cached digests of model files


def serve(options: DaemonOptions) -> None:
    """Serve until SIGTERM or SIGINT. The log reports the worker's address.

    After SIGTERM, owners of running sessions have LEAVE_S to move away. SIGINT or a second signal ends all sessions
    immediately. SIGUSR1 makes sessions give back memory, and SIGUSR2 lets them have it again.
    Raises Refused if this address needs credentials, or OSError if the port cannot be opened.
    """
    worker_options = options.worker
    check_own(worker_options.host)
    check_exposure(worker_options.host, worker_options.credentials is not None, options.insecure)
    if worker_options.least_memory is not None and worker_options.gpu_layers != 0:
        why = "sessions with layers on a GPU keep the larger size of --memory; --gpu-layers 0 lets them give way"
        log.info("range", why=why)
    share_one_arena()
    end = _EndSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)

    store = SliceStore(options.cache, options.cache_bytes)
    limiter = ConnectionLimiter(connections_allowed())
    worker = Worker(worker_options, store, Digests(options.state), limiter)
    follow_memory_signals(worker.ask_memory)
    try:
        _serve(options, worker, limiter, end)
    finally:
        limiter.close()
        worker.sessions.close()
    log.info("ended")


class _EndSignal:
    """Signal handler that records a request to end.

    It only sets flags and writes to a pipe. It interrupts the main thread anywhere, so taking a lock could deadlock.
    """

    def __init__(self) -> None:
        self.to_end = False
        self.at_once = False
        self._noted, self._note = os.pipe()
        os.set_blocking(self._note, False)

    def __call__(self, number: int, _: object) -> None:
        self.at_once = self.to_end or number == signal.SIGINT
        self.to_end = True
        with contextlib.suppress(BlockingIOError):  # the pipe is full of unread signals
            os.write(self._note, b"!")

    def wait(self, seconds: float) -> None:
        """Sleep until a signal, for at most `seconds`."""
        select.select([self._noted], [], [], seconds)


def _serve(options: DaemonOptions, worker: Worker, limiter: ConnectionLimiter, end: _EndSignal) -> None:
    worker_options = options.worker
    server_options = [
        *CHANNEL_OPTIONS,
        ("grpc.so_reuseport", 0),  # two daemons on one port would get its connections at random, so refuse the second
        ("grpc.max_allowed_incoming_connections", limiter.most),
        ("grpc.server_handshake_timeout_ms", round(FIRST_CALL_S * 1000)),
        ("grpc.max_concurrent_streams", _STREAMS),
    ]
    server = grpc.server(
        ThreadPoolExecutor(_THREADS),
        interceptors=[rpc.Admission(worker.admit, brief=[_HEALTH])],
        options=server_options,
        maximum_concurrent_rpcs=_CALLS,
    )
    server.add_generic_rpc_handlers((worker.handlers(),))
    health_service = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    reflection.enable_server_reflection((rpc.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = _listen(server, worker_options, options.port, worker)
    server.start()
    limiter.watch(port)
    for service in ("", rpc.SERVICE):
        health_service.set(service, health_pb2.HealthCheckResponse.SERVING)
    log.info(
        "listening",
        name=worker_options.name,
        address=join_address(worker_options.host, port),
        security="mutual-tls" if worker_options.credentials else "in the clear",
        threads=worker_options.threads,
        memory_limit_bytes=worker_options.memory_limit_bytes,
        models=worker_options.models,
    )
    threading.Thread(target=worker.measure_rates, daemon=True, name="rates").start()
    try:
        _announce(options, port, end)
        while not end.to_end:
            end.wait(_ANNOUNCE_AGAIN_S)
        _leave(worker.sessions, end)
    finally:
        log.info("ending")
        health_service.enter_graceful_shutdown()
        stopped = server.stop(_GRACE_S)
        worker.sessions.close()
        stopped.wait()


def _leave(sessions: Sessions, end: _EndSignal, poll_s: float = _LEAVE_POLL_S) -> None:
    """Serve until no session uses this worker, for at most LEAVE_S."""
    sessions.leave()
    until = time.monotonic() + LEAVE_S
    if in_use := sessions.in_use:
        log.info("leaving", sessions=in_use, seconds=LEAVE_S)
    while sessions.in_use and not end.at_once and time.monotonic() < until:
        time.sleep(poll_s)


def check_exposure(host: str, secure: bool, insecure: bool) -> None:
    """Raise Refused if everyone on the network could use this worker and `insecure` does not allow that."""
    if secure or is_loopback(host):
        return
    if not insecure:
        raise Refused(
            f"others can reach {host}, and this device has no credentials: get a token with"
            " `edge cluster invite NAME` on the owner's machine and start with --join TOKEN; or listen on 127.0.0.1;"
            " or use --insecure, but then everyone who reaches this port can use this device and read the traffic"
        )
    log.warning("insecure", address=host, why="everyone who reaches this port can use this device and read the traffic")


def _listen(server: grpc.Server, options: WorkerOptions, port: int, worker: Worker) -> int:
    target = join_address(options.host, port)
    try:
        if options.credentials is not None:
            return int(server.add_secure_port(target, security.grpc_server_credentials(worker.credentials)))
        return int(server.add_insecure_port(target))
    except RuntimeError as error:
        raise OSError(
            f"cannot listen on {target}: another program uses the port, or this user may not open it;"
            " give another one with --listen"
        ) from error


def _announce(options: DaemonOptions, port: int, end: _EndSignal) -> None:
    """Announce the worker by mDNS until the end, if announcing is enabled.

    The network is checked repeatedly, because it may come up later or change this device's addresses. The worker also
    runs in a network that does not allow announcements.
    """
    worker = options.worker
    secure = worker.credentials is not None
    is_announced = options.announce if options.announce is not None else secure and not is_loopback(worker.host)
    if not is_announced:
        return
    membership = trust_files.load(worker.credentials) if worker.credentials else None
    cluster = membership.fingerprint if membership else ""
    addresses: tuple[str, ...] = ()
    complaint = ""
    with contextlib.ExitStack() as announcing:
        while not end.to_end:
            try:
                current = announced_addresses(worker.host)
                if current != addresses:
                    announcing.close()
                    addresses = ()  # announce the same addresses again when they return
                    announcement = Announcement(worker.name, port, current, version("edge-runtime"), cluster, secure)
                    announcer = announcing.enter_context(Announcer(announcement))
                    addresses = current
                    log.info("announced", name=announcer.name, addresses=",".join(current))
                    if announcer.name != worker.name:
                        log.warning(
                            "renamed", name=announcer.name, why=f"the network already has a worker {worker.name}"
                        )
            except DiscoveryError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    log.warning("not-announced", why=complaint)
            end.wait(_ANNOUNCE_AGAIN_S)
