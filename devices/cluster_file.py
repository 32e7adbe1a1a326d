"""Devices and links of a cluster, from cluster.toml or from addresses of workers: data and checks only.

Properties of a device or link that the file does not state are measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from devices.catalog import CATALOG
from devices.errors import ClusterFileError
from devices.names import DEFAULT_PORT, MAX_NAME, is_name, join_address, name_from, parse_address
from devices.toml_tables import Table, check_keys, reading_toml, short_text, tables

LOCAL = "local"  # the address of this device, and its name in links if the file gives no other name
MAX_DEVICES = 64
MAX_THREADS = 512
MAX_WATTS = 100_000.0
MAX_SPEED = 1000.0
MAX_DISK_MB_PER_S = 100_000.0
MAX_DELAY_MS = 60_000.0
# 400 Gbit/s are 50 GB/s, the memory bandwidth of a good laptop: no link between such devices is faster.
MAX_MBPS = 400_000.0
_DEVICE_KEYS = ("name", "address", "preset", "memory", "watts", "idle_watts", "threads", "speed", "disk_mb_per_s")
_LINK_KEYS = ("between", "delay_ms", "bandwidth_mbps")


@dataclass(frozen=True)
class ClusterDevice:
    """A device of a cluster file, and the figures to assume for it. None means measured, or no limit."""

    name: str
    address: str | None = None  # HOST:PORT of a worker, or LOCAL; None for a preset without a worker
    preset: str | None = None  # name in `devices.catalog`, for a what-if device that is not contacted
    memory_bytes: int | None = None  # memory that the model may use
    watts: float | None = None  # power while it computes
    threads: int | None = None
    speed: float | None = None  # factor on the measured speed, or on the preset's
    disk_bytes_per_s: float | None = None  # reading speed
    idle_watts: float | None = None  # power while it waits for other devices

    @property
    def is_local(self) -> bool:
        """True for this device itself."""
        return self.address == LOCAL


@dataclass(frozen=True)
class ClusterLink:
    """Assumed properties of the link between two devices, in both directions. None means measured."""

    latency_s: float | None = None  # one way
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class Cluster:
    """Devices, and assumptions about the links between them."""

    devices: tuple[ClusterDevice, ...]
    links: Mapping[frozenset[str], ClusterLink] = field(default_factory=dict)  # by two names; empty set: other pairs

    @classmethod
    def of_addresses(cls, addresses: Iterable[str]) -> Cluster:
        """Return a cluster of this device and the workers at these addresses, without assumptions.

        Raises ClusterFileError if an address is not valid or occurs twice.
        """
        devices = [ClusterDevice(LOCAL, LOCAL)]
        for text in addresses:
            address = _parse_address(text)
            if address is None:
                raise ClusterFileError(f"an address is HOST or HOST:PORT; got {short_text(text)}")
            if address in (device.address for device in devices):
                raise ClusterFileError(f"{address} is named twice; name each device once")
            devices.append(ClusterDevice(_free_name(address, devices), address))
        return cls(tuple(devices))

    @property
    def local(self) -> ClusterDevice | None:
        """This device itself, or None if the cluster does not contain it."""
        return next((device for device in self.devices if device.is_local), None)

    @property
    def local_name(self) -> str:
        """Name of this device in links."""
        return self.local.name if self.local else LOCAL

    @property
    def workers(self) -> tuple[ClusterDevice, ...]:
        """Devices with a worker: neither this device nor a preset."""
        return tuple(d for d in self.devices if d.address is not None and not d.is_local and d.preset is None)

    def link(self, a: str, b: str) -> ClusterLink | None:
        """Return the link between two devices, in either order.

        It is the link that names them, else the link for all pairs, else None.
        """
        return self.links.get(frozenset((a, b)), self.links.get(frozenset()))


def read_cluster(path: Path) -> Cluster:
    """Read a cluster from a TOML file. Raises ClusterFileError if it is not valid, OSError if it cannot be read."""
    with reading_toml(path, ClusterFileError) as data:
        return _cluster(data)


def _cluster(data: Mapping[str, Any]) -> Cluster:
    check_keys(data, ("device", "link"), "the file", ClusterFileError)
    devices = [_device(table) for table in tables(data, "device", ClusterFileError)]
    if not 1 <= len(devices) <= MAX_DEVICES:
        raise ClusterFileError(f"a cluster needs 1 to {MAX_DEVICES} devices, each a [[device]]; got {len(devices)}")
    for i, device in enumerate(devices):
        if any(device.name == other.name for other in devices[:i]):
            raise ClusterFileError(f"device[{i}].name: another device is called {device.name!r}; use another name")
        twin = next((other for other in devices[:i] if device.address == other.address), None)
        if twin is not None and device.address is not None:
            raise ClusterFileError(f"device[{i}].address: {twin.name} has {device.address} too; use another address")
    cluster = Cluster(tuple(devices))
    names = list(dict.fromkeys([cluster.local_name, *(device.name for device in devices)]))
    links: dict[frozenset[str], ClusterLink] = {}
    for table in tables(data, "link", ClusterFileError):
        table.check_keys(_LINK_KEYS)
        ends = _between(table, names, cluster.local_name)
        if frozenset(ends) in links:
            what = f"between {' and '.join(ends)}" if ends else "for all pairs"
            raise ClusterFileError(f"{table.where}: there is a link {what} already; keep one")
        links[frozenset(ends)] = _link(table)
    return replace(cluster, links=links)


def _device(table: Table) -> ClusterDevice:
    table.check_keys(_DEVICE_KEYS)
    name, address, preset = table.get("name"), table.get("address"), table.get("preset")
    if not isinstance(name, str) or not is_name(name):
        table.refuse("name", f"needs 1 to {MAX_NAME} letters, digits, '-', '_' or '.', the first a letter or digit")
    if preset is not None and (not isinstance(preset, str) or preset not in CATALOG):
        table.refuse("preset", f"needs one of {', '.join(CATALOG)}")
    if address is None and preset is None:
        table.refuse("address", f'needs HOST:PORT of a worker or "{LOCAL}", unless the device has a preset')
    parsed = None if address is None else _parse_address(address)
    if address is not None and parsed is None:
        table.refuse("address", f'needs HOST, HOST:PORT or "{LOCAL}", which is this device')
    if name == LOCAL and parsed != LOCAL:
        table.refuse("name", f'needs another name: {LOCAL} is this device, whose address is "{LOCAL}"')
    disk = table.number("disk_mb_per_s", 0.1, MAX_DISK_MB_PER_S)
    return ClusterDevice(
        name=name,
        address=parsed,
        preset=preset,
        memory_bytes=table.size("memory"),
        watts=table.number("watts", 0.01, MAX_WATTS),
        idle_watts=table.number("idle_watts", 0, MAX_WATTS),
        threads=table.whole("threads", 1, MAX_THREADS),
        speed=table.number("speed", 1 / MAX_SPEED, MAX_SPEED),
        disk_bytes_per_s=None if disk is None else disk * 1e6,
    )


def _link(table: Table) -> ClusterLink:
    delay = table.number("delay_ms", 0, MAX_DELAY_MS)
    mbps = table.number("bandwidth_mbps", 0.001, MAX_MBPS, "50 GB/s: no link is faster than memory")
    if delay is None and mbps is None:
        raise ClusterFileError(f"{table.where} has no properties: give delay_ms, bandwidth_mbps or both")
    return ClusterLink(None if delay is None else delay / 1e3, None if mbps is None else mbps * 125_000)


def _between(table: Table, names: list[str], local_name: str) -> list[str]:
    """Return the names of a link's two ends, or [] for a link of all pairs."""
    between = table.get("between")
    if between is None:
        return []
    if not isinstance(between, list) or len(between) != 2:
        table.refuse("between", "needs two different names")
    ends = [local_name if end == LOCAL else end for end in between]
    for end in ends:
        if end not in names:
            raise ClusterFileError(f"{table.where}.between names {short_text(end)}; there are {', '.join(names)}")
    if ends[0] == ends[1]:
        table.refuse("between", "needs two different devices")
    return ends


def _parse_address(text: object) -> str | None:
    """Return HOST:PORT or LOCAL, or None if the text is not an address. The port is optional."""
    if text == LOCAL:
        return LOCAL
    if not isinstance(text, str):
        return None
    try:
        return join_address(*parse_address(text))
    except ValueError:
        return None


def _free_name(address: str, devices: list[ClusterDevice]) -> str:
    """Return a name from an address that no device has yet: without the default port, with a number if needed."""
    name = name_from(address.removesuffix(f":{DEFAULT_PORT}"))
    used_names = {device.name for device in devices}
    return next(
        candidate
        for candidate in (name, *(f"{name[: MAX_NAME - 4]}-{n}" for n in range(2, len(devices) + 2)))
        if candidate not in used_names
    )
