"""Profile devices while a model runs and no request is active: devices that join, and estimated devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TypeVar

from devices.cluster_file import Cluster
from devices.probe import MEMORY_SHARE, available_memory
from edge.cluster.fleet import MAX_WORKERS, Fleet, device
from edge.errors import EdgeError, Interrupted
from edge.profiling.layer_times import largest_bytes
from edge.profiling.llm_survey import llm_survey
from edge.profiling.profile import reachable
from edge.profiling.survey import Survey
from edge.tasks import CancelScope, Progress
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL
from partition.predict.presets import RUNTIME_BYTES
from partition.predict.speeds import DeviceSpeed, Links

TRIES = 3  # attempts to measure a device; more would only disturb the others
_POLL_S = 0.05  # interval of the checks whether the measurement may continue

T = TypeVar("T")

FindWorkers = Callable[[], Sequence[str]]  # returns the addresses of all workers that could take part now


@dataclass(frozen=True)
class JoinedDevice:
    """Device that joined and was measured."""

    address: str  # address in the form of `device`
    name: str  # display name
    survey: Survey[DeviceSpeed]  # previous survey extended by this device


class JoiningDevices:
    """Finds devices that are not in the survey yet, and measures them."""

    def __init__(
        self, find: FindWorkers, file: ModelFile, model_digest: str, transport: str, *, insecure: bool
    ) -> None:
        """Prepare the search.

        find: returns the addresses of the available workers.
        file: model for the measurements.
        transport: transport of links.
        insecure: allow workers without encryption.
        """
        self._find, self._file, self._digest = find, file, model_digest
        self._transport, self._insecure = transport, insecure
        self._tries: Counter[str] = Counter()  # failed attempts by address

    def measured(self, known: Survey[DeviceSpeed], check: Progress) -> JoinedDevice | None:
        """Measure one unknown device that answers. Return None if there is no measurable device.

        check: called often. Its error ends the measurement promptly, and does not count as a failed attempt. A device
        is not tried again after TRIES failures.
        """
        before = [device(speed.device) for speed in known.speeds]
        for address in dict.fromkeys(map(device, self._find())):
            check(0, 0)
            if address in before or self._tries[address] >= TRIES or len(before) > MAX_WORKERS:
                continue
            try:
                joined = self._measured(address, known, check)
            except Interrupted:
                raise
            except EdgeError:
                joined = None
            if joined is not None:
                return joined
            self._tries[address] += 1
        return None

    def _measured(self, address: str, known: Survey[DeviceSpeed], check: Progress) -> JoinedDevice | None:
        addresses = [other for speed in known.speeds if (other := device(speed.device)) != LOCAL]
        with reachable(Cluster.of_addresses([address]), insecure=self._insecure) as (alone, _):
            if alone is None:
                return None
        check(0, 0)
        with reachable(Cluster.of_addresses([*addresses, address]), insecure=self._insecure) as (fleet, _):
            if fleet is None or address not in fleet.workers or _is_known(fleet, address):
                return None
            survey = _while_allowed(
                lambda scope: llm_survey(
                    fleet, self._file, self._digest,
                    transport=self._transport, known=known, scope=scope,
                ),
                check,
            )  # fmt: skip
            return JoinedDevice(address, fleet.workers[address].label, survey)


class EstimatedDevices:
    """Measures the devices whose speeds were only estimated when the model started."""

    def __init__(
        self, file: ModelFile, model_digest: str, transport: str, *, insecure: bool, memory: int | None = None
    ) -> None:
        """memory: limit of this device in bytes. The other parameters are those of `JoiningDevices`."""
        self._file, self._digest, self._transport, self._insecure = file, model_digest, transport, insecure
        self._memory = {LOCAL: memory} if memory else {}
        self._tries = 0

    def are_left(self, known: Survey[DeviceSpeed]) -> bool:
        """Return True if devices were only estimated, memory is free to measure them, and it has not failed often."""
        has_room = available_memory() > MEMORY_SHARE * largest_bytes(self._file)
        return self._tries < TRIES and has_room and has_estimates(known.speeds)

    def measured(self, known: Survey[DeviceSpeed], check: Progress) -> Survey[DeviceSpeed]:
        """Measure these devices, and the links between all devices. Return the survey with the new figures.

        check: called often. Its error ends the measurement promptly, and does not count as a failed attempt. Devices
        that were measured before are remembered, so the next attempt only measures the others.
        Raises EdgeError if measuring fails.
        """
        names = {device(speed.device): speed.device for speed in known.speeds}
        workers = [address for address in names if address != LOCAL]
        others = tuple(replace(speed, device=device(speed.device)) for speed in known.speeds if not speed.estimate)
        threads = {device(speed.device): speed.threads for speed in known.speeds if speed.threads}
        self._tries += 1
        try:
            with reachable(Cluster.of_addresses(workers), insecure=self._insecure) as (fleet, _):
                check(0, 0)
                survey = _while_allowed(
                    lambda scope: llm_survey(
                        fleet, self._file, self._digest, threads=threads, memory=self._memory,
                        transport=self._transport, known=Survey(others, Links()), scope=scope,
                    ),
                    check,
                )  # fmt: skip
        except Interrupted:
            self._tries -= 1
            raise
        measured = {speed.device: speed for speed in survey.speeds}
        speeds = tuple(
            _measured_like(speed, measured[address])
            if speed.estimate and (address := device(speed.device)) in measured
            else speed
            for speed in known.speeds
        )
        links = {(names[a], names[b]): way for (a, b), way in survey.links.between.items() if not way.estimate}
        return Survey(speeds, Links({**known.links.between, **links}))


def _measured_like(estimate: DeviceSpeed, speed: DeviceSpeed) -> DeviceSpeed:
    """Return a measured speed with the name and the memory of the estimate, of which a part may be reserved."""
    reserved = max(0, estimate.runtime_bytes - RUNTIME_BYTES)
    return replace(
        speed,
        device=estimate.device,
        name=estimate.name,
        memory_bytes=estimate.memory_bytes,
        runtime_bytes=speed.runtime_bytes + reserved,
        watts=estimate.watts,
    )


def has_estimates(speeds: Iterable[DeviceSpeed]) -> bool:
    """Return True if devices that are there were only estimated."""
    return any(speed.estimate and not speed.preset for speed in speeds)


def _is_known(fleet: Fleet, address: str) -> bool:
    """Return whether a secure device already takes part under another address. Names in a cluster are unique."""
    new = fleet.workers[address]
    others = (worker for other, worker in fleet.workers.items() if other != address)
    return new.secure and any(new.name == worker.name for worker in others)


def _while_allowed(work: Callable[[CancelScope], T], check: Progress) -> T:
    """Return the result of `work`. If `check` raises an error meanwhile, cancel the work and raise the error."""
    pool = ThreadPoolExecutor(1, "joining")
    try:
        with CancelScope() as scope:
            done: Future[T] = pool.submit(work, scope)
            while not done.done():
                wait([done], timeout=_POLL_S)
                check(0, 0)
        return done.result()
    finally:
        pool.shutdown(wait=False)
