"""Profile of a cluster: measured on devices that answer, estimated for presets, overridden by the cluster file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Generic

from devices.cluster_file import Cluster, ClusterDevice
from devices.errors import TrustError
from edge.cluster.connect import CONNECT_TIMEOUT_S
from edge.cluster.fleet import Fleet
from edge.errors import EdgeError
from edge.profiling.survey import Speed, Survey
from partition.plan.plan import LOCAL
from partition.predict.hosts import crowded
from partition.predict.speeds import DeviceSpeed, Links, LinkSpeed
from quant.text import listed

ASSUMED_LINK = LinkSpeed(2e-3, 12.5e6, estimate=True)  # a home's Wi-Fi, if nothing else is known


@dataclass(frozen=True)
class ClusterProfile(Generic[Speed]):
    """Speeds and links for planning."""

    speeds: tuple[Speed, ...]  # this device first
    links: Links
    notes: tuple[str, ...]  # sentences about devices that did not answer, and about estimates


@contextmanager
def reachable(
    cluster: Cluster,
    *,
    insecure: bool,
    timeout_s: float = CONNECT_TIMEOUT_S,
    return_s: float | None = None,
    anyway: bool = False,
) -> Iterator[tuple[Fleet | None, list[str]]]:
    """Yield the connected workers of a cluster that answer, or None, and a note about each other worker.

    timeout_s: deadline for each worker to answer.
    return_s: see `Remote.return_s`.
    anyway: if this device's own files prevent all connections (TrustError), treat all workers as not answering.
    Raises the errors of Fleet if the workers that answer cannot take part together.
    """

    def tried(address: str) -> str | None:
        """Return the reason why a worker does not answer, or None if it does."""
        try:
            Fleet([address], insecure=insecure, timeout_s=timeout_s).close()
        except EdgeError as error:
            # damaged credentials of this device: no worker can be reached
            if isinstance(error, TrustError) and not anyway:
                raise
            return str(error)
        return None

    addresses = [device.address for device in cluster.workers if device.address is not None]
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        errors = dict(zip(addresses, pool.map(tried, addresses), strict=True))
    answering = [address for address, error in errors.items() if error is None]
    notes = [f"planned without {address}: {error}" for address, error in errors.items() if error is not None]
    if not answering:
        yield None, notes
        return
    with Fleet(answering, insecure=insecure, timeout_s=timeout_s, return_s=return_s) as fleet:
        yield fleet, notes


def profiled(
    cluster: Cluster, survey: Survey[Speed], estimate: Callable[[ClusterDevice], Speed], notes: Sequence[str]
) -> ClusterProfile[Speed]:
    """Return the profile of a cluster: measured devices with the overrides of the cluster file, and preset devices.

    estimate: returns the estimated speed of a preset device.
    """
    by_address = {device.address: device for device in cluster.devices if device.preset is None}
    speeds = [with_overrides(speed, by_address.get(speed.device)) for speed in survey.speeds]
    own = cluster.local
    if own is not None and own.preset is not None:  # plan as if this device were the preset
        speeds[:1] = [replace(with_overrides(estimate(own), own), device=LOCAL)]
    presets: list[ClusterDevice] = [d for d in cluster.devices if d.preset is not None and not d.is_local]
    speeds += [with_overrides(estimate(preset), preset) for preset in presets]
    all_notes = [
        *notes,
        *(
            f"{d.name} is a preset ({d.preset}): its figures are estimates, and edge cluster invite {d.name} joins such"
            " a device"
            for d in presets
        ),
    ]
    if survey.estimated:
        all_notes.append(f"estimated, because random input does not run there: up to {', '.join(survey.estimated)}")
    all_notes += shared_hosts(speeds)
    links = with_links(cluster, [speed.device for speed in speeds], survey.links)
    return ClusterProfile(tuple(speeds), links, tuple(all_notes))


def shared_hosts(speeds: Sequence[Speed]) -> list[str]:
    """Return a line about each machine that has fewer cores than its devices have threads."""
    lines = []
    for host in crowded(speed.host for speed in speeds):
        here = [speed for speed in speeds if speed.host and speed.host.id == host]
        names = listed(["this device" if speed.device == LOCAL else speed.name for speed in here])
        lines.append(f"{names} are one machine with fewer cores than threads: its cores are counted once")
    return lines


def with_overrides(speed: Speed, overrides: ClusterDevice | None) -> Speed:
    """Return a device's speed with the overrides of the cluster file."""
    if overrides is None:
        return speed
    changed = replace(
        speed.times(1 / (overrides.speed or 1.0)),
        name=overrides.name,
        memory_bytes=min(speed.memory_bytes, overrides.memory_bytes or speed.memory_bytes),
        watts=overrides.watts or speed.watts,
    )
    if isinstance(changed, DeviceSpeed):
        disk = overrides.disk_bytes_per_s or changed.disk_bytes_per_s
        return replace(changed, disk_bytes_per_s=disk, idle_watts=overrides.idle_watts or 0.0)
    return changed


def with_links(cluster: Cluster, known: Sequence[str], measured: Links) -> Links:
    """Return the links between these devices, with the overrides of the cluster file.

    known: addresses of the devices. A link that was not measured is ASSUMED_LINK.
    """
    names = {device.address or device.name: device.name for device in cluster.devices} | {LOCAL: cluster.local_name}
    between = {}
    for a, b in permutations(known, 2):
        link = measured.between.get((a, b), ASSUMED_LINK)
        override = cluster.link(names.get(a, a), names.get(b, b))
        if override is not None:
            link = LinkSpeed(
                link.latency_s if override.latency_s is None else override.latency_s,
                override.bytes_per_s or link.bytes_per_s,
                True,
            )
        between[a, b] = link
    return Links(between)
