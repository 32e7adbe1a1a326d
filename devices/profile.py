"""Profiles of devices and of the links between them, as plain values to send and print."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import platform
import shutil
import sys
import typing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from devices import probe
from devices.busy import ProcessorLoad
from devices.machine_cores import CPUINFO, read_line, sysctl
from devices.paths import cache_folder

MAX_TEXT = 200  # characters; profiles come from other machines and are printed on terminals
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # random at each boot; containers see the id of their machine
_BOARD = Path("/proc/device-tree/model")
# Names by (CPU implementer, CPU part) in /proc/cpuinfo: ARM's in servers, boards and phones, Apple's and Ampere's.
_ARM_CORES = {
    **{("0x41", part): f"ARM {name}" for part, name in {
        "0xd03": "Cortex-A53", "0xd04": "Cortex-A35", "0xd05": "Cortex-A55", "0xd07": "Cortex-A57",
        "0xd08": "Cortex-A72", "0xd09": "Cortex-A73", "0xd0a": "Cortex-A75", "0xd0b": "Cortex-A76",
        "0xd0c": "Neoverse-N1", "0xd0d": "Cortex-A77", "0xd40": "Neoverse-V1", "0xd41": "Cortex-A78",
        "0xd44": "Cortex-X1", "0xd46": "Cortex-A510", "0xd47": "Cortex-A710", "0xd48": "Cortex-X2",
        "0xd49": "Neoverse-N2", "0xd4d": "Cortex-A715", "0xd4e": "Cortex-X3", "0xd4f": "Neoverse-V2",
        "0xd80": "Cortex-A520", "0xd81": "Cortex-A720", "0xd82": "Cortex-X4",
    }.items()},
    ("0x61", "0x022"): "Apple M1", ("0x61", "0x023"): "Apple M1", ("0x61", "0x032"): "Apple M2",
    ("0x61", "0x033"): "Apple M2", ("0xc0", "0xac3"): "Ampere-1",
}  # fmt: skip
# Sensors of the processor, by the names of their drivers: Intel, AMD, ARM boards, and general ones.
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "soc-thermal", "acpitz")


@dataclass(frozen=True)
class DeviceProfile:
    """Profile of a device at one time. None means unknown to the system or, for a limit, no limit."""

    name: str
    system: str  # "Linux 6.1", "macOS 14.5"
    machine: str  # "aarch64", "x86_64"
    cpu: str  # the model, or the board if that is more specific: "Raspberry Pi 5 Model B Rev 1.0"
    cores_physical: int
    cores_logical: int
    threads: int  # number of threads with which the worker may compute
    cpu_quota: float | None  # average number of cores that its control groups allow
    memory_total_bytes: int
    memory_available_bytes: int  # memory that is free without swapping, within the limits of the control group
    memory_limit_bytes: int | None  # limit that the owner set for the worker
    gpu: str | None  # the first GPU that llama.cpp uses
    battery_percent: float | None
    plugged: bool | None
    temperature_c: float | None  # the hottest sensor of the processor
    python: str
    runtime: str
    llama_cpp: str
    host: str | None  # id that devices share if they share one machine's cores or one control group's quota
    memory_bytes_per_s: float | None = None  # this and the next: measured rates; None: not measured yet
    flops: float | None = None
    page_round_trip_s: float | None = None  # this and the next: network to a browser's page; None for other devices
    page_bytes_per_s: float | None = None
    gpu_total_bytes: int | None = None  # this and the next: memory of the GPU
    gpu_free_bytes: int | None = None
    load: float | None = None  # share of the processors that all programs used lately, 0 to 1; None: not known yet
    disk_total_bytes: int | None = None  # this and the next: the disk with the cache
    disk_free_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, one for each field."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> DeviceProfile:
        """Return the profile that `to_json` wrote.

        Unknown keys are ignored, because newer versions may add some. Fields that may be None may be missing.

        Raises ValueError with the field's name if a value is not valid.
        """
        if not isinstance(values, dict):
            raise ValueError(f"a device profile needs an object with named fields, got {type(values).__name__}")
        types = _types()
        return cls(**{field: _checked(field, values.get(field), kind) for field, kind in types.items()})


@dataclass(frozen=True)
class LinkProfile:
    """Measurements between devices `a` and `b`. Latencies are one way: half of a round trip."""

    a: str
    b: str
    kind: str  # "tcp", "grpc" or "memory"
    latency_best_s: float
    latency_median_s: float
    latency_p99_s: float
    bandwidth_ab_gbps: float  # gigabits per second from a to b
    bandwidth_ba_gbps: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, one for each field."""
        return dataclasses.asdict(self)


def describe(
    name: str,
    *,
    threads: int | None = None,
    memory_limit_bytes: int | None = None,
    gpu: str | None = None,
    runtime: str = "unknown",
    llama_cpp: str = "unknown",
) -> DeviceProfile:
    """Return the current profile of this machine.

    threads: number of threads; by default one for each physical core this process may use.
    gpu, llama_cpp: name of the GPU and version of llama.cpp, which only a loaded llama.cpp knows.
    """
    logical = psutil.cpu_count() or os.cpu_count() or 1
    battery = _battery()
    return DeviceProfile(
        name=_text(name),
        system=_text(_system()),
        machine=_text(platform.machine()),
        cpu=_text(cpu_name()),
        cores_physical=psutil.cpu_count(logical=False) or logical,  # unknown on some ARM boards
        cores_logical=logical,
        threads=threads or probe.default_threads(),
        cpu_quota=probe.cpu_quota(),
        memory_total_bytes=int(psutil.virtual_memory().total),
        memory_available_bytes=probe.available_memory(),
        memory_limit_bytes=memory_limit_bytes,
        gpu=None if gpu is None else _text(gpu),
        battery_percent=None if battery is None else round(float(battery.percent), 1),
        plugged=None if battery is None or battery.power_plugged is None else bool(battery.power_plugged),
        temperature_c=temperature(),
        python=platform.python_version(),
        runtime=_text(runtime),
        llama_cpp=_text(llama_cpp),
        host=host_id(),
        load=_load(),
        **_disk(),
    )


@lru_cache(1)
def _types() -> dict[str, Any]:
    return typing.get_type_hints(DeviceProfile)


@lru_cache(1)
def _processor_load() -> ProcessorLoad:
    return ProcessorLoad()


def _load() -> float | None:
    share = _processor_load().share()
    return None if share is None else round(share, 3)


def _disk() -> dict[str, int]:
    """Return the sizes of the disk with this device's cache, or {} if they cannot be read."""
    folder = cache_folder()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return {}
    return {"disk_total_bytes": usage.total, "disk_free_bytes": usage.free}


def host_id() -> str | None:
    """Return an id that processes share if they share cores, or None if the system has no boot id.

    It is a digest of the boot id and of the control group with a CPU quota, and reveals nothing else.
    """
    start = sysctl("kern.bootsessionuuid") if sys.platform == "darwin" else read_line(_BOOT_ID)
    return hashlib.sha256(f"edge host {start} {probe.quota_group()}".encode()).hexdigest()[:32] if start else None


def cpu_name() -> str:
    """Return the processor's model or, on small boards, the board, which is more specific than "ARMv8 Processor"."""
    if sys.platform == "darwin" and (brand := sysctl("machdep.cpu.brand_string")):
        return brand
    lines = _cpuinfo()
    # "Model" is the board (Raspberry Pi). x86 has "model", a number, in addition to "model name".
    for name in (lines.get("Model"), _board(), lines.get("Hardware"), lines.get("model name"), _arm_part(lines)):
        if name:
            return name
    return platform.processor() or platform.machine() or "unknown"


def temperature() -> float | None:
    """Return the temperature of the processor's hottest sensor in degrees Celsius, or None without a sensor."""
    groups = sensors()
    for name in _CPU_SENSORS:
        # Sensors that are not connected read zero or absurd values.
        readings = [s.current for s in groups.get(name, []) if s.current is not None and 0 < s.current < 150]
        if readings:
            return round(float(max(readings)), 1)
    return None


def sensors() -> dict[str, list[Any]]:
    """Return the temperatures of this machine's sensors, as psutil reports them; {} if there are none."""
    try:
        return dict(psutil.sensors_temperatures())
    except (AttributeError, OSError):  # this system has no sensors, or their files cannot be read
        return {}


def _battery() -> Any:
    try:
        return psutil.sensors_battery()
    except (AttributeError, OSError):
        return None


def _system() -> str:
    if sys.platform == "darwin":
        name, version = "macOS", platform.mac_ver()[0]
    else:
        name, version = platform.system(), ".".join(platform.release().split(".")[:2])
    return f"{name} {version}"


def _cpuinfo() -> dict[str, str]:
    """Return the entries of /proc/cpuinfo; for keys that occur for each core, the first core's value."""
    try:
        lines = CPUINFO.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return {}
    info: dict[str, str] = {}
    for line in lines:
        key, colon, value = line.partition(":")
        if colon and value.strip():
            info.setdefault(key.strip(), value.strip())
    return info


def _arm_part(lines: dict[str, str]) -> str:
    """Return the name of an ARM core, or its numbers if it is unknown; "" if it is not an ARM core."""
    maker, part = lines.get("CPU implementer"), lines.get("CPU part")
    if not maker or not part:
        return ""
    return _ARM_CORES.get((maker, part), f"ARM core {part} of maker {maker}")


def _board() -> str:
    """Return the board's name from the device tree; "" if there is none."""
    try:
        return _BOARD.read_text(errors="replace").strip("\0 \n")  # the file ends with a zero byte
    except OSError:
        return ""


def _text(value: str) -> str:
    """Return the text cut and cleaned so that `_checked` accepts it."""
    return "".join(c if c.isprintable() else "?" for c in value)[:MAX_TEXT]


def _checked(field: str, value: Any, kind: Any) -> Any:
    """Return `value` if it has the annotated type `kind`. Raises ValueError with the field's name otherwise."""
    allowed = typing.get_args(kind) or (kind,)
    if value is None and type(None) in allowed:
        return None
    if str in allowed and isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable():
        return value
    if bool in allowed and isinstance(value, bool):
        return value
    if int in allowed and isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    # JSON has one kind of number: 80 is as good as 80.0.
    if float in allowed and isinstance(value, int | float) and not isinstance(value, bool) and _finite(value):
        return float(value)
    names = " or ".join("null" if type_ is type(None) else type_.__name__ for type_ in allowed)
    raise ValueError(f"device profile: {field} needs {names} in a plausible range, got {repr(value)[:60]}")


def _finite(value: float) -> bool:
    return abs(value) < 1e15 and math.isfinite(value)
