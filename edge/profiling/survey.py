"""Survey of devices: times of a model's parts on each device, and speeds of the links between devices.

Language models and ONNX models have different parts to time, so each kind has its own `Profiler`.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from devices.probe import available_memory, default_threads
from devices.profile import DeviceProfile
from devices.remembered import KEPT_AGE_S, Remembered
from edge.cluster.client import Remote
from edge.cluster.fleet import Fleet
from edge.cluster.session import EngineSession, LocalSession, RemoteSession, connect_all
from edge.net.peers import SECRET_BYTES
from edge.parallel.engine_kinds import own_kind
from edge.profiling.links import measure_links
from edge.tasks import CancelScope, Progress, results, unwaited_pool
from partition.plan.plan import LOCAL
from partition.predict.hosts import Host
from partition.predict.onnx_predict import OnnxDevice
from partition.predict.speeds import DeviceSpeed, Links

LINKS_PART, OWN_PART = 0.25, 0.3  # parts of the time for links and for this device; workers have the rest
MARGIN = 0.1  # part of the time in which measurements end that take longer than their time

Speed = TypeVar("Speed", DeviceSpeed, OnnxDevice)


@dataclass(frozen=True)
class Survey(Generic[Speed]):
    """Measured speeds of devices and links."""

    speeds: tuple[Speed, ...]  # this device first, then in the order of addresses
    links: Links
    estimated: tuple[str, ...] = ()  # parts of the model without a measured time on some device


class Devices:
    """This device (rank 0) and the workers, by rank."""

    def __init__(self, fleet: Fleet | None, threads: int | None) -> None:
        """fleet: connection to the workers; None: no workers. threads: threads of this device; None: its default."""
        self.addresses: tuple[str, ...] = (LOCAL,)  # addresses as in a plan
        self.workers: list[Remote | None] = [None]
        self.names = ["this device"]  # names for display
        self.memory_bytes = [available_memory()]  # memory for a model on each device
        self.local_name, self.credentials = (fleet.local_name, fleet.credentials) if fleet else (LOCAL, None)
        self.threads = threads or default_threads()
        self.profiles = [own_profile(self.local_name, self.threads)]
        if fleet is None:
            return
        for address, worker in fleet.workers.items():
            self.addresses += (address,)
            self.workers.append(worker)
            self.names.append(worker.label)
            self.memory_bytes.append(fleet.memory_of(address))
            self.profiles.append(fleet.profiles[address])


class TimedResult(Protocol):
    """Times of a model's parts on a device."""

    @property
    def seconds(self) -> float:
        """Seconds for comparing two measurements."""

    @property
    def busy(self) -> bool:
        """True if other work kept the device busy during the measurement."""

    @property
    def estimate(self) -> bool:
        """True if the time did not suffice to measure the device."""


T = TypeVar("T", bound=TimedResult)


@dataclass(frozen=True)
class DeviceTiming(Generic[T]):
    """Times of one device, and their age."""

    times: T
    age_s: float = 0.0  # seconds since the measurement


class Profiler(Protocol[T]):
    """Interface of a profiler for one kind of model."""

    cache: str  # name of the cache file for times
    streams: bool  # True: links carry streams (`transport.tcp_link.tune`)

    @property
    def steps(self) -> int:
        """Number of times that `time` calls its callback."""

    @property
    def keys(self) -> Sequence[str]:
        """Cache key by rank, made from all values that times depend on."""

    def time(self, session: EngineSession, on_step: Callable[[], None], most_s: float) -> T:
        """Measure one device, in about `most_s` seconds at most. Send the files that it needs."""

    def so_far(self, rank: int) -> T:
        """Return the result of an unfinished measurement. Figures that were not measured are estimated."""

    def to_json(self, times: T) -> Any:
        """Return plain values for the cache."""

    def read(self, rank: int, values: Any) -> T | None:
        """Return times from values of `to_json`, or None for other values, such as those of another version."""


def survey(
    devices: Devices,
    profiler: Profiler[T],
    closing: CancelScope,
    *,
    transport: str = "auto",
    fresh: bool = False,
    known_times: Mapping[str, T] | None = None,
    seconds: float = math.inf,
    estimate_links: Callable[[], Links] = Links,
    on_step: Progress = lambda done, total: None,
) -> tuple[list[DeviceTiming[T]], Links]:
    """Measure the links, then this device, then all workers in parallel. Workers on one machine are measured in turn.

    closing: ends the sessions; threads that wait for one then get an error.
    fresh: ignore cached times. Times of a busy device do not replace faster cached times of a quiet one.
    known_times: times by address, for devices that are not measured.
    seconds: time for measuring; then the figures so far count, and the rest is estimated. Processes, links and slices
        that take longer are given up.
    estimate_links: called if the links were not measured in time.
    on_step: called as on_step(done, total) after each link and part.
    Raises the errors of `profiler` and of sessions.
    """
    until = time.monotonic() + seconds
    world_size, secret = len(devices.addresses), secrets.token_bytes(SECRET_BYTES)
    cache = Remembered(profiler.cache)
    known_times = known_times or {}
    known = [
        DeviceTiming(known_times[address]) if address in known_times else _known(cache, profiler, rank)
        for rank, address in enumerate(devices.addresses)
    ]
    needs_timing = [
        address not in known_times and (fresh or before is None)
        for address, before in zip(devices.addresses, known, strict=True)
    ]
    steps = profiler.steps * needs_timing.count(True) + world_size * (world_size - 1) // 2
    locks = host_locks(devices.profiles)
    waiting = [locks[rank] for rank, needed in enumerate(needs_timing) if needed and rank]  # one entry a device
    done: list[None] = []
    timings: dict[int, DeviceTiming[T]] = {}
    measured_links: list[Links] = []

    def left_s() -> float:
        """Return the seconds for further measurements."""
        return max(0.0, until - MARGIN * seconds - time.monotonic()) if seconds < math.inf else math.inf

    def step() -> None:
        closing.check()  # raises an error after cancellation, even if no progress is shown
        done.append(None)
        on_step(len(done), steps)

    def start(rank: int) -> EngineSession:
        session: EngineSession
        worker = devices.workers[rank]
        if worker is None:
            name, credentials = devices.local_name, devices.credentials
            session = LocalSession(name, world_size, secret, credentials, devices.threads, streams=profiler.streams)
        else:
            session = RemoteSession(worker, rank, world_size, secret, streams=profiler.streams)
        closing.then(session.close)
        return session

    def take(session: EngineSession) -> None:
        rank = session.rank
        if not needs_timing[rank]:
            return
        with locks[rank]:
            if rank == 0:
                most_s = min(left_s(), OWN_PART * seconds) if waiting else left_s()
            else:  # devices that wait for this one have equal parts of the time that is left
                most_s = left_s() / waiting.count(locks[rank])
                waiting.remove(locks[rank])
            times = profiler.time(session, step, most_s)
        timings[rank] = _better_timing(profiler, rank, times, known[rank])

    def measure() -> None:
        with unwaited_pool(world_size, "survey") as pool:
            sessions = results(pool.submit(start, rank) for rank in range(world_size))
            states = connect_all(sessions, transport)
            most_s = min(left_s(), LINKS_PART * seconds)
            measured_links.append(measure_links(sessions, devices.addresses, states, step, fresh=fresh, seconds=most_s))
            # This device distributes the work, and a lab emulates devices on its cores. So it is measured alone.
            results([pool.submit(take, sessions[0])])
            results(pool.submit(take, session) for session in sessions[1:])

    with unwaited_pool(1, "whole survey") as pool:
        whole = pool.submit(measure)
        wait([whole], max(0.0, until - time.monotonic()) if seconds < math.inf else None)
        if whole.done():
            whole.result()
    all_timings = [
        timings.get(rank) or before or DeviceTiming(profiler.so_far(rank)) for rank, before in enumerate(known)
    ]
    return all_timings, measured_links[0] if measured_links else estimate_links()


def host_locks(profiles: Sequence[DeviceProfile]) -> list[Lock]:
    """Return the locks to hold while a device is timed, by rank.

    Devices of one machine share a lock, because they would compete for its cores.
    """
    locks: dict[str, Lock] = {}
    return [locks.setdefault(profile.host, Lock()) if profile.host else Lock() for profile in profiles]


def host_of(profile: DeviceProfile, threads: int | None = None) -> Host | None:
    """Return the machine of a device. threads: the device's number of threads; None: its default."""
    if profile.host is None:
        return None
    return Host(profile.host, profile.cpu_quota or profile.cores_physical, threads or profile.threads)


def better(new: T, old: T | None) -> T:
    """Return the better of two measurements of a device: the new one, unless it was busy and the old one is faster."""
    return new if old is None or not new.busy or new.seconds <= old.seconds else old


def own_profile(name: str, threads: int) -> DeviceProfile:
    """Return this device's profile, as a worker would describe it."""
    return own_kind().describe(name, threads=threads)


def _known(cache: Remembered, profiler: Profiler[T], rank: int) -> DeviceTiming[T] | None:
    """Return the cached times of a device, or None if it must be measured."""
    remembered = cache.get(profiler.keys[rank], KEPT_AGE_S)
    times = None if remembered is None else profiler.read(rank, remembered[0])
    return None if remembered is None or times is None else DeviceTiming(times, remembered[1])


def _better_timing(profiler: Profiler[T], rank: int, new: T, before: DeviceTiming[T] | None) -> DeviceTiming[T]:
    """Cache and return the better of two measurements of a device. A busy one does not replace a faster quiet one."""
    if before is not None and (new.estimate or better(new, before.times) is before.times):
        return before
    if not new.estimate:
        Remembered(profiler.cache).put(profiler.keys[rank], profiler.to_json(new))
    return DeviceTiming(new)
