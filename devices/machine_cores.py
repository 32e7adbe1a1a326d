"""Kinds of cores of a machine, and the instruction sets with which ggml computes faster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

_DEVICES = Path("/sys/devices")
CPUINFO = Path("/proc/cpuinfo")
# A core below this part of the fastest one's speed is an efficiency core. Cores of one kind differ by less, as some may
# clock a bit higher than others; kinds differ by more.
_SLOWER = 0.75
_LEAST_CACHE = 16 << 20  # bytes; macOS, and many boards, do not show their last cache
# What /proc/cpuinfo calls the sets that ggml has kernels for, and what they are called in general, if otherwise.
_FLAGS = {
    "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "bmi2": "bmi2", "avx_vnni": "avx_vnni",
    "avx512f": "avx512f", "avx512vbmi": "avx512_vbmi", "avx512_vnni": "avx512_vnni", "avx512_bf16": "avx512_bf16",
    "amx_int8": "amx_int8",
    "asimd": "neon", "asimdhp": "fp16", "asimddp": "dotprod", "i8mm": "i8mm", "bf16": "bf16", "sve": "sve",
    "sve2": "sve2", "sme": "sme",
}  # fmt: skip
# The same for macOS: keys of sysctl that are 1. Every Apple processor has neon, and every Intel one they used f16c.
_SYSCTLS = {
    "hw.optional.neon": "neon", "hw.optional.arm.FEAT_FP16": "fp16", "hw.optional.arm.FEAT_DotProd": "dotprod",
    "hw.optional.arm.FEAT_I8MM": "i8mm", "hw.optional.arm.FEAT_BF16": "bf16", "hw.optional.arm.FEAT_SME": "sme",
    "hw.optional.avx1_0": "avx", "hw.optional.avx2_0": "avx2", "hw.optional.fma": "fma", "hw.optional.f16c": "f16c",
    "hw.optional.avx512f": "avx512f",
}  # fmt: skip


def core_kinds(devices: Path = _DEVICES) -> tuple[int, int]:
    """(performance, efficiency): physical cores of each kind. Where all are of one kind, they are performance cores.

    devices: what Linux shows of its hardware.
    """
    if sys.platform == "darwin":
        performance, efficiency = (_sysctl_number(f"hw.perflevel{i}.physicalcpu") for i in (0, 1))
        return (performance, efficiency) if performance else (_physical(), 0)
    cores = _cores(devices / "system" / "cpu")
    if not cores:
        return _physical(), 0
    # Processors that Intel's hybrids list as efficiency cores: their clocks alone do not tell.
    slow = set(_numbers(read_line(devices / "cpu_atom" / "cpus"))) if (devices / "cpu_core").exists() else set()
    if not slow:
        speeds = {cpu: _speed(devices / "system" / "cpu" / f"cpu{cpu}") for cpus in cores for cpu in cpus}
        fastest = max(speeds.values())
        slow = {cpu for cpu, speed in speeds.items() if 0 < speed < _SLOWER * fastest}
    efficiency = sum(1 for cpus in cores if cpus <= slow)
    return len(cores) - efficiency, efficiency


def cache_bytes(devices: Path = _DEVICES) -> int:
    """Return the bytes of the largest cache of a core, and no fewer than systems on a chip have behind those that they
    show. devices: as for `core_kinds`."""
    sizes = [read_line(path) for path in (devices / "system" / "cpu").glob("cpu[0-9]*/cache/index*/size")]
    return max(_LEAST_CACHE, *(int(size[:-1]) << 10 for size in sizes if size[:-1].isdigit() and size[-1] == "K"), 0)


def instruction_sets(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """The sets this processor has, of those that ggml has kernels for: "avx2", "avx512_vnni", "neon", "i8mm" and so on.

    Where cores differ, those that all have. cpuinfo: what Linux shows of its processors.
    """
    if sys.platform == "darwin":
        return tuple(name for key, name in _SYSCTLS.items() if _sysctl_number(key) == 1)
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return ()
    pairs = [line.partition(":") for line in lines]
    flags = [set(value.split()) for key, _, value in pairs if key.strip() in ("flags", "Features")]
    common = set.intersection(*flags) if flags else set()
    return tuple(name for flag, name in _FLAGS.items() if flag in common)


def knowable_sets() -> frozenset[str]:
    """The sets whose absence this system tells: those that `instruction_sets` looks for."""
    return frozenset((_SYSCTLS if sys.platform == "darwin" else _FLAGS).values())


def _physical() -> int:
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def _cores(cpus: Path) -> list[frozenset[int]]:
    """The logical processors of each physical core that is there; empty if Linux does not say."""
    cores = set()
    for folder in cpus.glob("cpu[0-9]*"):
        siblings = read_line(folder / "topology" / "thread_siblings_list")
        if siblings and folder.name[3:].isdigit():  # an offline processor has no siblings
            cores.add(frozenset(_numbers(siblings)))
    return sorted(cores, key=min)


def _speed(cpu: Path) -> int:
    """Return the relative speed of a processor: the kernel's capacity rating, or its highest clock; 0 if neither is
    known."""
    return read_number(cpu / "cpu_capacity") or read_number(cpu / "cpufreq" / "cpuinfo_max_freq")


def _numbers(text: str) -> Iterable[int]:
    """0, 2 and 3 of "0,2-3"."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            yield from range(int(first), int(last if last.isdigit() else first) + 1)


def read_line(path: Path) -> str:
    """Return what a file of the system says; "" where it is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def read_number(path: Path) -> int:
    """Return the number in a file of the system; 0 where it has none."""
    text = read_line(path)
    return int(text) if text.isdigit() else 0


def sysctl(key: str) -> str:
    """Return the value of a sysctl key on macOS; "" if there is none."""
    try:
        done = subprocess.run(["/usr/sbin/sysctl", "-n", key], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _sysctl_number(key: str) -> int:
    text = sysctl(key)
    return int(text) if text.isdigit() else 0
