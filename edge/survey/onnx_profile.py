"""What is known of a cluster and an ONNX model: measured where devices answer, estimated for presets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from devices.catalog import CATALOG
from devices.cluster_file import Cluster, ClusterDevice
from edge.cluster.fleet import Fleet
from edge.onnx.model import OnnxSource
from edge.survey.onnx_survey import onnx_survey
from edge.survey.profile import with_links
from edge.tasks import Progress
from partition.errors import CannotSlice
from partition.plan.onnx_cuts import Cut, choose
from partition.plan.plan import LOCAL
from partition.predict.onnx_predict import OnnxDevice
from partition.predict.speeds import Links

_ESTIMATED_STAGE_S = 3e-4  # of a preset, beside its nodes
_ESTIMATED_RUNTIME_BYTES = 200 << 20


@dataclass(frozen=True)
class OnnxClusterProfile:
    """What plans are made from."""

    speeds: tuple[OnnxDevice, ...]  # this device first
    links: Links
    notes: tuple[str, ...]  # for people
    cuts: tuple[Cut, ...]  # the candidates


def onnx_speeds(
    model: OnnxSource,
    cluster: Cluster,
    fleet: Fleet | None,
    notes: Sequence[str],
    *,
    threads: int | None = None,
    transport: str = "auto",
    fresh: bool = False,
    on_step: Progress = lambda done, of: None,
) -> OnnxClusterProfile:
    """Measure the devices that answer, and estimate the presets. The errors of `onnx_survey`."""
    cuts, said = _cuts(model)
    found = onnx_survey(
        fleet,
        tuple(fleet.workers) if fleet else (),
        model,
        cuts,
        threads=threads,
        transport=transport,
        fresh=fresh,
        on_step=on_step,
    )
    by_address = {device.address: device for device in cluster.devices if device.preset is None}
    speeds = [_overridden(one, by_address.get(device)) for device, one in found.devices.items()]
    own = cluster.local
    if own is not None and own.preset is not None:  # what if this device were another
        speeds[0] = replace(_overridden(_estimated(own, model, cuts), own), device=LOCAL)
    presets = [one for one in cluster.devices if one.preset is not None and not one.is_local]
    speeds += [_overridden(_estimated(one, model, cuts), one) for one in presets]
    said = [*notes, *said, *(f"{one.name} is a preset ({one.preset}): its figures are estimates" for one in presets)]
    if found.estimated:
        said.append(f"estimated, as made-up input does not run there: up to {', '.join(found.estimated)}")
    links = with_links(cluster, [one.device for one in speeds], found.links)
    return OnnxClusterProfile(tuple(speeds), links, tuple(said), tuple(cuts))


def _cuts(model: OnnxSource) -> tuple[list[Cut], list[str]]:
    """The candidates, and a note where unknown shapes leave none: the whole model can still run on one device."""
    try:
        return choose(model.graph, "auto"), []
    except CannotSlice as error:
        return [], [f"planned for one device at a time: {error}"]


def _overridden(speed: OnnxDevice, said: ClusterDevice | None) -> OnnxDevice:
    """A device's speed with what the cluster file says of it."""
    if said is None:
        return speed
    factor = 1 / (said.speed or 1.0)
    return replace(
        speed,
        name=said.name,
        segments_s=tuple(seconds * factor for seconds in speed.segments_s),
        stage_s=speed.stage_s * factor,
        memory_bytes=min(speed.memory_bytes, said.memory_bytes or speed.memory_bytes),
        watts=said.watts or speed.watts,
    )


def _estimated(device: ClusterDevice, model: OnnxSource, cuts: Sequence[Cut]) -> OnnxDevice:
    """A preset's speed: a node takes max(its operations / operations a second, bytes it touches / memory bandwidth)."""
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
