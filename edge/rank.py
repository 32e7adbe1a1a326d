"""The engine process of a worker: one rank of a group. Started by the daemon, which it outlives by nothing.

It is a process of its own because ggml ends the whole process on what it does not expect, and because the engine's
callbacks need an interpreter that nobody else keeps busy. It gets commands from the daemon over a socket pair and has
links to the other ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import queue
import shutil
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

import numpy as np

from devices.network import path_hints
from edge import log, peers
from edge.errors import EdgeError, NotEnoughMemory
from quant.errors import QuantError
from quant.wire import WIRES
from transport import edge_pb2 as pb
from transport.collective import Group
from transport.errors import TransportError
from transport.frame import Kind
from transport.link import Deadlines, Link
from transport.measure import answer, measure
from transport.tcp_link import POLL_S, TcpLink

if TYPE_CHECKING:
    from edge.engine import Engine
    from transport.security import Credentials

_IDLE_S = 7 * 86400.0  # for the next command; whoever lets go earlier closes the daemon's end of the pair
_TRANSPORTS = ("auto", "tcp", "grpc")
_MOST_RANKS = 256
_MOST_FLOATS = 16 << 20
_MOST_REPEATS = 10_000


class Rank:
    """What one rank holds, and what it does on a command."""

    def __init__(
        self, control: TcpLink, open_: pb.Open, host: str, folder: Path, credentials: peers.Fetch | None, threads: int
    ) -> None:
        if not open_.rank < open_.world_size <= _MOST_RANKS or len(open_.secret) != peers.SECRET_BYTES:
            raise EdgeError(
                f"a session is of a rank below the number of ranks, at most {_MOST_RANKS}, with a secret of"
                f" {peers.SECRET_BYTES} bytes; not of rank {open_.rank} of {open_.world_size} with {len(open_.secret)}"
            )
        self._control = control
        self._open = open_
        self._threads = threads
        self._credentials = credentials
        self._poll_s = POLL_S
        self._deadlines = Deadlines(
            open_.connect_timeout_s or Deadlines.connect_timeout_s,
            open_.step_timeout_s or Deadlines.step_timeout_s,
            open_.send_timeout_s or Deadlines.send_timeout_s,
        )
        self._doorway = peers.Doorway(
            host, folder / "door", open_.rank, open_.secret, self._deadlines, credentials, self._poll_s
        )
        self._connecting = False
        self._group: Group | None = None
        self._engine: Engine | None = None
        self.opened = pb.Opened(tcp_port=self._doorway.tcp_port, pid=os.getpid())

    def handle(self, command: pb.Command) -> pb.Event:
        """Do what is asked and say what came of it."""
        name = command.WhichOneof("command")
        if name not in ("connect", "load", "answer", "measure", "allreduce", "unload"):
            raise EdgeError(f"this worker does not know the command {name}; update it")
        event: pb.Event = getattr(self, f"_{name}")(getattr(command, name))
        return event

    def _connect(self, asked: pb.Connect) -> pb.Event:
        """Dial the ranks above, wait for those below."""
        if self._connecting:  # what came of it, the other ranks have seen too
            raise EdgeError("the ranks were connected already, or failed to be; open a new session")
        mine, ranks = self._open.rank, {peer.rank for peer in asked.peers}
        if ranks != set(range(self._open.world_size)) - {mine}:
            raise EdgeError(f"rank {mine} of {self._open.world_size} was given the peers {sorted(ranks)}")
        if asked.transport not in ("", *_TRANSPORTS):
            raise EdgeError(f"{asked.transport!r} is no transport; use one of {', '.join(_TRANSPORTS)}")
        self._connecting = True
        links: dict[int, Link] = {}
        try:
            dialled = self._dial(asked, links)
            # Those below dial one after the other, in two ways, and measure.
            timeout_s = 2 * self._deadlines.connect_timeout_s * self._open.world_size
            below = {peer.rank: peer.name for peer in asked.peers if peer.rank < mine}
            links |= self._doorway.wait_for(below, timeout_s)
        except BaseException:
            for link in links.values():
                link.close()
            raise
        finally:
            self._doorway.close()
        self._group = Group(mine, links)
        figures = [one.figures for one in dialled.values()]
        self._group.agree(
            max((f.latency_s for f in figures), default=0.0),
            min((min(f.send_bytes_per_s, f.receive_bytes_per_s) for f in figures), default=math.inf),
        )
        return pb.Event(connected=pb.Connected(links=[_state(rank, one) for rank, one in dialled.items()]))

    def _dial(self, asked: pb.Connect, links: dict[int, Link]) -> dict[int, peers.Dialled]:
        """Fill in the links to the ranks above; how each was chosen."""
        dialled = {}
        for given in sorted(asked.peers, key=lambda peer: peer.rank):
            if given.rank < self._open.rank:
                continue
            peer = peers.Peer(given.rank, given.name, given.host, given.port, given.tcp_port, given.session)
            dialled[peer.rank] = peers.dial(
                peer,
                self._open.rank,
                self._open.secret,
                deadlines=self._deadlines,
                credentials=self._credentials,
                transport=asked.transport or "auto",
                poll_s=self._poll_s,
            )
            links[peer.rank] = dialled[peer.rank].link
        return dialled

    def _load(self, asked: pb.Load) -> pb.Event:
        from edge import memory
        from edge.engine import Engine, EngineOptions, resolve
        from partition.check import check_loadable
        from partition.model import ModelShape
        from quant.gguf_file import GgufFile

        if self._engine is not None:
            raise EdgeError("a slice is loaded already; unload it first")
        began = time.monotonic()
        options = _options(EngineOptions, asked.options_json, self._threads)
        file = GgufFile.open(asked.path)
        check_loadable(file)
        context, _, kv = resolve(options, ModelShape.from_gguf(file))
        need = memory.need(
            asked.path,
            context=context,
            batch=options.batch,
            kv=kv,
            sequences=options.sequences,
            outputs=min(options.outputs or options.sequences, options.batch, context),
            flash_attention=options.flash_attention,
        )
        limit = asked.memory_limit_bytes
        if limit and need.total > limit:
            parts = ", ".join(f"{name} {n / memory.MIB:,.0f}" for name, n in need.parts.items())
            raise NotEnoughMemory(
                f"the slice needs {need.total / memory.MIB:,.0f} MiB ({parts}), this worker has"
                f" {limit / memory.MIB:,.0f} MiB left of its limit; use a smaller --context, or a smaller share"
            )
        self._engine = Engine(asked.path, options, progress=self._report)
        loaded = pb.Loaded(
            memory_bytes=need.total,
            layers=self._engine.shape.n_layers,
            context=self._engine.context,
            load_s=time.monotonic() - began,
        )
        return pb.Event(loaded=loaded)

    def _report(self, fraction: float) -> None:
        emit(self._control, pb.Event(loading=pb.Loading(fraction=fraction)))

    def _unload(self, _: pb.Unload) -> pb.Event:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        return pb.Event(unloaded=pb.Unloaded())

    def _answer(self, asked: pb.Answer) -> pb.Event:
        answer(self._link(asked.rank))
        return pb.Event(answered=pb.Answered())

    def _measure(self, asked: pb.Measure) -> pb.Event:
        link = self._link(asked.rank)
        found = measure(link, min(max(asked.seconds, 0.1), 60.0))
        return pb.Event(
            measured=pb.Measured(
                kind=link.kind,
                round_trip_median_s=found.round_trip_median_s,
                round_trip_p99_s=found.round_trip_p99_s,
                round_trip_best_s=found.round_trip_best_s,
                send_bytes_per_s=found.send_bytes_per_s,
                receive_bytes_per_s=found.receive_bytes_per_s,
                hints=path_hints(
                    link.local_address,
                    found.round_trip_best_s / 2,
                    found.round_trip_median_s / 2,
                    found.round_trip_p99_s / 2,
                    min(found.send_bytes_per_s, found.receive_bytes_per_s),
                ),
            )
        )

    def _allreduce(self, asked: pb.Allreduce) -> pb.Event:
        """Sum seeded noise again and again: how long one takes, and a digest that must be the same on all ranks."""
        group = self._joined()
        if not 0 < asked.n_floats <= _MOST_FLOATS or not 0 < asked.repeats <= _MOST_REPEATS:
            raise EdgeError(f"an allreduce takes 1 to {_MOST_FLOATS} floats, 1 to {_MOST_REPEATS} times")
        if asked.wire not in WIRES:
            raise EdgeError(f"{asked.wire!r} is no wire type; use one of {', '.join(WIRES)}")
        chosen: Any = asked.algorithm or "auto"  # the group refuses what it does not know
        own = np.random.default_rng([asked.seed, group.rank]).standard_normal(asked.n_floats, np.float32)
        times: list[float] = []
        group.barrier()
        for _ in range(asked.repeats):
            x = own.copy()
            began = time.perf_counter()
            algorithm = group.allreduce(x, chosen, WIRES[asked.wire])
            times.append(time.perf_counter() - began)
        median_s = sorted(times)[len(times) // 2]
        digest = hashlib.sha256(x.tobytes()).digest()
        return pb.Event(allreduced=pb.Allreduced(algorithm=algorithm, median_s=median_s, digest=digest))

    def _joined(self) -> Group:
        if self._group is None:
            raise EdgeError("the ranks are not connected yet")
        return self._group

    def _link(self, rank: int) -> Any:
        links = self._joined().links
        if rank not in links:
            raise EdgeError(f"rank {self._open.rank} has no link to rank {rank}")
        return links[rank]


def _state(rank: int, dialled: peers.Dialled) -> pb.LinkState:
    """How a link was chosen."""
    return pb.LinkState(
        rank=rank,
        kind=dialled.link.kind,
        tcp_round_trip_s=dialled.tcp_s,
        grpc_round_trip_s=dialled.grpc_s,
        why=dialled.why,
    )


def _options(kind: Any, text: str, threads: int) -> Any:
    """Engine options from JSON, with no more threads than the device lends. EdgeError names what is not one."""
    try:
        given = json.loads(text or "{}")
        types = get_type_hints(kind)
        for name, value in given.items() if isinstance(given, dict) else ():
            if not isinstance(value, types.get(name, object)):
                raise TypeError(f"{name} cannot be {value!r}")
        options = kind(**{"threads": threads, **given})
        return replace(options, threads=min(options.threads or threads, threads))
    except (ValueError, TypeError, RecursionError) as error:
        raise EdgeError(f"these engine options cannot be used: {error}") from error


def emit(control: TcpLink, event: pb.Event) -> None:
    """Tell the daemon."""
    control.send(event.SerializeToString(), Kind.CONTROL)


def failed(error: Exception) -> pb.Event:
    """An error as an event: its class and its words."""
    known = isinstance(error, (EdgeError, QuantError, TransportError, OSError, ValueError))
    text = str(error) if known else f"unexpected {type(error).__name__}: {error}; please report it"
    return pb.Event(failed=pb.Failed(error=type(error).__name__, message=text))


def main(argv: list[str] | None = None) -> NoReturn:
    """Run one rank until the daemon lets go of it."""
    parser = argparse.ArgumentParser(prog="edge.rank")
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--credentials", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args(argv)
    log.set_up()
    control = TcpLink(socket.socket(fileno=args.control), "the daemon", poll_s=0)
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(control, commands, args.folder), daemon=True, name="commands").start()

    opened = pb.Command.FromString(commands.get()).open
    try:
        credentials = _credentials(args.credentials)
        rank = Rank(control, opened, args.host, args.folder, credentials, args.threads)
    except Exception as error:
        emit(control, failed(error))
        sys.exit(1)
    emit(control, pb.Event(opened=rank.opened))
    while True:
        data = commands.get()
        try:
            event = rank.handle(pb.Command.FromString(data))
        except Exception as error:  # whatever it is, the owner must hear of it
            event = failed(error)
        emit(control, event)


def _read(control: TcpLink, commands: queue.SimpleQueue[bytes], folder: Path) -> None:
    """Commands as they come. When the daemon is gone, so is this process, whatever it computes."""
    while True:
        try:
            commands.put(bytes(control.receive(_IDLE_S).payload))
        except TransportError:
            shutil.rmtree(folder, ignore_errors=True)  # nobody else is left to do it where the daemon was killed
            os._exit(0)


def _credentials(folder: Path | None) -> peers.Fetch | None:
    if folder is None:
        return None
    from edge.trust import credentials

    def fetch() -> Credentials:
        found = credentials(folder)
        if found is None:
            raise EdgeError(f"the credentials in {folder} are gone; join again")
        return found

    return fetch


if __name__ == "__main__":
    main()
