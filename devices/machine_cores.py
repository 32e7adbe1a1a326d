"""Kinds of cores of this machine, and the instruction sets with which ggml computes faster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

_DEVICES = Path("/sys/devices")
CPUINFO = Path("/proc/cpuinfo")
# A core slower than this share of the fastest is an efficiency core. Cores of one kind differ by less, because some may
# clock a bit higher than others. Cores of different kinds differ by more.
_SLOWER = 0.75
_LEAST_CACHE = 16 << 20  # bytes; macOS, and many boards, do not report their last-level cache
# Instruction sets with kernels in ggml: the name in /proc/cpuinfo, and the common name.
_FLAGS = {
    "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "bmi2": "bmi2", "avx_vnni": "avx_vnni",
    "avx512f": "avx512f", "avx512vbmi": "avx512_vbmi", "avx512_vnni": "avx512_vnni", "avx512_bf16": "avx512_bf16",
    "amx_int8": "amx_int8",
    "asimd": "neon", "asimdhp": "fp16", "asimddp": "dotprod", "i8mm": "i8mm", "bf16": "bf16", "sve": "sve",
    "sve2": "sve2", "sme": "sme",
}  # fmt: skip
# The same for macOS: keys of sysctl with the value 1. Every Apple processor has neon, every Intel Mac has f16c.
_SYSCTLS = {
    "hw.optional.neon": "neon", "hw.optional.arm.FEAT_FP16": "fp16", "hw.optional.arm.FEAT_DotProd": "dotprod",
    "hw.optional.arm.FEAT_I8MM": "i8mm", "hw.optional.arm.FEAT_BF16": "bf16", "hw.optional.arm.FEAT_SME": "sme",
    "hw.optional.avx1_0": "avx", "hw.optional.avx2_0": "avx2", "hw.optional.fma": "fma", "hw.optional.f16c": "f16c",
    "hw.optional.avx512f": "avx512f",
}  # fmt: skip


def core_kinds(devices: Path = _DEVICES) -> tuple[int, int]:
    """Return the numbers of (performance cores, efficiency cores). Cores of one kind count as performance cores.

    devices: folder in which Linux describes its hardware.
    """
    if sys.platform == "darwin":
        performance, efficiency = (_sysctl_number(f"hw.perflevel{i}.physicalcpu") for i in (0, 1))
        if performance:
            return performance, efficiency
    cores = _cores(devices / "system" / "cpu")
    if not cores:
        return _physical(), 0
    # Processors that Intel's hybrid chips list as efficiency cores. Their clocks alone do not show it.
    slow = set(_numbers(read_line(devices / "cpu_atom" / "cpus"))) if (devices / "cpu_core").exists() else set()
    if not slow:
        speeds = {cpu: _speed(devices / "system" / "cpu" / f"cpu{cpu}") for cpus in cores for cpu in cpus}
        fastest = max(speeds.values())
        slow = {cpu for cpu, speed in speeds.items() if 0 < speed < _SLOWER * fastest}
    efficiency = sum(1 for cpus in cores if cpus <= slow)
    return len(cores) - efficiency, efficiency


def cache_bytes(devices: Path = _DEVICES) -> int:
    """Return the bytes of a core's largest cache, at least _LEAST_CACHE.

    Systems on a chip have that much behind the caches that they report.
    devices: as for `core_kinds`.
    """
    sizes = [read_line(path) for path in (devices / "system" / "cpu").glob("cpu[0-9]*/cache/index*/size")]
    return max(_LEAST_CACHE, *(int(size[:-1]) << 10 for size in sizes if size[:-1].isdigit() and size[-1] == "K"), 0)


def instruction_sets(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """Return the instruction sets of this processor for which ggml has kernels: "avx2", "neon", "i8mm" and so on.

    If cores differ, return the sets that all cores have.
    cpuinfo: file in which Linux describes its processors.
    """
    if sys.platform == "darwin":
        names, flags = _SYSCTLS, {key for key in _SYSCTLS if _sysctl_number(key) == 1}
    else:
        pairs = [line.partition(":") for line in read_line(cpuinfo).splitlines()]
        by_core = [set(value.split()) for key, _, value in pairs if key.strip() in ("flags", "Features")]
        names, flags = _FLAGS, set.intersection(*by_core) if by_core else set()
    return tuple(name for flag, name in names.items() if flag in flags)


def knowable_sets() -> frozenset[str]:
    """Return the sets that `instruction_sets` looks for. The absence of other sets is not reported."""
    return frozenset((_SYSCTLS if sys.platform == "darwin" else _FLAGS).values())


def _physical() -> int:
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def _cores(cpus: Path) -> list[frozenset[int]]:
    """Return the logical processors of each physical core that is online; [] if Linux does not list them."""
    cores = set()
    for folder in cpus.glob("cpu[0-9]*"):
        siblings = read_line(folder / "topology" / "thread_siblings_list")
        if siblings and folder.name[3:].isdigit():  # an offline processor has no siblings
            cores.add(frozenset(_numbers(siblings)))
    return sorted(cores, key=min)


def _speed(cpu: Path) -> int:
    """Return the relative speed of a processor: the kernel's capacity rating, or its highest clock, or 0."""
    return read_number(cpu / "cpu_capacity") or read_number(cpu / "cpufreq" / "cpuinfo_max_freq")


def _numbers(text: str) -> Iterable[int]:
    """Yield 0, 2 and 3 for "0,2-3"."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            yield from range(int(first), int(last if last.isdigit() else first) + 1)


def read_line(path: Path) -> str:
    """Return the text of a system file; "" if the file does not exist."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int:
    """Return the number in a system file; 0 if it has none."""
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
