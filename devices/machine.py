"""Profile of this machine, independent of a model: kinds of cores, and speeds of memory and disk.

Values that change all the time are read at each call. Measured speeds are stored for a day, for the processor, cores,
quota, memory and folder with which they were measured.
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

from devices import probe
from devices.files import make_private
from devices.machine_cores import core_kinds, instruction_sets
from devices.machine_disk import disk_read_rate
from devices.paths import cache_folder
from devices.profile import MAX_TEXT, DeviceProfile, sensors
from devices.remembered import Remembered

_MOST_RATE = 1e15  # bytes per second; a larger value is a mistake
_THERMAL = ("normal", "hot", "critical")


@dataclass(frozen=True)
class Rate:
    """Measured reading speed."""

    bytes_per_s: float
    how: str  # for a disk, the way of `disk_read_rate`; for memory, the number of threads
    measured_at: float  # Unix time in seconds

    @property
    def age_s(self) -> float:
        """Age in seconds; negative if the clock was set back."""
        return time.time() - self.measured_at

    @classmethod
    def from_json(cls, values: Any) -> Rate:
        """Read an object that `dataclasses.asdict` wrote. Unknown keys are ignored. Raises ValueError."""
        if not isinstance(values, dict):
            raise ValueError(f"a rate needs an object with named fields, got {type(values).__name__}")
        how = values.get("how")
        if not isinstance(how, str) or len(how) > MAX_TEXT or not how.isprintable():
            raise ValueError(f"a rate: how needs a short text, got {repr(how)[:60]}")
        speed = _number(values, "bytes_per_s", _MOST_RATE)
        return cls(speed, how, _number(values, "measured_at", 1e12))


@dataclass(frozen=True)
class Machine:
    """One machine. None means unknown to the system or not measured; `not_measured` then has the reason."""

    profile: DeviceProfile
    cores_performance: int  # number of physical cores
    cores_efficiency: int
    cpu_quota: float | None  # cores that this process may keep busy; None without a quota
    instruction_sets: tuple[str, ...]  # instruction sets for which ggml has kernels
    thermal: str | None  # "normal", "hot" or "critical", by the sensors' own limits
    memory: Rate | None
    disk: Rate | None
    disk_folder: str  # folder on the measured disk
    not_measured: dict[str, str] = field(default_factory=dict)  # reason by "memory" or "disk"

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, with the age of each rate."""
        values = dataclasses.asdict(self)
        for name, rate in (("memory", self.memory), ("disk", self.disk)):
            if rate is not None:
                values[name]["age_s"] = round(rate.age_s, 3)
        return values


def describe_machine(profile: DeviceProfile, *, folder: Path | None = None, fresh: bool = False) -> Machine:
    """Return the description of this machine. Takes up to some seconds if something has to be measured.

    profile: the current profile of this machine.
    folder: folder on the disk to measure; by default the folder of model slices.
    fresh: measure everything now, even if stored values are recent.
    """
    folder = (folder or cache_folder()).absolute()
    performance, efficiency = core_kinds()
    rates = _Rates(profile, folder, fresh)
    memory = rates.rate("memory", lambda: _memory_rate(profile.threads))
    disk = rates.rate("disk", lambda: _disk_rate(folder))
    return Machine(
        profile=profile,
        cores_performance=performance,
        cores_efficiency=efficiency,
        cpu_quota=probe.cpu_quota(),
        instruction_sets=instruction_sets(),
        thermal=thermal_level(),
        memory=memory,
        disk=disk,
        disk_folder=str(folder),
        not_measured=rates.failed,
    )


class _Rates:
    def __init__(self, profile: DeviceProfile, folder: Path, fresh: bool) -> None:
        self._remembered, self._fresh = Remembered("machine"), fresh
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else profile.cores_logical
        depends = (profile.cpu, usable, profile.threads, probe.cpu_quota(), profile.memory_total_bytes, str(folder))
        self._key = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:32]
        self.failed: dict[str, str] = {}

    def rate(self, what: str, measure: Callable[[], tuple[float, str]]) -> Rate | None:
        """Return the stored rate, or measure it now. Return None if that fails; `failed` then has the reason."""
        key = f"{self._key} {what}"
        remembered = None if self._fresh else self._remembered.get(key)
        with suppress(ValueError):  # the stored value is of another version
            if remembered is not None:
                return Rate.from_json(remembered[0])
        try:
            bytes_per_s, how = measure()
        except OSError as error:
            self.failed[what] = str(error.strerror or error)
            return None
        rate = Rate(bytes_per_s, how, time.time())
        self._remembered.put(key, dataclasses.asdict(rate))
        return rate


def _memory_rate(threads: int) -> tuple[float, str]:
    """Return (bytes per second, number of threads as text). Raises OSError if too little memory is free."""
    rate = probe.memory_bandwidth_gbps(threads) * 1e9
    return rate, f"{threads} thread{'s' if threads != 1 else ''}"


def _disk_rate(folder: Path) -> tuple[float, str]:
    make_private(folder)
    return disk_read_rate(folder)


def thermal_level() -> str | None:
    """Return the worst level of the sensors by their own limits, or None without sensors or limits."""
    worst = None
    for sensor in (sensor for group in sensors().values() for sensor in group):
        for level, limit in enumerate((sensor.high, sensor.critical), start=1):
            if sensor.current and limit and 0 < limit < 150:  # other limits mean a sensor that is not connected
                worst = max(worst or 0, level if sensor.current >= limit else 0)
    return None if worst is None else _THERMAL[worst]


def _number(values: dict[str, Any], key: str, most: float) -> float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise ValueError(f"{key} needs a number from 0 to {most:g}, got {repr(value)[:60]}")
    return float(value)
