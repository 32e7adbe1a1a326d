"""What is known of a cluster: measured on the devices that answer, estimated for presets, and as its file says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import permutations

from devices.catalog import CATALOG
from devices.cluster_file import Cluster, ClusterDevice
from devices.errors import TrustError
from edge.cluster.fleet import Fleet
from edge.errors import EdgeError
from edge.survey.survey import survey
from partition.model.model import ModelShape
from partition.plan.plan import LOCAL
from partition.predict.speeds import Curve, DeviceSpeed, Links, LinkSpeed
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile

ASSUMED_LINK = LinkSpeed(2e-3, 12.5e6, estimate=True)  # a home's Wi-Fi, where nothing else is known
_ESTIMATED_STEP_S = 5e-4  # of a preset
_ESTIMATED_RUNTIME_BYTES = 200 << 20
_ROWS = (1, 2, 4, 8, 64)


@dataclass(frozen=True)
class ClusterProfile:
    """What plans are made from."""

    speeds: tuple[DeviceSpeed, ...]  # this device first
    links: Links
    notes: tuple[str, ...]  # for people: who did not answer, what is estimated


@contextmanager
def reachable(cluster: Cluster, *, insecure: bool) -> Iterator[tuple[Fleet | None, list[str]]]:
    """The workers of a cluster that answer, connected until the end of the block, and a note for each that does not.

    None where there is none. The errors of Fleet for those that answer and cannot take part together.
    """
    addresses = [device.address for device in cluster.workers if device.address is not None]
    notes, answering = [], []
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        for address, error in zip(addresses, pool.map(lambda one: _tried(one, insecure), addresses), strict=True):
            if error is None:
                answering.append(address)
            else:
                notes.append(f"planned without {address}: {error}")
    if not answering:
        yield None, notes
        return
    with Fleet(answering, insecure=insecure) as fleet:
        yield fleet, notes


def _tried(address: str, insecure: bool) -> str | None:
    """None where a worker answers; else why not."""
    try:
        Fleet([address], insecure=insecure).close()
    except TrustError:  # of this device, so that no worker could be reached
        raise
    except EdgeError as error:
        return str(error)
    return None


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
    on_step: Callable[[float, float], None] = lambda done, of: None,
) -> ClusterProfile:
    """What a cluster takes for a language model. threads, memory (bytes): of this device, at most.

    The errors of `survey`.
    """
    by_address = {device.address: device for device in cluster.devices if device.preset is None}
    said = {device.address: device.threads for device in cluster.devices if device.address and device.threads}
    # A preset in place of this device says nothing of the memory that may be taken to measure it.
    rooms = {one.address: one.memory_bytes for one in by_address.values() if one.address and one.memory_bytes}
    found = survey(
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
    speeds = [with_overrides(speed, by_address.get(speed.device)) for speed in found.speeds]
    own = cluster.local
    if own is not None and own.preset is not None:  # what if this device were another
        speeds[0] = replace(with_overrides(estimated(own, file), own), device=LOCAL)
    presets = [one for one in cluster.devices if one.preset is not None and not one.is_local]
    speeds += [with_overrides(estimated(one, file), one) for one in presets]
    estimates = [f"{one.name} is a preset ({one.preset}): its figures are estimates" for one in presets]
    links = with_links(cluster, [one.device for one in speeds], found.links)
    return ClusterProfile(tuple(speeds), links, (*notes, *estimates))


def with_overrides(speed: DeviceSpeed, said: ClusterDevice | None) -> DeviceSpeed:
    """A device's speed with what the cluster file says of it."""
    if said is None:
        return speed
    return replace(
        speed.times(1 / (said.speed or 1.0)),
        name=said.name,
        memory_bytes=min(speed.memory_bytes, said.memory_bytes or speed.memory_bytes),
        disk_bytes_per_s=said.disk_bytes_per_s or speed.disk_bytes_per_s,
        watts=said.watts or speed.watts,
    )


def with_links(cluster: Cluster, known: Sequence[str], measured: Links) -> Links:
    """The links between these devices, with what the cluster file says of them; else, where it is not measured,
    ASSUMED_LINK."""
    names = {device.address or device.name: device.name for device in cluster.devices} | {LOCAL: cluster.local_name}
    between = {}
    for a, b in permutations(known, 2):
        way = measured.between.get((a, b), ASSUMED_LINK)
        said = cluster.link(names.get(a, a), names.get(b, b))
        if said is not None:
            way = LinkSpeed(
                way.latency_s if said.latency_s is None else said.latency_s, said.bytes_per_s or way.bytes_per_s, True
            )
        between[a, b] = way
    return Links(between)


def estimated(device: ClusterDevice, file: GgufFile) -> DeviceSpeed:
    """A preset's speed: a layer takes max(weights / memory bandwidth, rows x 2 x their values / operations a second).

    Attention reads its keys and values at the memory's bandwidth; half a layer takes half.
    """
    assert device.preset is not None
    preset, can, shape = CATALOG[device.preset], limits(file), ModelShape.from_gguf(file)
    layer_bytes = sum(can.layer_bytes) / len(can.layer_bytes)
    values = shape.n_params / shape.weight_bytes  # a byte

    def curve(n_bytes: float) -> Curve:
        return Curve(
            tuple(
                (rows, max(n_bytes / preset.memory_bytes_per_s, 2 * rows * n_bytes * values / preset.flops))
                for rows in _ROWS
            )
        )

    kv = shape.n_heads_kv[0] * (shape.head_k + shape.head_v) * 2
    layer = curve(layer_bytes)
    return DeviceSpeed(
        device=device.address or device.name,
        name=device.name,
        step_s=Curve(((1, _ESTIMATED_STEP_S),)),
        layer_s=layer,
        token_s=kv / preset.memory_bytes_per_s,
        half_layer_s=layer.times(0.5),
        head_s=curve(shape.head_bytes),
        memory_bytes=preset.memory_bytes,
        runtime_bytes=_ESTIMATED_RUNTIME_BYTES,
        sum_s=1e-4,
        disk_bytes_per_s=preset.disk_bytes_per_s,
        watts=preset.watts,
        estimate=True,
    )
