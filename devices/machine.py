"""What this machine is and can do, whatever the model: its profile, kinds of cores, and how fast memory and disk are.

What changes from moment to moment is read each time. What takes time to measure is kept for a day, for the processor,
cores, quota, memory and folder it was measured with.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from devices import probe
from devices.files import write_whole
from devices.machine_cores import core_kinds, instruction_sets
from devices.machine_disk import disk_read_rate
from devices.paths import cache_folder, state_folder
from devices.profile import MAX_TEXT, DeviceProfile

MAX_AGE_S = 86_400.0  # what was measured longer ago is measured anew
_MOST_RATE = 1e15  # bytes a second; nothing is as fast
_THERMAL = ("normal", "hot", "critical")


@dataclass(frozen=True)
class Rate:
    """How fast something is read, measured."""

    bytes_per_s: float
    how: str  # of a disk: as `disk_read_rate` says; of memory: by how many threads
    measured_at: float  # Unix seconds

    @property
    def age_s(self) -> float:
        """Seconds since; negative where the clock was set back."""
        return time.time() - self.measured_at

    @classmethod
    def from_json(cls, values: Any) -> Rate:
        """What `dataclasses.asdict` gave; ValueError for what it cannot have given. Unknown keys are ignored."""
        if not isinstance(values, dict):
            raise ValueError(f"a rate is an object with named fields, not {type(values).__name__}")
        how = values.get("how")
        if not isinstance(how, str) or len(how) > MAX_TEXT or not how.isprintable():
            raise ValueError(f"a rate: how should be a short text, not {repr(how)[:60]}")
        speed = _number(values, "bytes_per_s", _MOST_RATE)
        return cls(speed, how, _number(values, "measured_at", 1e12))


@dataclass(frozen=True)
class Machine:
    """One machine. None: the system does not say, or it was not measured, and `not_measured` says why."""

    profile: DeviceProfile
    cores_performance: int  # physical cores
    cores_efficiency: int
    cpu_quota: float | None  # cores that may be kept busy; None: all
    instruction_sets: tuple[str, ...]  # that ggml has kernels for
    thermal: str | None  # "normal", "hot" or "critical", as the sensors' own limits have it
    memory: Rate | None
    disk: Rate | None
    disk_folder: str  # on the disk that was measured
    not_measured: dict[str, str] = field(default_factory=dict)  # "memory" or "disk": why

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Machine:
        """The machine that `to_json` wrote; ValueError, with the field's name, for what it cannot have written. Unknown
        keys are ignored."""
        if not isinstance(values, dict):
            raise ValueError(f"a machine is an object with named fields, not {type(values).__name__}")
        sets, why, thermal = (values.get(key) for key in ("instruction_sets", "not_measured", "thermal"))
        if not isinstance(sets, (list, tuple)) or not all(isinstance(one, str) for one in sets):
            raise ValueError("a machine: instruction_sets should be a list of texts")
        if not isinstance(why, dict) or not all(isinstance(text, str) for pair in why.items() for text in pair):
            raise ValueError("a machine: not_measured should be texts by name")
        if thermal is not None and thermal not in _THERMAL:
            raise ValueError(f"a machine: thermal should be null or one of {', '.join(_THERMAL)}")
        memory, disk = (None if values.get(key) is None else Rate.from_json(values[key]) for key in ("memory", "disk"))
        quota = values.get("cpu_quota")
        return cls(
            profile=DeviceProfile.from_json(values.get("profile")),
            cores_performance=int(_number(values, "cores_performance", 1e6)),
            cores_efficiency=int(_number(values, "cores_efficiency", 1e6)),
            cpu_quota=None if quota is None else _number(values, "cpu_quota", 1e6),
            instruction_sets=tuple(sets),
            thermal=thermal,
            memory=memory,
            disk=disk,
            disk_folder=str(values.get("disk_folder", ""))[:4096],
            not_measured=dict(why),
        )


def describe_machine(profile: DeviceProfile, *, folder: Path | None = None, fresh: bool = False) -> Machine:
    """This machine, whose profile was made just now. Takes up to some seconds where something has to be measured.

    folder: on the disk to be measured, by default where slices are kept. fresh: measure all of it now, whatever is
    known.
    """
    folder = (folder or cache_folder()).absolute()
    performance, efficiency = core_kinds()
    known = _Known(profile, folder, fresh)
    memory = known.rate("memory", lambda: _memory_rate(profile.threads))
    disk = known.rate("disk", lambda: _disk_rate(folder))
    known.keep()
    return Machine(
        profile=profile,
        cores_performance=performance,
        cores_efficiency=efficiency,
        cpu_quota=probe.cpu_quota(),
        instruction_sets=instruction_sets(),
        thermal=_thermal(),
        memory=memory,
        disk=disk,
        disk_folder=str(folder),
        not_measured=known.failed,
    )


class _Known:
    """What was measured before, and what is now."""

    def __init__(self, profile: DeviceProfile, folder: Path, fresh: bool) -> None:
        self._path = state_folder() / "machine.json"
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else profile.cores_logical
        depends = (profile.cpu, usable, profile.threads, probe.cpu_quota(), profile.memory_total_bytes, str(folder))
        self._key = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:32]
        self._all: dict[str, dict[str, Rate]] = {}
        self._changed = False
        self.failed: dict[str, str] = {}
        with suppress(OSError, ValueError, AttributeError):  # a file that makes no sense is as good as none
            found = json.loads(self._path.read_bytes())
            self._all = {
                key: {what: rate for what, one in rates.items() if _is_recent(rate := Rate.from_json(one))}
                for key, rates in found.items()
                if not (fresh and key == self._key)
            }

    def rate(self, what: str, measure: Callable[[], tuple[float, str]]) -> Rate | None:
        """What is known, or is measured now; None where it cannot be, and `failed` then says why."""
        if found := self._all.get(self._key, {}).get(what):
            return found
        try:
            bytes_per_s, how = measure()
        except OSError as error:
            self.failed[what] = str(error.strerror or error)
            return None
        rate = Rate(bytes_per_s, how, time.time())
        self._all.setdefault(self._key, {})[what] = rate
        self._changed = True
        return rate

    def keep(self) -> None:
        """Remember what was measured. Where that cannot be, it is measured again next time."""
        if not self._changed:
            return
        text = json.dumps(
            {
                key: {what: dataclasses.asdict(rate) for what, rate in one.items()}
                for key, one in self._all.items()
                if one
            }
        )
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(self._path, text.encode())


def _is_recent(rate: Rate) -> bool:
    return 0 <= rate.age_s < MAX_AGE_S


def _memory_rate(threads: int) -> tuple[float, str]:
    """Bytes a second, and by how many threads. OSError where too little memory is free to tell."""
    rate = probe.memory_bandwidth_gbps(threads) * 1e9
    return rate, f"{threads} thread{'s' if threads != 1 else ''}"


def _disk_rate(folder: Path) -> tuple[float, str]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return disk_read_rate(folder)


def _thermal() -> str | None:
    """How near the sensors are to their own limits; None where there are none, or they have no limits."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError):  # not on this system; or its files are closed to us
        return None
    worst = None
    for one in (one for found in sensors.values() for one in found):
        for level, limit in enumerate((one.high, one.critical), start=1):
            if one.current and limit and 0 < limit < 150:  # others are not connected, or have no limit
                worst = max(worst or 0, level if one.current >= limit else 0)
    return None if worst is None else _THERMAL[worst]


def _number(values: dict[str, Any], key: str, most: float) -> float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise ValueError(f"{key} should be a number from 0 to {most:g}, not {repr(value)[:60]}")
    return float(value)
