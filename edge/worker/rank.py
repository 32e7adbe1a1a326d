"""Engine process of a worker: one rank of a group. The daemon starts it, and it ends with the daemon.

It is a separate process for two reasons: ggml aborts the process on unexpected input, and the engine's callbacks need
an interpreter without other work. It receives commands from the daemon over a socket pair, and has links to the other
ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import queue
import shutil
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from devices.network import path_hints, usable_elsewhere
from edge import log
from edge.errors import EdgeError
from edge.net import peers
from edge.net.dialling import Dialled
from edge.net.peers import HEARTBEAT_S
from edge.net.rendezvous import TRANSPORTS, join
from edge.parallel.engine_kinds import own_kind
from edge.parallel.topology import world_size
from edge.weights.elastic.signals import ignore_memory_signals
from edge.worker.limits import ResourceLimits, compute_on
from edge.worker.memory import follow_daemon, join_daemon
from edge.worker.messages import deadlines_of
from edge.worker.process import EXIT_S
from quant.wire import WIRES
from transport import edge_pb2 as pb
from transport.choice import ALGORITHMS
from transport.collective import Group
from transport.errors import TransportError
from transport.frame import Kind
from transport.link import IDLE_S
from transport.measure import answer, measure
from transport.tcp_link import TcpLink

if TYPE_CHECKING:
    from edge.worker.loaded import LoadedPart

_MOST_RANKS = 256
_MOST_FLOATS = 16 << 20
_MOST_REPEATS = 10_000
_LEAST_MEASURED_S, _MOST_MEASURED_S = 0.1, 60.0  # limits of the duration of a link measurement
_REMOVALS = 2  # attempts to remove the folder: `Rank` may be opening its socket there
_FINISH_S = EXIT_S / 2  # time for background writes; the daemon kills a process that takes EXIT_S to end
_MOST_TEXT = 4000  # maximum characters of an error, which may repeat the owner's input; events are limited to 1 MiB


class Rank:
    """State of one rank, and its command handlers."""

    def __init__(
        self,
        control: TcpLink,
        open_: pb.Open,
        host: str,
        folder: Path,
        credentials: peers.Fetch | None,
        limits: ResourceLimits,
    ) -> None:
        if not open_.rank < open_.world_size <= _MOST_RANKS or len(open_.secret) != peers.SECRET_BYTES:
            raise EdgeError(
                f"a session needs a rank below the number of ranks, at most {_MOST_RANKS} ranks, and a secret of"
                f" {peers.SECRET_BYTES} bytes; not of rank {open_.rank} of {open_.world_size} with {len(open_.secret)}"
            )
        cores = tuple(sorted(set(open_.affinity)))
        compute_on(cores)
        self._control = control
        self._open = open_
        # One thread more than cores would keep all other threads waiting.
        self._limits = replace(limits, threads=min(limits.threads, len(cores) or limits.threads))
        self._credentials, self._folder = credentials, folder
        self._poll_s = own_kind().polling_s(limits.threads)  # threads of all sessions: they share the quota
        self._deadlines = deadlines_of(open_)
        self._listener = peers.Listener(
            host, folder / "door", open_.rank, open_.secret, self._deadlines, credentials, self._poll_s, open_.streams
        )
        self._connecting = False
        self._group: Group | None = None
        self._loaded: LoadedPart | None = None
        self._stages: tuple[int, ...] = ()  # ranks of each stage of a loaded slice; empty for a whole model
        self.opened = pb.Opened(tcp_port=self._listener.tcp_port, pid=os.getpid())

    @property
    def alive(self) -> pb.Alive:
        """The heartbeat of this process."""
        loaded = self._loaded
        if loaded is None:
            return pb.Alive()
        total, free = loaded.gpu_bytes or (0, 0)
        return pb.Alive(computed_s=loaded.computed_s, gpu_total_bytes=total, gpu_free_bytes=free)

    def handle(self, command: pb.Command) -> pb.Event:
        """Execute a command and return its event."""
        name = command.WhichOneof("command")
        if name not in ("connect", "load", "answer", "measure", "allreduce", "unload", "run", "time"):
            raise EdgeError(f"this worker does not know the command {name}; update it")
        event: pb.Event = getattr(self, f"_{name}")(getattr(command, name))
        return event

    def _connect(self, request: pb.Connect) -> pb.Event:
        """Dial the ranks above, and wait for the ranks below."""
        if self._connecting:  # the other ranks have seen the result of the first attempt
            raise EdgeError("the ranks are already connected, or failed to connect; open a new session")
        mine, ranks = self._open.rank, {peer.rank for peer in request.peers}
        if ranks != set(range(self._open.world_size)) - {mine}:
            raise EdgeError(f"rank {mine} of {self._open.world_size} was given the peers {sorted(ranks)!s:.200}")
        if request.transport not in ("", *TRANSPORTS):
            raise EdgeError(f"{request.transport!r} is not a transport; use one of {', '.join(TRANSPORTS)}")
        self._connecting = True
        others = [
            peers.Peer(p.rank, p.name, p.host, p.port, p.tcp_port, p.session, usable_elsewhere(p.addresses))
            for p in request.peers
        ]
        self._group, dialled = join(
            mine,
            self._open.secret,
            others,
            deadlines=self._deadlines,
            credentials=self._credentials,
            transport=request.transport or "auto",
            poll_s=self._poll_s,
            listener=self._listener,
            streams=self._open.streams,
        )
        return pb.Event(connected=pb.Connected(links=[_state(rank, link) for rank, link in dialled.items()]))

    def _load(self, request: pb.Load) -> pb.Event:
        if self._loaded is not None:
            raise EdgeError("a slice is loaded already; unload it first")
        began = time.monotonic()
        if request.HasField("stage"):
            from edge.worker.load_stage import load as load_stage

            self._loaded = load_stage(request, self._open.rank, self._limits, self._report)
        elif request.HasField("encoder"):
            from edge.worker.load_encoder import load as load_encoder

            self._loaded = load_encoder(request, self._limits, self._folder, self._report)
        else:
            from edge.worker.load import load

            self._loaded = load(request, self._open.rank, self._limits, self._report)
        self._stages = tuple(request.stages)
        loaded = self._loaded.describe()
        loaded.load_s = time.monotonic() - began
        return pb.Event(loaded=loaded)

    def _report(self, fraction: float) -> None:
        emit(self._control, pb.Event(loading=pb.Loading(fraction=fraction)))

    def finish(self) -> None:
        """Complete background writes. Called when the daemon has asked this process to end."""
        if self._loaded is not None:
            self._loaded.finish(_FINISH_S)

    def _unload(self, _: pb.Unload) -> pb.Event:
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None
        return pb.Event(unloaded=pb.Unloaded())

    def _answer(self, request: pb.Answer) -> pb.Event:
        answer(self._link(request.rank))
        return pb.Event(answered=pb.Answered())

    def _measure(self, request: pb.Measure) -> pb.Event:
        link = self._link(request.rank)
        try:
            measured = measure(link, min(max(_LEAST_MEASURED_S, request.seconds), _MOST_MEASURED_S))
        except Exception as error:
            link.refuse(str(error))  # the answering rank then fails, too, instead of waiting
            raise
        return pb.Event(
            measured=pb.Measured(
                **asdict(measured),
                kind=link.kind,
                hints=path_hints(
                    link.local_address,
                    measured.round_trip_best_s / 2,
                    measured.round_trip_median_s / 2,
                    measured.round_trip_p99_s / 2,
                    min(measured.send_bytes_per_s, measured.receive_bytes_per_s),
                ),
            )
        )

    def _allreduce(self, request: pb.Allreduce) -> pb.Event:
        """Time repeated all-reduces of seeded noise. Report the median seconds, and a digest that must match on all
        ranks."""
        group = self._joined()
        if not 0 < request.n_floats <= _MOST_FLOATS or not 0 < request.repeats <= _MOST_REPEATS:
            raise EdgeError(f"an allreduce takes 1 to {_MOST_FLOATS} floats, 1 to {_MOST_REPEATS} times")
        if request.wire not in WIRES:
            raise EdgeError(f"{request.wire!r} is not a wire type; use one of {', '.join(WIRES)}")
        chosen: Any = request.algorithm or "auto"  # the group refuses an unknown algorithm
        own = np.random.default_rng([request.seed, group.rank]).standard_normal(request.n_floats, np.float32)
        times: list[float] = []
        group.barrier()
        for _ in range(request.repeats):
            x = own.copy()
            began = time.perf_counter()
            algorithm = group.allreduce(x, chosen, WIRES[request.wire])
            times.append(time.perf_counter() - began)
        median_s = sorted(times)[len(times) // 2]
        digest = hashlib.sha256(x.tobytes()).digest()
        return pb.Event(allreduced=pb.Allreduced(algorithm=algorithm, median_s=median_s, digest=digest))

    def _run(self, request: pb.Run) -> pb.Event:
        """Follow rank 0. If this rank fails, it sends the reason to all other ranks, so that they fail, too."""
        group = self._joined()
        try:
            if request.wire not in WIRES or request.algorithm not in ("auto", *ALGORITHMS):
                raise EdgeError(f"{request.algorithm!r} over {request.wire!r} is not known here; update this worker")
            n_ranks = world_size(self._stages)
            if self._stages and n_ranks != group.world_size:
                raise EdgeError(f"a slice for {n_ranks} ranks is loaded, {group.world_size} are connected")
            self._part().run(request, group)
        except Exception as error:
            for link in group.links.values():
                link.refuse(f"rank {group.rank}: {error}")
            raise
        return pb.Event(ran=pb.Ran())

    def _time(self, request: pb.Time) -> pb.Event:
        return pb.Event(timed=self._part().time(request))

    def _part(self) -> LoadedPart:
        if self._loaded is None:
            raise EdgeError("no slice is loaded yet")
        return self._loaded

    def _joined(self) -> Group:
        if self._group is None:
            raise EdgeError("the ranks are not connected yet")
        return self._group

    def _link(self, rank: int) -> Any:
        links = self._joined().links
        if rank not in links:
            raise EdgeError(f"rank {self._open.rank} has no link to rank {rank}")
        return links[rank]


def _state(rank: int, dialled: Dialled) -> pb.LinkState:
    """Return the message about a link that this rank dialled."""
    return pb.LinkState(
        rank=rank,
        kind=dialled.link.kind,
        round_trip_s=dialled.round_trip_s,
        bytes_per_s=dialled.bytes_per_s,
        why=dialled.why,
    )


def emit(control: TcpLink, event: pb.Event) -> None:
    """Send an event to the daemon."""
    control.send(event.SerializeToString(), Kind.CONTROL)


def failed(error: Exception) -> pb.Event:
    """Return an event with the class and message of an error."""
    known = isinstance(error, (EdgeError, OSError, ValueError))
    text = str(error) if known else f"unexpected {type(error).__name__}: {error}; please report it"
    text = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
    return pb.Event(failed=pb.Failed(error=type(error).__name__, message=text))


def main(argv: list[str] | None = None) -> NoReturn:
    """Run one rank until the daemon ends it."""
    parser = argparse.ArgumentParser(prog="edge.worker.rank")
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--credentials", type=Path)
    parser.add_argument("--shares-memory", action="store_true", help="the daemon divides memory among sessions")
    parser.add_argument("--limits", type=ResourceLimits.from_text, required=True)
    args = parser.parse_args(argv)
    log.set_up()
    ignore_memory_signals()
    own_kind().prepare_process()
    control = TcpLink(socket.socket(fileno=args.control), "the daemon", poll_s=0)
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    ranks: list[Rank] = []
    reader = threading.Thread(target=_read, args=(control, commands, args.folder, ranks), daemon=True, name="commands")
    reader.start()

    def report(event: pb.Event) -> None:
        try:
            emit(control, event)
        except TransportError:
            reader.join(EXIT_S)  # the daemon has ended, and the reader ends this process

    opened = pb.Command.FromString(commands.get()).open
    try:
        compute_on(args.limits.affinity)  # before libraries start compute threads
        if args.shares_memory:
            join_daemon(partial(emit, control))
        rank = Rank(control, opened, args.host, args.folder, _credentials(args.credentials), args.limits)
        ranks.append(rank)
    except Exception as error:
        report(failed(error))
        sys.exit(1)
    report(pb.Event(opened=rank.opened))
    threading.Thread(target=_send_heartbeats, args=(control, rank), daemon=True, name="heartbeat").start()
    while True:
        data = commands.get()
        try:
            event = rank.handle(pb.Command.FromString(data))
        except Exception as error:  # the owner must learn of any error
            event = failed(error)
        report(event)


def run_forked(arguments: list[str], descriptors: list[int]) -> NoReturn:
    """Run `main` in a forked process. descriptors: file descriptors of its commands and of its output."""
    control, output = descriptors
    os.dup2(output, 2)
    os.close(output)
    main([*arguments, "--control", str(control)])


def _send_heartbeats(control: TcpLink, rank: Rank) -> None:
    """Send heartbeats while this process runs, even during a long computation."""
    with suppress(TransportError):  # the daemon has ended
        while True:
            time.sleep(HEARTBEAT_S)
            alive = pb.Alive()
            with suppress(Exception):  # figures for people must not end the heartbeats
                alive = rank.alive
            emit(control, pb.Event(alive=alive))


def _read(control: TcpLink, commands: queue.SimpleQueue[bytes], folder: Path, ranks: list[Rank]) -> None:
    """Queue incoming commands. End this process when the daemon ends, even during a computation."""
    while True:
        try:
            data = bytes(control.receive(IDLE_S).payload)
            command = pb.Command.FromString(data)
            if command.HasField("share"):  # applied immediately, even during a computation
                follow_daemon(command.share)
            else:
                commands.put(data)
        except TransportError:
            with suppress(Exception):  # this process ends in any case
                for rank in ranks:
                    rank.finish()
            for _ in range(_REMOVALS):  # a killed daemon cannot remove the folder
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)


def _credentials(folder: Path | None) -> peers.Fetch | None:
    if folder is None:
        return None
    from edge.net.credentials import required

    return partial(required, folder)


if __name__ == "__main__":
    main()
