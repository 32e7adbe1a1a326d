"""Profiling for plans of an ONNX model: measured times of the segments between cuts on each device, and estimates
for presets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from devices.catalog import CATALOG
from devices.cluster_file import Cluster, ClusterDevice
from devices.remembered import key_of
from edge.cluster.fleet import Fleet
from edge.cluster.session import EngineSession
from edge.onnx.model import OnnxSource
from edge.profiling.onnx_times import SegmentTimes, probes, timed
from edge.profiling.profile import ClusterProfile, profiled
from edge.profiling.survey import Devices, Survey, host_of, survey
from edge.tasks import CancelScope, Progress
from edge.version import version
from partition.plan.onnx_cuts import Cut, choose
from partition.predict.onnx_predict import OnnxDevice

REMEMBERED = "onnx-speeds"  # name of the cached measurements
# CPU time of a core for an item that passes through a stage: system calls, Python, and threads that wake each other.
# Measured with two processes: 0.2 ms for small tensors, 0.5 for 0.8 MB in and out. Slow devices take proportionally
# longer.
_ITEM_CPU_S = 0.25e-3
_MOST_SLOWER = 10.0  # limit relative to the fastest device, which may use a GPU for its nodes but not for this work
_ESTIMATED_STAGE_S = 3e-4  # time of a preset's stage without its nodes
_ESTIMATED_RUNTIME_BYTES = 200 << 20


def onnx_survey(
    fleet: Fleet | None,
    model: OnnxSource,
    cuts: Sequence[Cut],
    *,
    threads: int | None = None,
    provider: str | None = None,
    transport: str = "auto",
    fresh: bool = False,
    on_step: Progress = lambda done, total: None,
) -> Survey[OnnxDevice]:
    """Measure this device and the workers, as `survey` does.

    fleet: connection to the workers; None: no workers.
    cuts: candidate cuts in ascending order; may be empty.
    threads: threads of this device.
    provider: execution provider of ONNX Runtime on every device; None: the best of each device.
    Raises PlanError for invalid cuts, CannotSlice for a part that cannot be sent, EngineError if nothing can be timed,
    and errors of sessions.
    """
    devices = Devices(fleet, threads)
    with CancelScope() as closing:
        profiler = _SegmentProfiler(devices, model, cuts, provider, closing)
        timings, links = survey(devices, profiler, closing, transport=transport, fresh=fresh, on_step=on_step)
    fastest_s = min(sum(timing.times.segments_s) for timing in timings)
    labels = [*(cut.label for cut in cuts), "the end"]
    speeds = []
    for rank, timing in enumerate(timings):
        times = timing.times
        slower = min(_MOST_SLOWER, sum(times.segments_s) / fastest_s) if fastest_s else 1.0
        speeds.append(
            OnnxDevice(
                device=devices.addresses[rank],
                name=devices.names[rank],
                segments_s=times.segments_s,
                stage_s=times.stage_s + _ITEM_CPU_S * slower,
                memory_bytes=devices.memory_bytes[rank],
                runtime_bytes=times.runtime_bytes,
                age_s=timing.age_s,
                busy=times.busy,
                key=profiler.keys[rank],
                host=host_of(devices.profiles[rank]),
            )
        )
    estimated = sorted({i for timing in timings for i in timing.times.estimated})
    return Survey(tuple(speeds), links, tuple(labels[i] for i in estimated))


class _SegmentProfiler:
    """Profiler of the segments between the cuts of a graph."""

    cache, streams = REMEMBERED, True

    def __init__(
        self, devices: Devices, model: OnnxSource, cuts: Sequence[Cut], provider: str | None, closing: CancelScope
    ) -> None:
        self._devices, self._probes = devices, probes(model, cuts, provider, closing)
        self.steps = self._probes.steps
        depends = [str(provider), version("onnxruntime")]
        for part in (probe.part for probe in self._probes.parts):
            # A part's file does not contain its shapes if dimensions are open.
            shapes = [(value.name, value.shape) for value in (*part.takes.tensors, *part.gives.tensors)]
            depends += [part.digest, repr(shapes)]
        self.keys: Sequence[str] = [key_of(depends, profile) for profile in devices.profiles]

    def time(self, session: EngineSession, on_step: Callable[[], None], most_s: float) -> SegmentTimes:
        """Measure one device. All parts are timed, however long it takes."""
        rank = session.rank
        return timed(session, self._devices.workers[rank], self._probes, self._devices.memory_bytes[rank], on_step)

    def so_far(self, rank: int) -> SegmentTimes:
        """Measurements of ONNX models have no end before they are finished."""
        raise NotImplementedError

    def to_json(self, times: SegmentTimes) -> Any:
        return times.to_json()

    def read(self, rank: int, values: Any) -> SegmentTimes | None:
        return SegmentTimes.from_json(values, len(self._probes.segments_s))


def onnx_speeds(
    model: OnnxSource,
    cluster: Cluster,
    fleet: Fleet | None,
    notes: Sequence[str],
    *,
    threads: int | None = None,
    transport: str = "auto",
    fresh: bool = False,
    on_step: Progress = lambda done, total: None,
) -> tuple[ClusterProfile[OnnxDevice], list[Cut]]:
    """Measure the devices that answer, and estimate presets. Return the profile and the candidate cuts.

    Raises the errors of `onnx_survey`.
    """
    cuts = choose(model.graph, "auto")
    too_few_cuts = model.places_text(len(cluster.devices))
    measurement = onnx_survey(
        fleet,
        model,
        cuts,
        threads=threads,
        transport=transport,
        fresh=fresh,
        on_step=on_step,
    )
    return profiled(
        cluster,
        measurement,
        lambda device: _estimated(device, model, cuts),
        [*notes, too_few_cuts] if too_few_cuts else notes,
    ), cuts


def _estimated(device: ClusterDevice, model: OnnxSource, cuts: Sequence[Cut]) -> OnnxDevice:
    """Estimate a preset's speed: a node takes max(operations / operations per second, bytes / memory bandwidth)."""
    assert device.preset is not None
    preset = CATALOG[device.preset]
    ends = [0, *(cut.position for cut in cuts), len(model.graph.nodes)]

    def seconds(start: int, stop: int) -> float:
        return sum(
            max(node.flops / preset.flops, (node.weight_bytes + 2 * node.output_bytes) / preset.memory_bytes_per_s)
            for node in model.graph.nodes[start:stop]
        )

    return OnnxDevice(
        device=device.address or device.name,
        name=device.name,
        segments_s=tuple(seconds(start, stop) for start, stop in pairwise(ends)),
        stage_s=_ESTIMATED_STAGE_S,
        memory_bytes=preset.memory_bytes,
        runtime_bytes=_ESTIMATED_RUNTIME_BYTES,
        watts=preset.watts,
        estimate=True,
    )
