"""What plans go by, measured: what each device takes for a model's parts, and what the links between them do.

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

Speed = TypeVar("Speed", DeviceSpeed, OnnxDevice)


@dataclass(frozen=True)
class Survey(Generic[Speed]):
    """What was measured."""

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


class Taken(Protocol):
    """What a model's parts take on a device."""

    @property
    def seconds(self) -> float:
        """That tell which of two measurements is the faster."""

    @property
    def busy(self) -> bool:
        """Whether something else kept the device busy meanwhile."""


T = TypeVar("T", bound=Taken)


class Timing(Protocol[T]):
    """What is timed of one kind of model, and how that is remembered."""

    cache: str  # the name of the file
    keys: Sequence[str]  # what times depend on, by rank
    steps: int  # how often `time` calls back
    streams: bool  # what links are for (`transport.tcp_link.tune`)

    def send(self, worker: Remote, check: Progress) -> None:
        """What a worker needs before its session starts. check: called on the way."""

    def time(self, session: EngineSession, on_step: Callable[[], None]) -> T:
        """Measure one device."""

    def to_json(self, taken: T) -> Any:
        """Plain values to be remembered."""

    def read(self, rank: int, values: Any) -> T | None:
        """What `to_json` wrote; None for anything else, such as another version's."""


def survey(
    devices: Devices,
    timing: Timing[T],
    closing: CancelScope,
    *,
    transport: str = "auto",
    fresh: bool = False,
    given: Mapping[str, T] | None = None,
    on_step: Progress = lambda done, of: None,
) -> tuple[list[tuple[T, float]], Links]:
    """Measure the links, this device, and then all workers at once, those of one machine one by one: what each takes,
    and for how many seconds that is known. closing: ends the sessions; who still waits for one then hears that it was
    closed.

    A device's times are remembered for a day, but where it was busy only for a minute; fresh: measure them anyway.
    given: times by address, of devices that are not to be timed.
    on_step(done, of) is called as links and parts are done. The errors of `timing` and of sessions.
    """
    world_size, secret = len(devices.addresses), secrets.token_bytes(SECRET_BYTES)
    cache = Remembered(timing.cache)
    given = given or {}
    known = [
        (given[address], 0.0) if address in given else None if fresh else _known(cache, timing, rank)
        for rank, address in enumerate(devices.addresses)
    ]
    wanting = [
        address not in given and (one is None or (one[0].busy and one[1] > BUSY_AGE_S))
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

    def take(session: EngineSession) -> tuple[T, float]:
        rank = session.rank
        before = known[rank]
        if before is not None and not wanting[rank]:
            return before
        with turn[rank]:
            taken = better(timing.time(session, step), before[0] if before else None)
        cache.put(timing.keys[rank], timing.to_json(taken))
        return taken, 0.0

    pool = ThreadPoolExecutor(world_size, "survey")
    try:
        sessions = results(pool.submit(start, rank) for rank in range(world_size))
        states = connect_all(sessions, transport)
        links = measure_links(sessions, devices.addresses, states, step, fresh=fresh)
        # This device hands out the work, and a lab emulates devices on a part of it: it is measured alone.
        own = results([pool.submit(take, sessions[0])])
        return [*own, *results(pool.submit(take, session) for session in sessions[1:])], links
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
    """Of two measurements of a device, the one to keep: the new one, but where it was busy and the old one is faster.
    old: was busy, too."""
    return new if old is None or not new.busy or new.seconds <= old.seconds else old


def own_profile(name: str, threads: int) -> DeviceProfile:
    """This device as a worker would describe it."""
    return describe(name, threads=threads, runtime=version("edge-runtime"), llama_cpp=version("llama-cpp-python"))


def _known(cache: Remembered, timing: Timing[T], rank: int) -> tuple[T, float] | None:
    """What a device is remembered to take, and for how long; None where it has to be measured."""
    remembered = cache.get(timing.keys[rank])
    taken = None if remembered is None else timing.read(rank, remembered[0])
    return None if remembered is None or taken is None else (taken, remembered[1])
