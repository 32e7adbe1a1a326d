"""Profiles that plans go by: times of each device for a model's parts, and the links between them.

What is timed differs between a language model and a network in ONNX: `Timing` is what each of them has to say.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from devices.probe import available_memory, default_threads
from devices.profile import DeviceProfile, describe
from devices.remembered import BUSY_AGE_S, Remembered
from edge.cluster.client import Remote
from edge.cluster.fleet import Fleet
from edge.cluster.session import EngineSession, LocalSession, RemoteSession, connect_all
from edge.net.peers import SECRET_BYTES
from edge.survey.links import measure_links
from edge.tasks import CancelScope, Progress, results
from edge.version import version
from partition.plan.plan import LOCAL
from partition.predict.hosts import Host
from partition.predict.onnx_predict import OnnxDevice
from partition.predict.speeds import DeviceSpeed, Links

OWN_TRIES = 1  # more for this device, after the workers, while it is busy
QUIET_AGE_S = 30 * 86400.0  # what a quiet moment gave bounds what a busy device can do

Speed = TypeVar("Speed", DeviceSpeed, OnnxDevice)


@dataclass(frozen=True)
class Survey(Generic[Speed]):
    """Speeds of devices and links, as measured."""

    speeds: tuple[Speed, ...]  # this device first, then in the order of addresses
    links: Links
    estimated: tuple[str, ...] = ()  # parts of the model that some device could not be timed with: estimates


class Devices:
    """This device, which is rank 0, and the workers that take part, by rank."""

    def __init__(self, fleet: Fleet | None, addresses: Sequence[str], threads: int | None) -> None:
        """fleet: where they are connected; None: there are none. threads: of this device; None: what it lends."""
        self.addresses = (LOCAL, *addresses) if fleet else (LOCAL,)  # as in a plan
        self.workers: list[Remote | None] = [None]
        self.names = ["this device"]  # for people
        self.memory_bytes = [available_memory()]  # that a model may take there
        self.local_name, self.credentials = (fleet.local_name, fleet.credentials) if fleet else (LOCAL, None)
        self.threads = threads or default_threads()
        self.profiles = [own_profile(self.local_name, self.threads)]
        for address in addresses if fleet else ():
            assert fleet is not None
            self.workers.append(fleet.workers[address])
            self.names.append(fleet.workers[address].label)
            self.memory_bytes.append(fleet.memory_of(address))
            self.profiles.append(fleet.profiles[address])


class TimedResult(Protocol):
    """Times of a model's parts on a device."""

    @property
    def seconds(self) -> float:
        """That tell which of two measurements is the faster."""

    @property
    def busy(self) -> bool:
        """Whether something else kept the device busy meanwhile."""


T = TypeVar("T", bound=TimedResult)


@dataclass(frozen=True)
class DeviceTiming(Generic[T]):
    """The times of one device, and how far they are to be trusted."""

    times: T
    age_s: float = 0.0  # since they were measured
    quiet_s: float | None = None  # `seconds` of the last quiet moment that is remembered; None: there is none


class Timing(Protocol[T]):
    """The parts of one kind of model that are timed, and how that is remembered."""

    cache: str  # the name of the file
    keys: Sequence[str]  # what times depend on, by rank
    steps: int  # how often `time` calls back
    streams: bool  # what links are for (`transport.tcp_link.tune`)

    def send(self, worker: Remote, check: Progress) -> None:
        """Send a worker what it needs before its session starts. check: called on the way."""

    def time(self, session: EngineSession, on_step: Callable[[], None]) -> T:
        """Measure one device."""

    def to_json(self, taken: T) -> Any:
        """Plain values to be remembered."""

    def read(self, rank: int, values: Any) -> T | None:
        """Read the values that `to_json` wrote; None for anything else, such as another version's."""


def survey(
    devices: Devices,
    timing: Timing[T],
    closing: CancelScope,
    *,
    transport: str = "auto",
    fresh: bool = False,
    given: Mapping[str, T] | None = None,
    on_step: Progress = lambda done, of: None,
) -> tuple[list[DeviceTiming[T]], Links]:
    """Measure the links, this device, and then all workers at once, those of one machine one by one: what each takes.
    This device is measured again after the workers while it is busy, as all plans are compared with it alone. closing:
    ends the sessions; who still waits for one then hears that it was closed.

    A device's times are remembered for a day, but where it was busy only for a minute; fresh: measure them anyway. What
    was measured of a busy device does not replace what a quiet moment of the same day gave.
    given: times by address, of devices that are not to be timed.
    on_step(done, of) is called as links and parts are done. The errors of `timing` and of sessions.
    """
    world_size, secret = len(devices.addresses), secrets.token_bytes(SECRET_BYTES)
    cache = Remembered(timing.cache)
    given = given or {}
    known = [
        DeviceTiming(given[address]) if address in given else _known(cache, timing, rank)
        for rank, address in enumerate(devices.addresses)
    ]
    wanting = [
        address not in given and (fresh or one is None or (one.times.busy and one.age_s > BUSY_AGE_S))
        for address, one in zip(devices.addresses, known, strict=True)
    ]
    steps = timing.steps * wanting.count(True) + world_size * (world_size - 1) // 2
    turn = turns(devices.profiles)
    done: list[None] = []

    def step() -> None:
        closing.check()  # nobody shows progress any more
        done.append(None)
        on_step(len(done), steps)

    def start(rank: int) -> EngineSession:
        session: EngineSession
        worker = devices.workers[rank]
        if worker is None:
            name, credentials = devices.local_name, devices.credentials
            session = LocalSession(name, world_size, secret, credentials, devices.threads, streams=timing.streams)
        else:
            if wanting[rank]:
                timing.send(worker, closing.check)
            closing.check()
            session = RemoteSession(worker, rank, world_size, secret, streams=timing.streams)
        closing.then(session.close)
        return session

    def take(session: EngineSession, on_step: Callable[[], None] = step) -> DeviceTiming[T]:
        rank = session.rank
        before = known[rank]
        if before is not None and not wanting[rank]:
            return before
        with turn[rank]:
            times = timing.time(session, on_step)
        known[rank] = kept = _kept(timing, rank, times, before)
        return kept

    pool = ThreadPoolExecutor(world_size, "survey")
    try:
        sessions = results(pool.submit(start, rank) for rank in range(world_size))
        states = connect_all(sessions, transport)
        links = measure_links(sessions, devices.addresses, states, step, fresh=fresh)
        # This device hands out the work, and a lab emulates devices on a part of it: it is measured alone.
        own = results([pool.submit(take, sessions[0])])
        others = results(pool.submit(take, session) for session in sessions[1:])
        for _ in range(OWN_TRIES if wanting[0] and others else 0):
            if own[0].times.busy:
                own = results([pool.submit(take, sessions[0], closing.check)])
        return [*own, *others], links
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def turns(profiles: Sequence[DeviceProfile]) -> list[Lock]:
    """Locks to hold while a device is timed, by rank. Those of one machine have the same one: at once they would share
    its cores."""
    locks: dict[str, Lock] = {}
    return [locks.setdefault(profile.host, Lock()) if profile.host else Lock() for profile in profiles]


def host_of(profile: DeviceProfile, threads: int | None = None) -> Host | None:
    """The machine that a device is on. threads: that it computes with; None: as many as it lends."""
    if profile.host is None:
        return None
    return Host(profile.host, profile.cpu_quota or profile.cores_physical, threads or profile.threads)


def better(new: T, old: T | None) -> T:
    """The better of two measurements of a device: the new one, but where it was busy and the old one is faster."""
    return new if old is None or not new.busy or new.seconds <= old.seconds else old


def own_profile(name: str, threads: int) -> DeviceProfile:
    """This device as a worker would describe it."""
    return describe(name, threads=threads, runtime=version("edge-runtime"), llama_cpp=version("llama-cpp-python"))


def _known(cache: Remembered, timing: Timing[T], rank: int) -> DeviceTiming[T] | None:
    """Return the remembered times of a device; None where it has to be measured."""
    remembered = cache.get(timing.keys[rank])
    times = None if remembered is None else timing.read(rank, remembered[0])
    if remembered is None or times is None:
        return None
    return DeviceTiming(times, remembered[1], times.seconds if not times.busy else _quiet_s(timing, rank))


def _kept(timing: Timing[T], rank: int, new: T, before: DeviceTiming[T] | None) -> DeviceTiming[T]:
    """The better of two measurements of a device, remembered. A busy moment is not remembered in place of a quiet one
    that was faster."""
    if not new.busy:
        _quiet(timing).put(timing.keys[rank], new.seconds)
    kept = better(new, before.times if before else None)
    if before is not None and kept is before.times and not kept.busy:
        return before
    Remembered(timing.cache).put(timing.keys[rank], timing.to_json(kept))
    return DeviceTiming(kept, 0.0, _quiet_s(timing, rank))


def _quiet(timing: Timing[Any]) -> Remembered:
    """Seconds of devices in their last quiet moments."""
    return Remembered(f"quiet-{timing.cache}")


def _quiet_s(timing: Timing[Any], rank: int) -> float | None:
    remembered = _quiet(timing).get(timing.keys[rank], QUIET_AGE_S)
    seconds = remembered[0] if remembered else None
    return seconds if isinstance(seconds, float) and seconds > 0 else None
