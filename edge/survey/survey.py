"""What a plan of a language model goes by, measured: what each device takes for its parts, and what the links do.

Layers are of the model's real shape and types, and their weights are zero. Such a slice is a header and zeros, so every
device makes it by itself and nothing of the model crosses the network.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType

from devices.probe import available_memory, default_threads, own_rss
from devices.profile import DeviceProfile, describe
from edge.cluster.fleet import Fleet
from edge.cluster.session import EngineSession, LocalSession, RemoteSession, connect_all
from edge.net.peers import SECRET_BYTES
from edge.survey.cache import BUSY_AGE_S, SpeedCache, key_of
from edge.survey.corrections import Corrections
from edge.survey.layer_times import device_speed, probes, timed
from edge.survey.links import measure_links
from edge.tasks import CancelScope, results
from edge.version import version
from partition.plan.plan import LOCAL
from partition.predict.speeds import DeviceSpeed, Links
from quant.gguf.file import GgufFile

# Of a core's time for a sum: system calls, Python and adding, with caches that hold the last layer's weights. Measured
# on two devices: 50 us where a rank polls, 95 where a CPU quota forbids that. Slow devices take longer in proportion.
_SUM_CPU_S = 90e-6
_AMPLE = 1.5  # times a model's file: weights, KV cache and buffers take less, but for very long contexts
_MOST_BYTES = 1 << 60
# Of a limit for all processes of a device: this one or the daemon, and what an engine process takes beside weights.
PROBE_BYTES = 250 << 20
_GROWTH_BYTES = 24 << 20  # that this process may come to need while another one measures
NOTHING_SAID: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Survey:
    """What was measured."""

    speeds: tuple[DeviceSpeed, ...]  # this device first, then in the order of addresses
    links: Links


def survey(
    fleet: Fleet | None,
    addresses: Sequence[str],
    file: GgufFile,
    model_digest: str,
    *,
    threads: Mapping[str, int] = NOTHING_SAID,
    memory: Mapping[str, int] = NOTHING_SAID,
    transport: str = "auto",
    fresh: bool = False,
    on_step: Callable[[float, float], None] = lambda done, of: None,
) -> Survey:
    """Measure this device and the workers at `addresses`: links, this one, then all others at once.
    fleet: where they are connected; None: there are none. threads, memory: of devices that are to
    have other ones than they lend: bytes, at most.

    A device's times are remembered for a day, but where it was busy only for a minute; fresh: measure them
    anyway. They are corrected by what steps in use took. on_step(done, of) is called as links and slices are done.
    CannotSlice where the model has no layers to be timed; else the errors of sessions.
    """
    world_size = len(addresses) + 1
    own_threads = threads.get(LOCAL) or default_threads()
    secret = secrets.token_bytes(SECRET_BYTES)
    devices = [LOCAL, *addresses]
    own_name, credentials = (fleet.local_name, fleet.credentials) if fleet else (LOCAL, None)
    others = [fleet.profiles[address] for address in addresses] if fleet else []
    profiles = [own_profile(own_name, own_threads), *others]
    cache, corrections = SpeedCache(), Corrections()
    pool = ThreadPoolExecutor(world_size, "survey")
    try:
        with CancelScope() as closing:  # and whoever still waits for a session then hears that it was closed
            limits = [limit for device in devices if (limit := _limit(fleet, device, memory)) is not None]
            slices, n = probes(file, model_digest, closing, min(limits) - PROBE_BYTES if limits else None)
            rooms = [min(_memory(fleet, device), memory.get(device, _MOST_BYTES)) for device in devices]
            short = [room < _AMPLE * file.size_bytes for room in rooms]  # it may have to page
            digests = [probe.digest for probe in slices.values()]
            keys = [
                key_of([*digests, str(threads.get(device)), str(pages)], profile)
                for device, pages, profile in zip(devices, short, profiles, strict=True)
            ]
            known = [
                None if fresh else cache.get(key, device, _name(fleet, device))
                for key, device in zip(keys, devices, strict=True)
            ]
            wanting = [one is None or (one.busy and one.age_s > BUSY_AGE_S) for one in known]
            steps = len(slices) * wanting.count(True) + world_size * (world_size - 1) // 2
            done: list[None] = []

            def step() -> None:
                closing.check()  # nobody shows progress any more
                done.append(None)
                on_step(len(done), steps)

            def start(rank: int) -> EngineSession:
                session: EngineSession
                if fleet is None or rank == 0:
                    session = LocalSession(own_name, world_size, secret, credentials, own_threads)
                else:
                    worker = fleet.workers[addresses[rank - 1]]
                    for probe in slices.values() if wanting[rank] else ():
                        worker.send_slice(probe.recipe, file.path, probe.digest, closing.check)
                    closing.check()
                    session = RemoteSession(worker, rank, world_size, secret)
                closing.then(session.close)
                return session

            def speed(session: EngineSession) -> DeviceSpeed:
                device, found, key = devices[session.rank], known[session.rank], keys[session.rank]
                memory_bytes = rooms[session.rank]
                if found is None or wanting[session.rank]:
                    many, pages = threads.get(device), short[session.rank]
                    own = memory.get(LOCAL) if session.rank == 0 else None
                    left = None if own is None else max(1, own - own_rss() - _GROWTH_BYTES)
                    times = timed(session, slices, n, step, threads=many, disk=pages, memory=left)
                    found = better(device_speed(times, device, _name(fleet, device), memory_bytes), found)
                    cache.put(key, found)
                found = replace(found, memory_bytes=memory_bytes, threads=threads.get(device), key=key)
                return corrections.applied(found)

            sessions = results(pool.submit(start, rank) for rank in range(world_size))
            links = measure_links(sessions, devices, connect_all(sessions, transport), step, fresh=fresh)
            # This device hands out the work, so it is alone with its own; the others are on their own in any case.
            speeds = [speed(sessions[0]), *results(pool.submit(speed, session) for session in sessions[1:])]
            return Survey(tuple(_with_sums(speeds)), links)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def better(new: DeviceSpeed, old: DeviceSpeed | None) -> DeviceSpeed:
    """Of two measurements of a device, the one to keep: the new one, but where it was busy and the old one is faster.
    old: was busy, too."""
    if old is None or not new.busy or new.layer_s.at(1) <= old.layer_s.at(1):
        return new
    return replace(old, age_s=0.0)


def _with_sums(speeds: Sequence[DeviceSpeed]) -> list[DeviceSpeed]:
    """What a sum takes of each processor: on the fastest a known time, on others so many times that."""
    fastest = min(speed.layer_s.at(1) for speed in speeds)
    return [replace(speed, sum_s=_SUM_CPU_S * speed.layer_s.at(1) / fastest) for speed in speeds]


def own_profile(name: str, threads: int) -> DeviceProfile:
    """This device as a worker would describe it."""
    return describe(name, threads=threads, runtime=version("edge-runtime"), llama_cpp=version("llama-cpp-python"))


def _name(fleet: Fleet | None, device: str) -> str:
    return "this device" if fleet is None or device == LOCAL else fleet.workers[device].label


def _limit(fleet: Fleet | None, device: str, memory: Mapping[str, int]) -> int | None:
    """Bytes that all processes of a device may hold together, where somebody said so."""
    if device == LOCAL or fleet is None:
        return memory.get(LOCAL)
    return fleet.profiles[device].memory_limit_bytes


def _memory(fleet: Fleet | None, device: str) -> int:
    """Bytes of memory that a model may take there."""
    return available_memory() if fleet is None or device == LOCAL else fleet.memory_of(device)
