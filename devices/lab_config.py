"""What a lab consists of: devices and links, from a lab.toml or a dictionary of the same shape.

Data and checks only; `devices/lab.py` makes it real.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from devices.cores import check_cores, cores_text, parse_cores
from devices.errors import LabFileError
from devices.lab_presets import PRESETS
from devices.names import MAX_NAME, is_name
from devices.shaper import Shape

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OWNER = "owner"  # in links: this machine itself, where commands such as `edge chat --workers` run
MAX_DEVICES = 64
MAX_THREADS = 512
MAX_CORES = 4096
MAX_DELAY_MS = 5_000.0
MAX_MBPS = 1e6
MAX_LOSS = 50.0  # per cent; of more TCP makes nothing
LEAST_MEMORY = 128 << 20  # a worker with nothing loaded takes about as much
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([KMGT]?)(i?)B", re.IGNORECASE)
_DEVICE_KEYS = ("name", "preset", "cpu", "memory", "threads", "affinity", "cache_size", "models")
_LINK_KEYS = ("between", "delay_ms", "jitter_ms", "bandwidth_mbps", "loss")


@dataclass(frozen=True)
class LabDevice:
    """A worker of its own, and what it may use. None: no limit."""

    name: str
    cpu: float | None = None  # cores
    memory_bytes: int | None = None
    threads: int | None = None  # None: as many as cpu, rounded up
    affinity: tuple[int, ...] = ()
    cache_bytes: int | None = None
    models: Path | None = None
    preset: str | None = None


@dataclass(frozen=True)
class LabLink:
    """What the way between two devices is like, in both directions."""

    shape: Shape
    between: tuple[str, str] | None = None  # None: every pair, the owner's own end too


@dataclass(frozen=True)
class LabConfig:
    """A lab."""

    devices: tuple[LabDevice, ...]
    links: tuple[LabLink, ...] = ()

    @property
    def shaped(self) -> bool:
        """Whether any link is worse than loopback."""
        return any(link.shape != Shape() for link in self.links)

    def shape(self, a: str, b: str) -> Shape:
        """The way between two devices, or a device and `OWNER`: the link that names them, or that of all pairs."""
        named = {frozenset(link.between or ()): link.shape for link in self.links}
        return named.get(frozenset((a, b)), named.get(frozenset(), Shape()))


def read_lab(path: Path) -> LabConfig:
    """The lab of a TOML file. LabFileError says what is wrong in it and where; OSError where it cannot be read."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of TOML, of UTF-8, or a number of thousands of digits
        raise LabFileError(f"{path} is no TOML: {error}") from error
    try:
        return parse_lab(data, path.absolute().parent)
    except LabFileError as error:
        raise LabFileError(f"{path}: {error}") from None


def parse_lab(data: Mapping[str, Any], folder: Path | None = None) -> LabConfig:
    """The lab of a dictionary shaped as lab.toml is. LabFileError says what is wrong in it and where.

    folder: what relative paths in it are relative to; by default the current one.
    """
    _known(data, ("device", "link"), "the file")
    devices = [_device(table, where, folder or Path()) for table, where in _tables(data, "device")]
    if not 1 <= len(devices) <= MAX_DEVICES:
        raise LabFileError(f"a lab has 1 to {MAX_DEVICES} devices, each a [[device]]; got {len(devices)}")
    names = [device.name for device in devices]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise LabFileError(f"device[{i}].name: another device is called {_text(name)}; names differ")
    links = [_link(table, where, names) for table, where in _tables(data, "link")]
    pairs = [frozenset(link.between or ()) for link in links]
    for i, pair in enumerate(pairs):
        if pair in pairs[:i]:
            what = f"between {' and '.join(sorted(pair))}" if pair else "for all pairs"
            raise LabFileError(f"link[{i}]: there is a link {what} already; give one")
    return LabConfig(tuple(devices), tuple(links))


def lab_to_json(config: LabConfig) -> dict[str, Any]:
    """A dictionary that `parse_lab` makes the same lab of."""
    devices = [
        {
            "name": one.name,
            "preset": one.preset,
            "cpu": one.cpu,
            "memory": None if one.memory_bytes is None else f"{one.memory_bytes}B",
            "threads": one.threads,
            "affinity": cores_text(one.affinity) or None,
            "cache_size": None if one.cache_bytes is None else f"{one.cache_bytes}B",
            "models": None if one.models is None else str(one.models),
        }
        for one in config.devices
    ]
    links = [
        {
            "between": None if link.between is None else list(link.between),
            "delay_ms": link.shape.delay_s * 1e3,
            "jitter_ms": link.shape.jitter_s * 1e3,
            "bandwidth_mbps": None if link.shape.bytes_per_s is None else link.shape.bytes_per_s / 125_000,
            "loss": link.shape.loss * 100,
        }
        for link in config.links
    ]
    return {kind: [_given(table) for table in tables] for kind, tables in (("device", devices), ("link", links))}


def _given(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def _tables(data: Mapping[str, Any], key: str) -> Iterable[tuple[Mapping[str, Any], str]]:
    tables = data.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise LabFileError(f"{key} needs to be tables, each below a line [[{key}]]")
    return [(table, f"{key}[{i}]") for i, table in enumerate(tables)]


def _known(table: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in table:
        if key not in keys:
            raise LabFileError(f"{where} has an unknown key {str(key)[:80]!r}; known are {', '.join(keys)}")


def _device(table: Mapping[str, Any], where: str, folder: Path) -> LabDevice:
    _known(table, _DEVICE_KEYS, where)
    name = table.get("name")
    if not isinstance(name, str) or not is_name(name) or name == OWNER:
        raise LabFileError(
            f"{where}.name needs 1 to {MAX_NAME} letters, digits, '-', '_' or '.', and not {OWNER!r},"
            f" which is this machine; got {_text(name)}"
        )
    preset = table.get("preset")
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        raise LabFileError(f"{where}.preset needs one of {', '.join(PRESETS)}; got {_text(preset)}")
    usual = PRESETS[preset] if preset else None
    memory = _size(table, "memory", where) or (usual.memory_bytes if usual else None)
    most = psutil.virtual_memory().total
    if memory is not None and not LEAST_MEMORY <= memory <= most:
        raise LabFileError(
            f"{where}.memory needs {LEAST_MEMORY >> 20}MiB to {most / 2**30:.1f}GiB, all that this machine has; got"
            f" {memory / 2**30:.2f}GiB{f', of the preset {preset}' if 'memory' not in table else ''}"
        )
    threads = _number(table, "threads", where, 1, MAX_THREADS)
    if threads is not None and threads != int(threads):
        raise LabFileError(f"{where}.threads needs a whole number; got {threads}")
    models = table.get("models")
    if models is not None and (not isinstance(models, str) or not (folder / models).is_dir()):
        raise LabFileError(f"{where}.models needs a folder that exists; got {_text(models)}")
    return LabDevice(
        name=name,
        cpu=_number(table, "cpu", where, 0.01, MAX_CORES) or (usual.cpu if usual else None),
        memory_bytes=memory,
        threads=None if threads is None else int(threads),
        affinity=_cores(table, where),
        cache_bytes=_size(table, "cache_size", where),
        models=None if models is None else (folder / models).absolute(),
        preset=preset,
    )


def _link(table: Mapping[str, Any], where: str, names: list[str]) -> LabLink:
    _known(table, _LINK_KEYS, where)
    between = table.get("between")
    if between is not None:
        if not isinstance(between, list) or len(between) != 2 or between[0] == between[1]:
            raise LabFileError(f"{where}.between needs two different names; got {_text(between)}")
        for name in between:
            if name not in names and name != OWNER:
                raise LabFileError(f"{where}.between names {_text(name)}; there are {', '.join([OWNER, *names])}")
    mbps = _number(table, "bandwidth_mbps", where, 0.01, MAX_MBPS)
    shape = Shape(
        delay_s=(_number(table, "delay_ms", where, 0, MAX_DELAY_MS) or 0.0) / 1e3,
        jitter_s=(_number(table, "jitter_ms", where, 0, MAX_DELAY_MS) or 0.0) / 1e3,
        bytes_per_s=None if mbps is None else mbps * 125_000,
        loss=(_number(table, "loss", where, 0, MAX_LOSS) or 0.0) / 100,
    )
    return LabLink(shape, None if between is None else (between[0], between[1]))


def _text(value: object) -> str:
    """What a file has, short enough for one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _number(table: Mapping[str, Any], key: str, where: str, least: float, most: float) -> float | None:
    value = table.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise LabFileError(f"{where}.{key} needs a number from {least:g} to {most:g}; got {_text(value)}")
    return float(value)


def _size(table: Mapping[str, Any], key: str, where: str) -> int | None:
    value = table.get(key)
    if value is None:
        return None
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    size = 0
    if match:
        base = 1024 if match[3] else 1000
        size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if not 0 < size < 2**60:
        raise LabFileError(f'{where}.{key} needs a size such as "1GiB" or "900MiB"; got {_text(value)}')
    return size


def _cores(table: Mapping[str, Any], where: str) -> tuple[int, ...]:
    value = table.get("affinity")
    if value is None:
        return ()
    try:
        cores = parse_cores(str(value))
        check_cores(cores)
    except ValueError as error:
        raise LabFileError(f"{where}.affinity: {error}") from None
    return cores
