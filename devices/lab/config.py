"""Configuration of a lab: devices and links, from a lab.toml or a dictionary of the same shape.

Data and checks only; `devices/lab/lab.py` starts the lab.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from devices.catalog import CATALOG, EMULATED
from devices.cluster_file import MAX_DEVICES, MAX_THREADS
from devices.cores import check_cores, parse_cores
from devices.errors import LabFileError
from devices.lab.shaper import Shape
from devices.names import MAX_NAME, is_name
from devices.toml_tables import Table, check_keys, reading_toml, short_text, tables

OWNER = "owner"  # name in links of this machine itself, where commands such as `edge chat --workers` run
THREE_DEVICES = Path(__file__).with_name("three.toml")  # the lab of `edge lab up` without a file
MAX_CORES = 4096
MAX_DELAY_MS = 5_000.0
MAX_MBPS = 1e6
MAX_LOSS = 50.0  # percent; with more losses TCP makes no progress
LEAST_MEMORY = 128 << 20  # about as much as a worker takes before it loads anything
_DEVICE_KEYS = (
    "name", "preset", "cpu", "memory", "threads", "affinity", "cache_size", "models", "compute", "profile",
    "bandwidth_mbps", "gpu", "gpu_memory",
)  # fmt: skip
_SLEEP = "sleep"
_MOST_PROFILE = 1 << 20  # bytes of a profile
_LINK_KEYS = ("between", "delay_ms", "jitter_ms", "bandwidth_mbps", "loss")


@dataclass(frozen=True)
class LabDevice:
    """A device of a lab: a worker of its own, and its limits. None means no limit."""

    name: str
    cpu: float | None = None  # cores
    memory_bytes: int | None = None
    threads: int | None = None  # None: as many as cpu, rounded up
    affinity: tuple[int, ...] = ()
    cache_bytes: int | None = None
    models: Path | None = None
    preset: str | None = None
    profile: str | None = None  # JSON of `partition.predict.part_times` for a sleeping device; None if it computes
    bytes_per_s: float | None = None  # limit of sending, and of receiving, over all of its links together


@dataclass(frozen=True)
class LabConfig:
    """Configuration of a lab."""

    devices: tuple[LabDevice, ...]
    links: Mapping[frozenset[str], Shape]  # for both directions, by two names; empty set: all other pairs
    data: Mapping[str, Any] = field(compare=False)  # input of `parse_lab`, for the lab process
    folder: Path = field(compare=False)

    @property
    def shaped(self) -> bool:
        """True if any link is worse than loopback, or a device has a bandwidth limit."""
        limited = any(device.bytes_per_s is not None for device in self.devices)
        return limited or any(shape != Shape() for shape in self.links.values())

    @property
    def sleeps(self) -> bool:
        """True if any device sleeps."""
        return any(device.profile is not None for device in self.devices)

    def shape(self, a: str, b: str) -> Shape:
        """Return the link that names two devices (or a device and `OWNER`), or else the link of all pairs."""
        return self.links.get(frozenset((a, b)), self.links.get(frozenset(), Shape()))


def read_lab(path: Path) -> LabConfig:
    """Read a lab from a TOML file. Raises LabFileError if it is not valid, and OSError if it cannot be read."""
    with reading_toml(path, LabFileError) as data:
        return parse_lab(data, path.parent)


def parse_lab(data: Mapping[str, Any], folder: Path | None = None) -> LabConfig:
    """Return the lab of a dictionary with the shape of lab.toml.

    folder: base of relative paths; by default the working folder.

    Raises LabFileError if it is not valid.
    """
    check_keys(data, ("device", "link"), "the file", LabFileError)
    folder = (folder or Path()).absolute()
    devices = [_device(table, folder) for table in tables(data, "device", LabFileError)]
    if not 1 <= len(devices) <= MAX_DEVICES:
        raise LabFileError(f"a lab needs 1 to {MAX_DEVICES} devices, each a [[device]]; got {len(devices)}")
    names = [device.name for device in devices]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise LabFileError(f"device[{i}].name: another device is called {short_text(name)}; use another name")
    links: dict[frozenset[str], Shape] = {}
    for table in tables(data, "link", LabFileError):
        pair, shape = _link(table, names)
        if pair in links:
            what = f"between {' and '.join(sorted(pair))}" if pair else "for all pairs"
            raise LabFileError(f"{table.where}: there is a link {what} already; keep one")
        links[pair] = shape
    return LabConfig(tuple(devices), links, data, folder)


def _device(table: Table, folder: Path) -> LabDevice:
    table.check_keys(_DEVICE_KEYS)
    name = table.get("name")
    if not isinstance(name, str) or not is_name(name) or name == OWNER:
        table.refuse(
            "name",
            f"needs 1 to {MAX_NAME} letters, digits, '-', '_' or '.', and not {OWNER!r}, which is this machine",
        )
    sleeps = _sleeps(table)
    preset, presets = table.get("preset"), CATALOG if sleeps else EMULATED
    if preset is not None and (not isinstance(preset, str) or preset not in presets):
        table.refuse("preset", f"needs one of {', '.join(presets)}")
    profile = _profile(table, folder, preset) if sleeps else None
    usual = EMULATED[preset] if preset and not sleeps else None
    memory = table.size("memory") or (usual.memory_bytes if usual else None)
    if sleeps and preset and memory is None:
        memory = CATALOG[preset].memory_bytes
    most = psutil.virtual_memory().total
    if memory is not None and not sleeps and not LEAST_MEMORY <= memory <= most:
        raise LabFileError(
            f"{table.where}.memory needs {LEAST_MEMORY >> 20}MiB to {most / 2**30:.1f}GiB, the memory of this machine;"
            f" got {memory / 2**30:.2f}GiB{f', of the preset {preset}' if 'memory' not in table.values else ''}"
        )
    models = table.get("models")
    if models is not None and (not isinstance(models, str) or not (folder / models).is_dir()):
        table.refuse("models", "needs a folder that exists")
    return LabDevice(
        name=name,
        cpu=table.number("cpu", 0.01, MAX_CORES) or (usual.cpu if usual else None),
        memory_bytes=memory,
        threads=table.whole("threads", 1, MAX_THREADS),
        affinity=_cores(table),
        cache_bytes=table.size("cache_size"),
        models=None if models is None else folder / models,
        preset=preset,
        profile=profile,
        bytes_per_s=_bytes_per_s(table),
    )


def _sleeps(table: Table) -> bool:
    """Return whether a device sleeps. Raises LabFileError for keys that do not apply to such a device."""
    compute = table.get("compute")
    if compute not in (None, _SLEEP):
        table.refuse("compute", f"needs {_SLEEP!r}, or must be left out for a device that computes")
    for key in ("profile", "gpu", "gpu_memory"):
        if compute is None and key in table.values:
            table.refuse(key, f"is for devices with compute = {_SLEEP!r}")
    if "profile" in table.values and "gpu" in table.values:
        table.refuse("gpu", "goes with a preset; a profile has its own")
    if compute == _SLEEP and "cpu" in table.values:
        table.refuse("cpu", "is for devices that compute; a sleeping device uses the times of its preset or profile")
    return compute is not None


def _profile(table: Table, folder: Path, preset: str | None) -> str:
    """Return the profile of a sleeping device, as JSON: a preset's, or that of a file."""
    name = table.get("profile")
    if isinstance(name, str) and name.startswith("{"):  # a program passed the profile itself
        return name
    if (name is None) == (preset is None):
        table.refuse("profile", f"or preset: exactly one of them is needed with compute = {_SLEEP!r}")
    if name is None:
        return json.dumps({"preset": preset} | _gpu(table))
    try:
        path = folder / str(name)
        if path.stat().st_size > _MOST_PROFILE:
            table.refuse("profile", f"needs a file of at most {_MOST_PROFILE >> 20} MiB")
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LabFileError(f"{table.where}.profile: {folder / str(name)} cannot be read: {error}") from None
    return json.dumps(values)


def _gpu(table: Table) -> dict[str, Any]:
    """Return the GPU in the profile of a sleeping device with a preset; {} if it has none."""
    gpu, memory = table.get("gpu"), table.size("gpu_memory")
    if gpu is None and memory is not None:
        table.refuse("gpu_memory", "needs gpu, the preset of the GPU")
    if gpu is None:
        return {}
    if gpu not in CATALOG:
        table.refuse("gpu", f"needs one of {', '.join(CATALOG)}")
    return {"gpu": gpu, "gpu_memory_bytes": memory or CATALOG[str(gpu)].memory_bytes}


def _link(table: Table, names: list[str]) -> tuple[frozenset[str], Shape]:
    table.check_keys(_LINK_KEYS)
    between = table.get("between")
    if between is not None:
        if not isinstance(between, list) or len(between) != 2 or between[0] == between[1]:
            table.refuse("between", "needs two different names")
        for name in between:
            if name not in names and name != OWNER:
                known = ", ".join([OWNER, *names])
                raise LabFileError(f"{table.where}.between names {short_text(name)}; there are {known}")
    shape = Shape(
        delay_s=(table.number("delay_ms", 0, MAX_DELAY_MS) or 0.0) / 1e3,
        jitter_s=(table.number("jitter_ms", 0, MAX_DELAY_MS) or 0.0) / 1e3,
        bytes_per_s=_bytes_per_s(table),
        loss=(table.number("loss", 0, MAX_LOSS) or 0.0) / 100,
    )
    return frozenset(between or ()), shape


def _bytes_per_s(table: Table) -> float | None:
    mbps = table.number("bandwidth_mbps", 0.01, MAX_MBPS)
    return None if mbps is None else mbps * 125_000


def _cores(table: Table) -> tuple[int, ...]:
    value = table.get("affinity")
    if value is None:
        return ()
    try:
        cores = parse_cores(str(value))
        check_cores(cores)
    except ValueError as error:
        raise LabFileError(f"{table.where}.affinity: {error}") from None
    return cores
