"""The profile of a cluster: measured on the devices that answer, estimated for presets, and as its file says."""

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
from edge.cluster.lost import listed
from edge.errors import EdgeError
from edge.survey.survey import Speed, Survey
from partition.plan.plan import LOCAL
from partition.predict.hosts import crowded
from partition.predict.speeds import DeviceSpeed, Links, LinkSpeed

ASSUMED_LINK = LinkSpeed(2e-3, 12.5e6, estimate=True)  # a home's Wi-Fi, where nothing else is known


@dataclass(frozen=True)
class ClusterProfile(Generic[Speed]):
    """Speeds of devices and links that plans are made from."""

    speeds: tuple[Speed, ...]  # this device first
    links: Links
    notes: tuple[str, ...]  # for people: who did not answer, what is estimated


@contextmanager
def reachable(
    cluster: Cluster, *, insecure: bool, timeout_s: float = CONNECT_TIMEOUT_S, return_s: float | None = None
) -> Iterator[tuple[Fleet | None, list[str]]]:
    """The workers of a cluster that answer, connected until the end of the block, and a note for each that does not.

    None where there is none. The errors of Fleet for those that answer and cannot take part together. timeout_s: for
    each to answer. return_s: as `Remote.return_s`.
    """
    addresses = [device.address for device in cluster.workers if device.address is not None]
    notes, answering = [], []
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        for address, error in zip(
            addresses, pool.map(lambda one: _tried(one, insecure, timeout_s), addresses), strict=True
        ):
            if error is None:
                answering.append(address)
            else:
                notes.append(f"planned without {address}: {error}")
    if not answering:
        yield None, notes
        return
    with Fleet(answering, insecure=insecure, timeout_s=timeout_s, return_s=return_s) as fleet:
        yield fleet, notes


def _tried(address: str, insecure: bool, timeout_s: float) -> str | None:
    """None where a worker answers; else why not."""
    try:
        Fleet([address], insecure=insecure, timeout_s=timeout_s).close()
    except TrustError:  # of this device, so that no worker could be reached
        raise
    except EdgeError as error:
        return str(error)
    return None


def profiled(
    cluster: Cluster, survey: Survey[Speed], estimate: Callable[[ClusterDevice], Speed], notes: Sequence[str]
) -> ClusterProfile[Speed]:
    """Combine measurements with the cluster's file and its presets. estimate: of a preset."""
    by_address = {device.address: device for device in cluster.devices if device.preset is None}
    speeds = [with_overrides(speed, by_address.get(speed.device)) for speed in survey.speeds]
    own = cluster.local
    if own is not None and own.preset is not None:  # what if this device were another
        speeds[0] = replace(with_overrides(estimate(own), own), device=LOCAL)
    presets: list[ClusterDevice] = [one for one in cluster.devices if one.preset is not None and not one.is_local]
    speeds += [with_overrides(estimate(one), one) for one in presets]
    said = [*notes, *(f"{one.name} is a preset ({one.preset}): its figures are estimates" for one in presets)]
    if survey.estimated:
        said.append(f"estimated, as made-up input does not run there: up to {', '.join(survey.estimated)}")
    said += shared_hosts(speeds)
    links = with_links(cluster, [one.device for one in speeds], survey.links)
    return ClusterProfile(tuple(speeds), links, tuple(said))


def shared_hosts(speeds: Sequence[Speed]) -> list[str]:
    """A line for people of each machine that has fewer cores than its devices have threads."""
    lines = []
    for host in crowded(speed.host for speed in speeds):
        names = listed([speed.name for speed in speeds if speed.host and speed.host.id == host])
        lines.append(f"{names} are one machine with fewer cores than threads: its cores are counted once")
    return lines


def with_overrides(speed: Speed, said: ClusterDevice | None) -> Speed:
    """A device's speed with what the cluster file says of it."""
    if said is None:
        return speed
    changed = replace(
        speed.times(1 / (said.speed or 1.0)),
        name=said.name,
        memory_bytes=min(speed.memory_bytes, said.memory_bytes or speed.memory_bytes),
        watts=said.watts or speed.watts,
    )
    if isinstance(changed, DeviceSpeed) and said.disk_bytes_per_s:
        return replace(changed, disk_bytes_per_s=said.disk_bytes_per_s)
    return changed


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
