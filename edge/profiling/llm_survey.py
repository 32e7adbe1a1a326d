"""Profiling for plans of a language model: measured times of its parts on each device, and estimates for presets.

Timed layers have the model's real shape and types, but made-up weights. Every device creates such a slice locally, so
no weights of the model cross the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

from devices.catalog import CATALOG
from devices.cluster_file import Cluster, ClusterDevice
from devices.probe import own_rss
from devices.remembered import KEPT_AGE_S, Remembered, key_of
from edge.cluster.fleet import Fleet
from edge.cluster.session import EngineSession
from edge.llm.options import DEFAULT_BATCH, MAX_GPU_LAYERS
from edge.parallel.engine_kinds import own_kind
from edge.profiling.estimate import estimated_speed
from edge.profiling.layer_times import LayerProbe, LayerTimes, Probes, cuts_to_time, device_speed, other_bytes, timed
from edge.profiling.links import estimated_links
from edge.profiling.profile import ClusterProfile, profiled, with_links
from edge.profiling.survey import Devices, Survey, host_of, survey
from edge.tasks import CancelScope, Progress
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL, Slice
from partition.predict.hysteresis import GPU_LAYERS, clearly_better
from partition.predict.presets import PartSizes, preset_speed
from partition.predict.residency import fixed_bytes
from partition.predict.speeds import DeviceSpeed, Links, speed_of, speed_to_json
from partition.slices.gguf_slice import blank_recipe, limits
from quant.text import listed

REMEMBERED = "speeds"  # name of the cached measurements
# CPU time of a core for an all-reduce: system calls, Python and adding, with caches full of the last layer's weights.
# Measured on two devices: 50 us if a rank polls, 95 if a CPU quota forbids that. Slow devices take proportionally
# longer.
SUM_CPU_S = 90e-6
AMPLE = 1.5  # factor over a model's file size that covers weights, KV cache and buffers, except for very long contexts
# Part of a device's memory limit for processes: this process or the daemon, and an engine process without weights.
PROBE_BYTES = 250 << 20
_GROWTH_BYTES = 24 << 20  # memory that this process may allocate while another one measures
GPU_PART = 0.7  # part of a device's time for its GPU, if its processor is timed, too
_MOST_BUSY_FACTOR = 2.5  # a device whose layers were timed while it was busy is not faster or slower by more
_ESTIMATED_DISK = 200e6  # bytes per second of a disk that was not measured; a microSD card reads half as fast
_ANY_DIGEST = "0" * 64  # slices with made-up weights do not depend on the model's digest
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
    seconds: float = math.inf,
    scope: CancelScope | None = None,
    on_step: Progress = lambda done, total: None,
) -> Survey[DeviceSpeed]:
    """Measure this device and the workers, as `survey` does.

    fleet: connection to the workers; None: no workers.
    threads: number of threads by address, for devices that do not use their default.
    memory: memory limit in bytes by address, for devices that offer more.
    known: survey of devices that are not timed again, including this device. Its values stay, even for disconnected
    devices.
    seconds: as for `survey`.
    scope: closing it ends the measurement.
    Raises CannotSlice if the model has no layers to time, and errors of sessions.
    """
    devices = Devices(fleet, threads.get(LOCAL))
    known_times = {speed.device: speed for speed in known.speeds} if known else {}
    with CancelScope() if scope is None else nullcontext(scope) as closing:
        profiler = _LayerProfiler(devices, file, model_digest, threads, memory, closing)
        timings, links = survey(
            devices, profiler, closing, transport=transport, fresh=fresh, known_times=known_times, seconds=seconds,
            estimate_links=partial(estimated_links, fleet) if fleet else Links, on_step=on_step,
        )  # fmt: skip
    speeds = [
        profiler.described(rank, replace(timing.times, age_s=timing.age_s))
        for rank, timing in enumerate(timings)
        if timing.times.device not in known_times
    ]
    if known is None:
        return Survey(tuple(with_sums(speeds)), links)
    speeds = [*known.speeds, *speeds]
    # Disconnected devices have no measured link to joined ones, so a link is assumed until the next measurement.
    both = with_links(Cluster(()), [speed.device for speed in speeds], Links({**links.between, **known.links.between}))
    return Survey(tuple(with_sums(speeds)), both)


class Estimator:
    """Estimates of this device and the workers. Nothing is started on the workers, so it takes a few calls to them."""

    def __init__(
        self,
        fleet: Fleet | None,
        threads: Mapping[str, int] = NO_OVERRIDES,
        memory: Mapping[str, int] = NO_OVERRIDES,
    ) -> None:
        """Estimate the links. threads, memory: as for `llm_survey`. Raises the errors of calls."""
        self._devices, self._threads, self._memory = Devices(fleet, threads.get(LOCAL)), threads, memory
        self._devices.profiles[0] = own_kind().measure_rates(self._devices.profiles[0])
        self._links = Links() if fleet is None else estimated_links(fleet)

    def survey(self, file: ModelFile, *, remembered: bool = True) -> Survey[DeviceSpeed]:
        """Return the speeds of all devices for a model. remembered: use measurements of the model, if there are any."""
        devices, sizes, speeds = self._devices, PartSizes.from_file(file), []
        with CancelScope() as closing:
            profiler = _LayerProfiler(devices, file, _ANY_DIGEST, self._threads, self._memory, closing)
        for rank, (address, profile) in enumerate(zip(devices.addresses, devices.profiles, strict=True)):
            speed = profiler.known_speed(rank) if remembered else None
            if speed is None:
                estimate = estimated_speed(profile, sizes, address, devices.names[rank], profiler.rooms[rank])
                speed = replace(estimate, disk_bytes_per_s=_ESTIMATED_DISK if profiler.pages[rank] else None)
            speeds.append(profiler.described(rank, speed, with_key=remembered))
        return Survey(tuple(with_sums(speeds)), self._links)


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
        self._digest, self._closing = model_digest, closing
        self._so_far: dict[int, LayerTimes] = {}  # times of unfinished measurements, by rank
        self.rooms = [
            min(room, memory.get(address, room)) for room, address in zip(devices.memory_bytes, addresses, strict=True)
        ]
        self.pages = [room < AMPLE * file.size_bytes for room in self.rooms]  # True: the device may have to page
        # True: the GPU may be too small for all layers, so the processor is timed, too.
        self.has_two_tiers = [0 < (p.gpu_free_bytes or 0) < AMPLE * file.size_bytes for p in devices.profiles]

    @cached_property
    def _cut(self) -> tuple[Mapping[str, Slice], int]:
        """The cuts of the slices to time, and n."""
        limits_or_none = [self._memory, *(profile.memory_limit_bytes for profile in self._devices.profiles[1:])]
        limited = [limit for limit in limits_or_none if limit is not None]  # bytes for all processes of a device
        return cuts_to_time(self._file, min(limited) - PROBE_BYTES if limited else None)

    @property
    def steps(self) -> int:
        """Number of slices."""
        return len(self._cut[0])

    @cached_property
    def keys(self) -> Sequence[str]:
        """Cache key by rank."""
        can = limits(self._file)
        # The missing part of the model empties caches between steps, so times depend on its size.
        timed_parts = [
            f"{blank_recipe(self._file, _ANY_DIGEST, cut).key} {other_bytes(can, cut)}" for cut in self._cut[0].values()
        ]
        return [
            key_of([*timed_parts, str(self._threads.get(address))], profile)
            for address, profile in zip(self._devices.addresses, self._devices.profiles, strict=True)
        ]

    @cached_property
    def probes(self) -> Probes:
        """Slices to time."""
        return Probes(self._file, self._digest, self._cut[0], self._closing)

    def described(self, rank: int, speed: DeviceSpeed, *, with_key: bool = True) -> DeviceSpeed:
        """Return a device's speed with the device's memory, threads and host. with_key: and the cache key."""
        n_threads = self._threads.get(self._devices.addresses[rank])
        profile, key = self._devices.profiles[rank], self.keys[rank] if with_key else ""
        shape, gpu = self._file.shape, speed.gpu if profile.gpu_free_bytes else None
        if gpu is not None and not clearly_better(gpu.seconds, speed.seconds, by=GPU_LAYERS):
            gpu = None  # weights in memory are about as fast
        if gpu is not None:
            fixed = fixed_bytes(DEFAULT_BATCH, max(shape.n_embd, *shape.n_ff))
            gpu = replace(gpu, memory_bytes=profile.gpu_free_bytes or 0, runtime_bytes=fixed)
        return replace(
            speed,
            gpu=gpu,
            memory_bytes=self.rooms[rank],
            threads=n_threads,
            key=key,
            host=host_of(profile, n_threads),
            shares_layers=profile.page_round_trip_s is None,
        )

    def known_speed(self, rank: int) -> DeviceSpeed | None:
        """Return the remembered speed of a device, or None if it was not measured."""
        remembered = Remembered(REMEMBERED).get(self.keys[rank], KEPT_AGE_S)
        speed = None if remembered is None else self.read(rank, remembered[0])
        return None if speed is None or remembered is None else replace(speed, age_s=remembered[1])

    def time(self, session: EngineSession, on_step: Callable[[], None], most_s: float) -> DeviceSpeed:
        rank = session.rank
        address, own = self._devices.addresses[rank], self._memory if rank == 0 else None
        left = None if own is None else max(1, own - own_rss() - _GROWTH_BYTES)
        both = self.has_two_tiers[rank]
        measure = partial(
            timed, session, n=self._cut[1], threads=self._threads.get(address), memory=left,
            send=partial(self._send, rank),
        )  # fmt: skip
        times = measure(
            self.probes, on_slice=on_step, disk=self.pages[rank], gpu_layers=MAX_GPU_LAYERS if both else None,
            most_s=GPU_PART * most_s if both and most_s < math.inf else most_s,
            on_times=partial(self._so_far.__setitem__, rank),
        )  # fmt: skip
        if both:
            slices = self.probes if most_s == math.inf else {"layers": self.probes["layers"]}
            on_processor = measure(slices, on_slice=self._closing.check, gpu_layers=0, most_s=(1 - GPU_PART) * most_s)
            return self._with_gpu(self._speed(rank, on_processor), self._speed(rank, times))
        return self._speed(rank, times)

    def _with_gpu(self, processor: DeviceSpeed, gpu: DeviceSpeed) -> DeviceSpeed:
        """Return the speed of a device with its GPU."""
        return replace(
            processor,
            estimate=gpu.estimate,
            busy=processor.busy or gpu.busy,
            disk_bytes_per_s=gpu.disk_bytes_per_s,
            gpu=replace(gpu, gpu=None, disk_bytes_per_s=None),
        )

    def _send(self, rank: int, probe: LayerProbe) -> None:
        worker = self._devices.workers[rank]
        if worker is not None:
            worker.send_slice(probe.recipe, self._file.path, probe.digest, self._closing.check)

    def so_far(self, rank: int) -> DeviceSpeed:
        times = self._so_far.get(rank)
        if times is not None and self.has_two_tiers[rank]:  # only the GPU was timed
            return self._with_gpu(self._speed(rank, None), self._speed(rank, times))
        return self._speed(rank, times)

    def _speed(self, rank: int, times: LayerTimes | None) -> DeviceSpeed:
        """Return the speed of a device by its times. Measured layers alone correct the estimate of everything else."""
        address, name, room = self._devices.addresses[rank], self._devices.names[rank], self.rooms[rank]
        profile = self._devices.profiles[rank]
        if times is not None and "head" in times.steps:
            return device_speed(times, address, name, room, profile.page_round_trip_s or 0.0)
        sizes = PartSizes.from_file(self._file)
        profile = own_kind().measure_rates(profile) if rank == 0 else profile
        disk = _ESTIMATED_DISK if self.pages[rank] else None
        estimate = replace(estimated_speed(profile, sizes, address, name, room), disk_bytes_per_s=disk)
        if times is None:
            return estimate
        factor = times.steps["layers"].at(1) / times.n / estimate.seconds
        if times.busy:  # all of these few samples may have waited for other work
            factor = min(max(factor, 1 / _MOST_BUSY_FACTOR), _MOST_BUSY_FACTOR)
        return replace(estimate.times(factor), busy=times.busy, disk_bytes_per_s=times.disk_bytes_per_s or disk)

    def to_json(self, times: DeviceSpeed) -> Any:
        return speed_to_json(times)

    def read(self, rank: int, values: Any) -> DeviceSpeed | None:
        try:
            speed = speed_of(values, self._devices.addresses[rank], self._devices.names[rank], 0.0)
        except PlanError:
            return None
        # The disk is measured only on devices that may have to page, and these change with the free memory.
        is_incomplete = self.pages[rank] and speed.disk_bytes_per_s is None
        return None if is_incomplete or (self.has_two_tiers[rank] and speed.gpu is None) else speed


def with_sums(speeds: Sequence[DeviceSpeed]) -> list[DeviceSpeed]:
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
    seconds: float = math.inf,
    on_step: Progress = lambda done, total: None,
) -> ClusterProfile[DeviceSpeed]:
    """Profile a cluster for a language model. If all devices are presets, nothing is measured.

    threads, memory (bytes): maximum for this device.
    seconds: time for measuring; 0: use remembered figures and estimates, by an `Estimator`.
    Raises the errors of `llm_survey`.
    """
    if fleet is None and cluster.local is not None and cluster.local.preset is not None:
        return profiled(cluster, Survey((), Links()), lambda device: estimated(device, file), notes)
    own_threads, rooms = overrides(cluster, threads, memory)
    if not seconds:
        measurement = Estimator(fleet, own_threads, rooms).survey(file)
    else:
        measurement = llm_survey(
            fleet, file, model_digest, threads=own_threads, memory=rooms,
            transport=transport, fresh=fresh, seconds=seconds, on_step=on_step,
        )  # fmt: skip
    late = [speed.name for speed in measurement.speeds if speed.estimate]
    if late and seconds:
        notes = [*notes, f"{listed(late)}: estimated in part, because measuring takes more than {seconds:g} s"]
    return profiled(cluster, measurement, lambda device: estimated(device, file), notes)


def overrides(cluster: Cluster, threads: int | None, memory: int | None) -> tuple[dict[str, int], dict[str, int]]:
    """Return the threads and the memory limits in bytes by address, as the cluster file and the user set them.

    threads, memory: the user's values for this device.
    """
    own_threads = {device.address: device.threads for device in cluster.devices if device.address and device.threads}
    # A preset that replaces this device does not limit the memory for measuring this device.
    real_devices = [device for device in cluster.devices if device.preset is None]
    rooms = {real.address: real.memory_bytes for real in real_devices if real.address and real.memory_bytes}
    own_threads |= {LOCAL: threads} if threads else {}
    rooms |= {LOCAL: min(memory, rooms.get(LOCAL, memory))} if memory else {}
    return own_threads, rooms


def estimated(device: ClusterDevice, file: ModelFile) -> DeviceSpeed:
    """Estimate a preset's speed, as `preset_speed` does."""
    assert device.preset is not None
    return preset_speed(CATALOG[device.preset], PartSizes.from_file(file), device.address or device.name, device.name)
