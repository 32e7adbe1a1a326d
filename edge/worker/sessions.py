"""Sessions of a worker: each is one engine process that lives as long as its owner's stream."""

from __future__ import annotations

import queue
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import grpc

from devices.discovery import announced_addresses
from devices.errors import DiscoveryError
from devices.network import usable_elsewhere
from devices.processes.forking import ForkServer, available
from edge import log
from edge.errors import EdgeError
from edge.models.slice_store import SliceStore
from edge.weights.elastic.shares import Member, Share
from edge.weights.elastic.signals import memory_signals_blocked
from edge.worker.limits import WorkerOptions
from edge.worker.memory import WorkerMemory
from edge.worker.messages import deadlines_of
from edge.worker.process import RankProcess
from transport import edge_pb2 as pb
from transport import rpc
from transport.errors import Refused, TransportError
from transport.frame import Kind
from transport.grpc_link import SESSION_KEY, Served
from transport.link import Link
from transport.relay import relay
from transport.tcp_link import TcpLink

MAX_SESSIONS = 8
LINKS_PER_RANK = 2  # maximum links per rank: one in use, and one that is about to end
ACCEPT_S = 5.0  # time for the engine process to accept a link
TURN_S = 300.0  # time to wait for loads of other sessions
_ENDING = "this worker is about to end and accepts no new session; continue without it"
_SIGN_OF_LIFE_S = 5.0  # interval between two events to an owner whose load waits


@dataclass
class Session:
    """Session and its granted resources."""

    name: str
    open: pb.Open
    child: RankProcess
    links: threading.Semaphore  # counts further links that the session may accept
    member: Member | None = None  # its member among the sessions that divide the worker's memory
    slice: str = ""
    memory_bytes: int = 0  # memory at loading, or the current memory if the worker divides its memory
    has_turn: bool = False  # True: the one session that loads now
    events: queue.SimpleQueue[pb.Event | None] = field(default_factory=queue.SimpleQueue)  # events for the owner
    lease: ExitStack = field(default_factory=ExitStack)  # keeps the loaded slice in the cache
    pending: deque[str] = field(default_factory=lambda: deque(["open"]))  # unanswered commands, oldest first
    answered: threading.Condition = field(default_factory=threading.Condition)  # notified when a command is answered

    @property
    def runs(self) -> bool:
        """Return whether the session takes part in the steps of a model."""
        with self.answered:
            return "run" in self.pending

    def state(self, share: Share) -> pb.SessionState:
        """Return the session's state for Describe."""
        return pb.SessionState(
            session=self.name,
            rank=self.open.rank,
            world_size=self.open.world_size,
            slice=self.slice,
            memory_bytes=self.memory_bytes,
            pid=self.child.pid,
            share_bytes=share.limit,
            least_bytes=share.least,
            most_bytes=share.most,
            use=share.use,
        )


class Sessions:
    """All sessions of a daemon."""

    def __init__(self, store: SliceStore, options: WorkerOptions) -> None:
        self._store, self._options = store, options
        self._sessions: dict[str, Session] = {}
        limit = options.memory_limit_bytes
        self.memory = None if limit is None else WorkerMemory(limit, self._send)
        self._starting = 0  # number of starting processes that are not yet sessions
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held by the session that loads, if memory is limited
        self.leaving = threading.Event()  # set: no new sessions start
        # With a memory limit there is no fork server, because it would take memory from weights.
        forks = available() and limit is None
        self._fork_server = ForkServer("edge.worker.rank", "edge.worker.load") if forks else None

    def states(self) -> list[pb.SessionState]:
        """Return the state of every session."""
        figures = {} if self.memory is None else self.memory.figures()
        with self._lock:
            return [session.state(figures.get(session.name, Share())) for session in self._sessions.values()]

    @property
    def in_use(self) -> int:
        """Number of sessions that take part in the steps of a model."""
        with self._lock:
            return sum(session.runs for session in self._sessions.values())

    def leave(self) -> None:
        """Start no new sessions, and tell owners of running ones to move away."""
        with self._lock:
            self.leaving.set()
            for session in self._sessions.values():
                session.events.put(pb.Event(alive=pb.Alive(leaving=True)))

    def close(self) -> None:
        """End all engine processes and start no new ones."""
        with self._lock:
            self.leaving.set()
            sessions = list(self._sessions.values())
        for session in sessions:
            session.child.ask_to_end()
        for session in sessions:
            session.child.stop()
        if self._fork_server is not None:
            self._fork_server.close()

    def run(self, commands: Iterator[pb.Command], context: grpc.ServicerContext) -> Iterator[pb.Event]:
        """Run one session from its Open to the end of the stream, and yield the events of its engine process."""
        with rpc.call_deadline(context, rpc.OPEN_S):
            first = next(commands, None)
        if first is None or first.WhichOneof("command") != "open":
            raise Refused("a session begins with Open")
        session = self._start(first)
        # The stream may end while the process computes, or the process while the stream is silent. So each has a
        # thread.
        # called in the thread that serves all calls, so it must not block
        context.add_callback(session.child.ask_to_end)
        threading.Thread(target=self._feed, args=(session, commands), daemon=True, name="commands").start()
        threading.Thread(target=self._watch, args=(session,), daemon=True, name="events").start()
        return iter(session.events.get, None)

    def link(self, context: grpc.ServicerContext) -> Served:
        """Return the server of a data link from another rank. It relays the link to the engine process of the named
        session."""
        name = dict(context.invocation_metadata()).get(SESSION_KEY, "")
        with self._lock:
            session = self._sessions.get(str(name))
        if session is None:
            raise Refused("this worker has no such session: it has ended or never existed")
        # The engine process sees only the daemon, so the daemon passes on the name of the admitted caller.
        caller = next(iter(context.auth_context().get("x509_common_name", ())), b"")

        def serve(outside: Link) -> None:
            if not session.links.acquire(blocking=False):
                outside.refuse("this session already has its maximum number of links")
                return
            try:
                self._relay(outside, session, caller)
            finally:
                session.links.release()

        return serve, "a rank", deadlines_of(session.open)

    # --- one session ---

    def _relay(self, outside: Link, session: Session, caller: bytes) -> None:
        """Relay a link to an engine process until the link ends."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            # With a Python timeout, connecting to a Unix socket with a full queue fails immediately instead of waiting.
            timeval = struct.pack("@ll", *divmod(round(ACCEPT_S * 1e6), 10**6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
            sock.connect(str(session.child.door))
        except OSError as error:
            sock.close()
            full = isinstance(error, BlockingIOError)
            why = f"it accepted no link for {ACCEPT_S:g} s" if full else error.strerror
            outside.refuse(f"the engine process takes no links: {why}")
            return
        inside = TcpLink(sock, "the engine process", deadlines_of(session.open), poll_s=0)
        with suppress(TransportError):  # the process has ended, which the relay notices
            inside.send(caller, Kind.CONTROL)
        relay(outside, inside)

    def _start(self, first: pb.Command) -> Session:
        if self._fork_server is not None:
            with memory_signals_blocked():
                self._fork_server.prepare()  # slow at first, so it runs without the lock
        with self._lock:
            if self.leaving.is_set():
                raise Refused(_ENDING)
            if len(self._sessions) + self._starting >= MAX_SESSIONS:
                raise Refused(
                    f"this worker runs {MAX_SESSIONS} sessions already, which is its maximum; end one of them"
                )
            self._starting += 1
        member: Member | None = None
        try:  # without the lock: other sessions may have to give memory back, and a process may take minutes to start
            name = secrets.token_hex(8)
            member = None if self.memory is None else self.memory.open(name)
            options, shares = self._options, member is not None
            child = RankProcess(options.host, options.credentials, options.limits, name, self._fork_server, shares)
            links = threading.Semaphore(LINKS_PER_RANK * first.open.world_size)
            session = Session(name, first.open, child, links, member)
            with self._lock:
                ends = self.leaving.is_set()
                if not ends:
                    self._sessions[name] = session
                    self._starting -= 1
            if ends:
                child.stop()
                raise Refused(_ENDING)
        except BaseException:
            with self._lock:
                self._starting -= 1
            if self.memory is not None and member is not None:
                self.memory.leave(member)
            raise
        with suppress(TransportError):  # if the process has died, its last event gives the reason
            child.send(first)
        log.info("session-opened", session=name, rank=first.open.rank, world_size=first.open.world_size, pid=child.pid)
        return session

    def _send(self, name: str, command: pb.Command) -> None:
        """Send a command of the daemon itself to the process of a session, if it exists."""
        session = self._sessions.get(name)
        if session is not None:
            with suppress(TransportError):  # the process has ended
                session.child.send(command)

    def _feed(self, session: Session, commands: Iterator[pb.Command]) -> None:
        """Send commands to the process until the owner ends the stream."""
        try:
            for command in commands:
                kind = command.WhichOneof("command") or ""
                if kind == "share":  # only this daemon sends shares
                    continue
                with session.answered:
                    if kind == "load":  # the remaining memory is known when all earlier commands are done
                        session.answered.wait_for(lambda: not session.pending)
                    session.pending.append(kind)
                if kind == "load":
                    try:
                        self._grant(session, command.load)
                    except EdgeError as error:
                        if not session.slice:  # otherwise another slice is loaded
                            self._release(session)
                        failed = pb.Failed(error=type(error).__name__, message=str(error))
                        self._answer(session, pb.Event(failed=failed))
                        continue
                session.child.send(command)
        except TransportError:  # the process has ended; `_watch` reports the reason, unless it was asked to end
            self._release(session)
            return
        except grpc.RpcError:
            pass  # the owner has disconnected
        session.child.stop()
        self._release(session)  # also resources granted since `_watch` released them

    def _grant(self, session: Session, load: pb.Load) -> None:
        """Fill in the fields that only the daemon knows: file paths of the slice and its adapters, and the memory
        limit."""
        if session.slice:
            raise EdgeError("a slice is loaded already; unload it first")
        load.path = str(session.lease.enter_context(self._store.use(load.slice)))
        load.adapter_paths[:] = [str(session.lease.enter_context(self._store.use(name))) for name in load.adapters]
        if load.HasField("encoder"):
            head = session.lease.enter_context(self._store.use(load.encoder.text_model))
            load.encoder.text_model_path = str(head)
        load.memory_limit_bytes = 0
        load.prefix_folder = str(self._store.folder.with_name("prefixes"))
        load.prefix_bytes = self._options.prefix_bytes
        session.slice = load.slice
        if self.memory is not None:
            # One load at a time, because the remaining memory is known only after a load.
            deadline = time.monotonic() + TURN_S
            while not self._turn.acquire(timeout=_SIGN_OF_LIFE_S):
                if time.monotonic() > deadline or session.name not in self._sessions:
                    self._release(session)
                    raise EdgeError(f"another session has been loading for {TURN_S:g} s; try again when it is done")
                session.events.put(pb.Event(loading=pb.Loading(fraction=0)))
            with self._lock:
                session.has_turn = True
                idle = [other for other in self._sessions.values() if not other.slice]
            for other in idle:
                self._empty(other)
            load.memory_limit_bytes = max(1, self.memory.budget())

    def _addresses(self) -> tuple[str, ...]:
        """Return this device's addresses that other ranks can try. They may change while the daemon runs."""
        try:
            return usable_elsewhere(announced_addresses(self._options.host))
        except DiscoveryError:  # no addresses
            return ()

    def _empty(self, session: Session) -> None:
        """Release the memory of a session without a loaded part to other sessions."""
        if self.memory is not None and session.member is not None:
            self.memory.empty(session.member, session.child.pid)

    def _watch(self, session: Session) -> None:
        """Pass on events of the process until it ends."""
        try:
            while (event := session.child.receive()) is not None:
                kind = event.WhichOneof("event")
                pending = session.pending[0] if session.pending else ""
                if kind == "opened":
                    event.opened.session = session.name
                    event.opened.addresses[:] = self._addresses()
                elif kind in ("claim", "memory"):
                    if self.memory is not None and session.member is not None:
                        if kind == "claim":
                            self.memory.claim(session.member, event.claim)
                        else:
                            session.memory_bytes = event.memory.resident if session.slice else 0
                            self.memory.report(session.member, event.memory)
                    continue
                elif kind == "loaded":
                    session.memory_bytes = event.loaded.memory_bytes
                    self._end_turn(session)
                elif kind == "unloaded" or (kind == "failed" and pending == "load"):
                    self._release(session)
                if kind in ("loaded", "unloaded", "failed"):
                    why = event.failed.message if kind == "failed" else None
                    log.info(f"session-{kind}", session=session.name, slice=session.slice[:12] or None, why=why)
                self._answer(session, event)
            died = session.child.died()
            if died is not None:
                log.warning("engine-died", session=session.name, why=died.died.reason)
                session.events.put(died)
        finally:
            session.child.stop()  # it may still run after an error here
            with self._lock:
                self._sessions.pop(session.name, None)
            self._release(session)
            if self.memory is not None and session.member is not None:
                self.memory.leave(session.member)
            with session.answered:
                session.pending.clear()
                session.answered.notify_all()
            log.info("session-ended", session=session.name)
            session.events.put(None)

    def _answer(self, session: Session, event: pb.Event) -> None:
        """Send an event to the owner. A final event answers the oldest command."""
        with session.answered:
            session.events.put(event)
            if event.WhichOneof("event") not in ("loading", "alive") and session.pending:
                session.pending.popleft()
                session.answered.notify_all()

    def _release(self, session: Session) -> None:
        with session.answered:
            session.lease.close()
            session.slice, session.memory_bytes = "", 0
        self._empty(session)
        self._end_turn(session)

    def _end_turn(self, session: Session) -> None:
        """Let the next session load."""
        with self._lock:
            if session.has_turn:
                session.has_turn = False
                self._turn.release()
