"""What a plan goes by, measured: how fast each device computes the model's layers, and how long the links take.

The layers are of the model's real shape and types, and their weights are zero. Such a slice is a header and zeros, so
every device makes it by itself and nothing of the model crosses the network.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from devices.probe import default_threads
from edge.closing import Closing, results
from edge.engine_session import EngineSession, connect_all
from edge.errors import WorkerError
from edge.fleet import Fleet
from edge.local_session import LocalSession
from edge.own_slices import OwnSlices
from edge.peers import SECRET_BYTES
from edge.remote_session import RemoteSession
from partition.gguf_slice import blank_recipe, limits
from partition.plan import LOCAL, NOTHING, Range, Slice
from partition.recipe import Recipe
from quant.gguf_file import GgufFile
from transport import edge_pb2 as pb

PREFILL_ROWS = 32
_STEPS = 15
_LEAST_BYTES = 96 << 20  # of layers: more than caches hold, for decoding is bound by what memory gives
_MOST_S = 3600.0  # no figure is that large
_OPTIONS = {"context": 2 * PREFILL_ROWS, "batch": PREFILL_ROWS}


@dataclass(frozen=True)
class Speed:
    """Seconds that one layer takes on one device."""

    device: str  # as in a plan
    decode_s: float  # one token
    prefill_s: float  # PREFILL_ROWS tokens


@dataclass(frozen=True)
class Survey:
    """What was measured."""

    speeds: tuple[Speed, ...]  # by rank
    hop_s: float  # 8 KiB to another rank, over the slowest of the links


def survey(
    fleet: Fleet,
    addresses: Sequence[str],
    file: GgufFile,
    model_digest: str,
    *,
    threads: int | None = None,
    transport: str = "auto",
    on_step: Callable[[float, float], None] = lambda done, of: None,
) -> Survey:
    """Measure this device, with so many threads, and the workers at `addresses`, which are ranks 1 and up: all at once.

    on_step(done, of) is called as devices are done. CannotSlice where the model has no layers to be timed; else the
    errors of sessions.
    """
    slices = OwnSlices()
    recipe, layers = _layers(file, model_digest)
    digest = slices.digest(recipe, file.path)
    world_size = len(addresses) + 1
    secret = secrets.token_bytes(SECRET_BYTES)
    pool = ThreadPoolExecutor(world_size, "survey")
    try:
        with Closing() as closing:  # and whoever still waits for a session then hears that it was closed
            path = closing.enter(slices.use(recipe, file.path, digest))

            def start(rank: int) -> EngineSession:
                session: EngineSession
                if rank == 0:
                    own = threads or default_threads()
                    session = LocalSession(fleet.local_name, world_size, secret, fleet.credentials, own)
                else:
                    worker = fleet.workers[addresses[rank - 1]]
                    worker.send_slice(recipe, file.path, digest, closing.check)
                    closing.check()
                    session = RemoteSession(worker, rank, world_size, secret)
                closing.then(session.close)
                return session

            def timed(session: EngineSession) -> Speed:
                device = addresses[session.rank - 1] if session.rank else LOCAL
                speed = _timed(session, device, _load(session.rank, world_size, digest, path), layers)
                closing.check()  # nobody shows progress any more
                done.append(device)
                on_step(len(done), world_size)
                return speed

            done: list[str] = []
            sessions = results(pool.submit(start, rank) for rank in range(world_size))
            trips = [
                _trip(session, state)
                for session, states in zip(sessions, connect_all(sessions, transport), strict=True)
                for state in states
            ]
            speeds = results(pool.submit(timed, session) for session in sessions)
            return Survey(tuple(speeds), max(trips, default=0.0) / 2)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _layers(file: GgufFile, model_digest: str) -> tuple[Recipe, int]:
    """The first layers of a model, with weights of zero, and how many they are."""
    can = limits(file)
    n = next((n for n in range(1, can.sizes.layers) if sum(can.layer_bytes[:n]) >= _LEAST_BYTES), can.sizes.layers)
    cut = Slice(Range(0, n), Range(0, can.sizes.heads), Range(0, can.sizes.ff), NOTHING, first=True)
    return blank_recipe(file, model_digest, cut), n


def _load(rank: int, world_size: int, digest: str, path: Path) -> pb.Load:
    """The layers as a stage of its own that is not the last, so that they end in hidden states."""
    stages = [1] * (world_size + 1)  # `place` allows one more than there can be ranks
    return pb.Load(slice=digest, path=str(path), stages=stages, options_json=json.dumps(_OPTIONS))


def _trip(session: EngineSession, state: pb.LinkState) -> float:
    """The round trip of a link, which its lower rank measured. WorkerError where it says what cannot be."""
    trip = {"tcp": state.tcp_round_trip_s, "grpc": state.grpc_round_trip_s}.get(state.kind, math.nan)
    if not 0 <= trip < _MOST_S:
        raise WorkerError(f"{session.device} says of its links what cannot be; is it of another version?")
    return trip


def _timed(session: EngineSession, device: str, load: pb.Load, layers: int) -> Speed:
    session.ask(pb.Command(load=load))
    found = session.ask(pb.Command(time=pb.Time(rows=PREFILL_ROWS, steps=_STEPS))).timed
    session.unload()
    if not (0 < found.decode_s < _MOST_S and 0 < found.prefill_s < _MOST_S):
        raise WorkerError(f"{session.device} answers with times that cannot be; is it of another version?")
    return Speed(device, found.decode_s / layers, found.prefill_s / layers)
