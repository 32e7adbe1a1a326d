"""Profiling for plans of a language model: measured times of its parts on each device, and estimates for presets.

Timed layers have the model's real shape and types, but made-up weights. Every device creates such a slice locally, so
no weights of the model cross the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from devices.catalog import CATALOG
from devices.cluster_file import Cluster, ClusterDevice
from devices.probe import own_rss
from devices.remembered import key_of
from edge.cluster.client import Remote
from edge.cluster.fleet import Fleet
from edge.cluster.session import EngineSession
from edge.parallel.engine_kinds import own_kind
from edge.profiling.layer_times import device_speed, probes, timed
from edge.profiling.profile import ClusterProfile, profiled, with_links
from edge.profiling.survey import Devices, Survey, host_of, survey
from edge.tasks import CancelScope, Progress
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL
from partition.predict.presets import PartSizes, preset_speed
from partition.predict.speeds import DeviceSpeed, Links, speed_of, speed_to_json

REMEMBERED = "speeds"  # name of the cached measurements
# CPU time of a core for an all-reduce: system calls, Python and adding, with caches full of the last layer's weights.
# Measured on two devices: 50 us if a rank polls, 95 if a CPU quota forbids that. Slow devices take proportionally
# longer.
SUM_CPU_S = 90e-6
AMPLE = 1.5  # factor over a model's file size that covers weights, KV cache and buffers, except for very long contexts
# Part of a device's memory limit for processes: this process or the daemon, and an engine process without weights.
PROBE_BYTES = 250 << 20
_GROWTH_BYTES = 24 << 20  # memory that this process may allocate while another one measures
NO_OVERRIDES: Mapping[str, int] = MappingProxyType({})


def llm_survey(
    fleet: Fleet | None,
    file: ModelFile,
    model_digest: str,
    *,
    threads: Mapping[str, int] = NO_OVERRIDES,
    memory: Mapping[str, int] = NO_OVERRIDES,
    transport: str = "auto",
    fresh: bool = False,
    known: Survey[DeviceSpeed] | None = None,
    scope: CancelScope | None = None,
    on_step: Progress = lambda done, total: None,
) -> Survey[DeviceSpeed]:
    """Measure this device and the workers, as `survey` does.

    fleet: connection to the workers; None: no workers.
    threads: number of threads by address, for devices that do not use their default.
    memory: memory limit in bytes by address, for devices that offer more.
    known: survey of devices that are not timed again, including this device. Its values stay, even for disconnected
    devices.
    scope: closing it ends the measurement.
    Raises CannotSlice if the model has no layers to time, and errors of sessions.
    """
    devices = Devices(fleet, threads.get(LOCAL))
    known_times = {speed.device: speed for speed in known.speeds} if known else {}
    with CancelScope() if scope is None else nullcontext(scope) as closing:
        profiler = _LayerProfiler(devices, file, model_digest, threads, memory, closing)
        timings, links = survey(
            devices, profiler, closing, transport=transport, fresh=fresh, known_times=known_times, on_step=on_step
        )
    speeds = []
    for rank, timing in enumerate(timings):
        speed = timing.times
        n_threads, profile = threads.get(devices.addresses[rank]), devices.profiles[rank]
        room, key, host = profiler.rooms[rank], profiler.keys[rank], host_of(profile, n_threads)
        if speed.device in known_times:
            continue
        speeds.append(
            replace(
                speed, memory_bytes=room, threads=n_threads, key=key, age_s=timing.age_s, quiet_s=timing.quiet_s,
                host=host,
            )
        )  # fmt: skip
    if known is None:
        return Survey(tuple(_with_sums(speeds)), links)
    speeds = [*known.speeds, *speeds]
    # Disconnected devices have no measured link to joined ones, so a link is assumed until the next measurement.
    both = with_links(Cluster(()), [speed.device for speed in speeds], Links({**links.between, **known.links.between}))
    return Survey(tuple(_with_sums(speeds)), both)


class _LayerProfiler:
    """Profiler of the layers and the head of a model."""

    cache, streams = REMEMBERED, False

    def __init__(
        self,
        devices: Devices,
        file: ModelFile,
        model_digest: str,
        threads: Mapping[str, int],
        memory: Mapping[str, int],
        closing: CancelScope,
    ) -> None:
        addresses = devices.addresses
        self._devices, self._file, self._threads, self._memory = devices, file, threads, memory.get(LOCAL)
        limits_or_none = [self._memory, *(profile.memory_limit_bytes for profile in devices.profiles[1:])]
        limited = [limit for limit in limits_or_none if limit is not None]  # bytes for all processes of a device
        self._slices, self._n = probes(file, model_digest, closing, min(limited) - PROBE_BYTES if limited else None)
        self.steps = len(self._slices)
        self.rooms = [
            min(room, memory.get(address, room)) for room, address in zip(devices.memory_bytes, addresses, strict=True)
        ]
        self._pages = [room < AMPLE * file.size_bytes for room in self.rooms]  # True: the device may have to page
        # The missing part of the model empties caches between steps, so times depend on its size.
        timed_parts = [f"{probe.digest} {probe.other_bytes}" for probe in self._slices.values()]
        self.keys: Sequence[str] = [
            key_of([*timed_parts, str(threads.get(address)), str(pages)], profile)
            for address, pages, profile in zip(addresses, self._pages, devices.profiles, strict=True)
        ]

    def send(self, worker: Remote, check: Progress) -> None:
        for probe in self._slices.values():
            worker.send_slice(probe.recipe, self._file.path, probe.digest, check)

    def time(self, session: EngineSession, on_step: Callable[[], None]) -> DeviceSpeed:
        rank = session.rank
        address, own = self._devices.addresses[rank], self._memory if rank == 0 else None
        left = None if own is None else max(1, own - own_rss() - _GROWTH_BYTES)
        times = timed(
            session, self._slices, self._n, on_step,
            threads=self._threads.get(address), disk=self._pages[rank], memory=left,
        )  # fmt: skip
        return device_speed(times, address, self._devices.names[rank], self.rooms[rank])

    def to_json(self, times: DeviceSpeed) -> Any:
        return speed_to_json(times)

    def read(self, rank: int, values: Any) -> DeviceSpeed | None:
        try:
            return speed_of(values, self._devices.addresses[rank], self._devices.names[rank], 0.0)
        except PlanError:
            return None


def _with_sums(speeds: Sequence[DeviceSpeed]) -> list[DeviceSpeed]:
    """Set the time of an all-reduce on each CPU: known for the fastest one, and proportionally longer on others."""
    slowness = own_kind().slowness([speed.seconds for speed in speeds])
    return [replace(speed, sum_s=SUM_CPU_S * times) for speed, times in zip(speeds, slowness, strict=True)]


def llm_speeds(
    cluster: Cluster,
    fleet: Fleet | None,
    notes: Sequence[str],
    file: ModelFile,
    model_digest: str,
    *,
    threads: int | None = None,
    memory: int | None = None,
    transport: str = "auto",
    fresh: bool = False,
    on_step: Progress = lambda done, total: None,
) -> ClusterProfile[DeviceSpeed]:
    """Profile a cluster for a language model. If all devices are presets, nothing is measured.

    threads, memory (bytes): maximum for this device.
    Raises the errors of `llm_survey`.
    """
    threads_by_address = {
        device.address: device.threads for device in cluster.devices if device.address and device.threads
    }
    # A preset that replaces this device does not limit the memory for measuring this device.
    real_devices = [device for device in cluster.devices if device.preset is None]
    rooms = {real.address: real.memory_bytes for real in real_devices if real.address and real.memory_bytes}
    if fleet is None and cluster.local is not None and cluster.local.preset is not None:
        return profiled(cluster, Survey((), Links()), lambda device: estimated(device, file), notes)
    measurement = llm_survey(
        fleet,
        file,
        model_digest,
        threads=threads_by_address | ({LOCAL: threads} if threads else {}),
        memory=rooms | ({LOCAL: min(memory, rooms.get(LOCAL, memory))} if memory else {}),
        transport=transport,
        fresh=fresh,
        on_step=on_step,
    )
    return profiled(cluster, measurement, lambda device: estimated(device, file), notes)


def estimated(device: ClusterDevice, file: ModelFile) -> DeviceSpeed:
    """Estimate a preset's speed, as `preset_speed` does."""
    assert device.preset is not None
    return preset_speed(CATALOG[device.preset], PartSizes.from_file(file), device.address or device.name, device.name)
