"""Profiles that plans of a language model go by: times of each device, measured, or estimated for presets.

Layers are of the model's real shape and types, and their weights are zero. Such a slice is a header and zeros, so every
device makes it by itself and nothing of the model crosses the network.
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
from edge.survey.corrections import Corrections
from edge.survey.layer_times import device_speed, probes, timed
from edge.survey.profile import ClusterProfile, profiled, with_links
from edge.survey.survey import Devices, Survey, host_of, survey
from edge.tasks import CancelScope, Progress
from partition.errors import PlanError
from partition.model.model import ModelShape
from partition.plan.plan import LOCAL
from partition.predict.speeds import Curve, DeviceSpeed, Links, speed_of, speed_to_json
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile

REMEMBERED = "speeds"  # what they are remembered as
# Of a core's time for a sum: system calls, Python and adding, with caches that hold the last layer's weights. Measured
# on two devices: 50 us where a rank polls, 95 where a CPU quota forbids that. Slow devices take longer in proportion.
_SUM_CPU_S = 90e-6
_AMPLE = 1.5  # times a model's file: weights, KV cache and buffers take less, but for very long contexts
_MOST_BYTES = 1 << 60
# Of a limit for all processes of a device: this one or the daemon, and what an engine process takes beside weights.
PROBE_BYTES = 250 << 20
_GROWTH_BYTES = 24 << 20  # that this process may come to need while another one measures
_ESTIMATED_STEP_S = 5e-4  # of a preset
_ESTIMATED_RUNTIME_BYTES = 200 << 20
_ESTIMATED_ROWS = (1, 2, 4, 8, 64)
NOTHING_SAID: Mapping[str, int] = MappingProxyType({})


def llm_survey(
    fleet: Fleet | None,
    addresses: Sequence[str],
    file: GgufFile,
    model_digest: str,
    *,
    threads: Mapping[str, int] = NOTHING_SAID,
    memory: Mapping[str, int] = NOTHING_SAID,
    transport: str = "auto",
    fresh: bool = False,
    known: Survey[DeviceSpeed] | None = None,
    scope: CancelScope | None = None,
    on_step: Progress = lambda done, of: None,
) -> Survey[DeviceSpeed]:
    """Measure this device and the workers at `addresses`, as `survey` does.
    fleet: where they are connected; None: there are none. threads, memory: of devices that are to
    have other ones than they lend: bytes, at most. known: of devices that are not timed again, at least this one; what
    is said of them stays, also where they are not among `addresses`. scope: ends this where it is closed.

    Times are corrected by what steps in use took. CannotSlice where the model has no layers to be timed; else the
    errors of sessions.
    """
    devices = Devices(fleet, addresses, threads.get(LOCAL))
    given = {speed.device: speed for speed in known.speeds} if known else {}
    with CancelScope() if scope is None else nullcontext(scope) as closing:
        timing = _Layers(devices, file, model_digest, threads, memory, closing)
        taken, links = survey(devices, timing, closing, transport=transport, fresh=fresh, given=given, on_step=on_step)
    corrections = Corrections()
    speeds = []
    for rank, one in enumerate(taken):
        speed = one.times
        said, profile = threads.get(devices.addresses[rank]), devices.profiles[rank]
        room, key, host = timing.rooms[rank], timing.keys[rank], host_of(profile, said)
        if speed.device in given:
            continue
        new = replace(speed, memory_bytes=room, threads=said, key=key, age_s=one.age_s, quiet_s=one.quiet_s, host=host)
        speeds.append(corrections.applied(new))
    if known is None:
        return Survey(tuple(_with_sums(speeds)), links)
    speeds = [*known.speeds, *speeds]
    # Devices that are away now have no link to those that joined: one is assumed until they are measured again.
    both = with_links(Cluster(()), [speed.device for speed in speeds], Links({**links.between, **known.links.between}))
    return Survey(tuple(_with_sums(speeds)), both)


class _Layers:
    """The layers and the head of a model, to be timed."""

    cache, streams = REMEMBERED, False

    def __init__(
        self,
        devices: Devices,
        file: GgufFile,
        model_digest: str,
        threads: Mapping[str, int],
        memory: Mapping[str, int],
        closing: CancelScope,
    ) -> None:
        addresses = devices.addresses
        self._devices, self._file, self._threads, self._memory = devices, file, threads, memory.get(LOCAL)
        said = [self._memory, *(profile.memory_limit_bytes for profile in devices.profiles[1:])]
        limited = [limit for limit in said if limit is not None]  # bytes of all processes of a device together
        self._slices, self._n = probes(file, model_digest, closing, min(limited) - PROBE_BYTES if limited else None)
        self.steps = len(self._slices)
        self.rooms = [
            min(room, memory.get(address, _MOST_BYTES))
            for room, address in zip(devices.memory_bytes, addresses, strict=True)
        ]
        self._pages = [room < _AMPLE * file.size_bytes for room in self.rooms]  # it may have to
        digests = [probe.digest for probe in self._slices.values()]
        self.keys: Sequence[str] = [
            key_of([*digests, str(threads.get(address)), str(pages)], profile)
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

    def to_json(self, taken: DeviceSpeed) -> Any:
        return speed_to_json(taken)

    def read(self, rank: int, values: Any) -> DeviceSpeed | None:
        try:
            return speed_of(values, self._devices.addresses[rank], self._devices.names[rank], 0.0)
        except PlanError:
            return None


def _with_sums(speeds: Sequence[DeviceSpeed]) -> list[DeviceSpeed]:
    """Add the time that a sum takes of each processor: on the fastest a known time, on others so many times that."""
    fastest = min(speed.seconds for speed in speeds)
    return [replace(speed, sum_s=_SUM_CPU_S * speed.seconds / fastest) for speed in speeds]


def llm_speeds(
    cluster: Cluster,
    fleet: Fleet | None,
    notes: Sequence[str],
    file: GgufFile,
    model_digest: str,
    *,
    threads: int | None = None,
    memory: int | None = None,
    transport: str = "auto",
    fresh: bool = False,
    on_step: Progress = lambda done, of: None,
) -> ClusterProfile[DeviceSpeed]:
    """Profile a cluster for a language model. threads, memory (bytes): of this device, at most.

    The errors of `llm_survey`.
    """
    said = {device.address: device.threads for device in cluster.devices if device.address and device.threads}
    # A preset in place of this device says nothing of the memory that may be taken to measure it.
    measured = [device for device in cluster.devices if device.preset is None]
    rooms = {one.address: one.memory_bytes for one in measured if one.address and one.memory_bytes}
    found = llm_survey(
        fleet,
        tuple(fleet.workers) if fleet else (),
        file,
        model_digest,
        threads=said | ({LOCAL: threads} if threads else {}),
        memory=rooms | ({LOCAL: min(memory, rooms.get(LOCAL, memory))} if memory else {}),
        transport=transport,
        fresh=fresh,
        on_step=on_step,
    )
    return profiled(cluster, found, lambda device: estimated(device, file), notes)


def estimated(device: ClusterDevice, file: GgufFile) -> DeviceSpeed:
    """A preset's speed: a layer takes max(weights / memory bandwidth, rows x 2 x their values / operations a second).

    Attention reads its keys and values at the memory's bandwidth; half a layer takes half of what ranks share.
    """
    assert device.preset is not None
    preset, can, shape = CATALOG[device.preset], limits(file), ModelShape.from_gguf(file)
    layer_bytes = sum(can.layer_bytes) / len(can.layer_bytes)
    values = shape.n_params / shape.weight_bytes  # a byte

    def curve(n_bytes: float) -> Curve:
        return Curve(
            tuple(
                (rows, max(n_bytes / preset.memory_bytes_per_s, 2 * rows * n_bytes * values / preset.flops))
                for rows in _ESTIMATED_ROWS
            )
        )

    kv = shape.n_heads_kv[0] * (shape.head_k + shape.head_v) * 2
    layer = curve(layer_bytes)
    shared = 1.0 if can.shares_heads else can.ff_bytes * can.sizes.ff / layer_bytes
    return DeviceSpeed(
        device=device.address or device.name,
        name=device.name,
        step_s=Curve(((1, _ESTIMATED_STEP_S),)),
        layer_s=layer,
        token_s=kv / preset.memory_bytes_per_s,
        half_layer_s=layer.times(1 - shared / 2),
        head_s=curve(shape.head_bytes),
        memory_bytes=preset.memory_bytes,
        runtime_bytes=_ESTIMATED_RUNTIME_BYTES,
        sum_s=1e-4,
        disk_bytes_per_s=preset.disk_bytes_per_s,
        watts=preset.watts,
        estimate=True,
    )
