"""Checks of this machine: memory, disk, cores, clock speed, heat, open files, worker port."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from devices import probe
from devices.machine import thermal_level
from devices.machine_cores import read_line, read_number
from devices.names import DEFAULT_PORT
from edge.profiling.doctor.findings import NOTE, OK, PROBLEM, Verdict
from quant.text import bytes_text, counted

# The bundled model takes 100 MiB in addition to the runtime's 150 MiB. A model of a billion parameters takes a
# gigabyte.
LEAST_MEMORY, ENOUGH_MEMORY = 256 << 20, 1 << 30
LEAST_DISK, ENOUGH_DISK = 64 << 20, 5 << 30
ENOUGH_FILES = 1024  # a worker opens three files per connection, and each rank some dozens
BUSY_SHARE = 0.5  # fraction of the cores; a higher load is reported
_CAPPED = 0.9  # fraction of a core's highest clock; a lower limit is reported
_CPUS = Path("/sys/devices/system/cpu")
_PI_THROTTLED = Path("/sys/devices/platform/soc/soc:firmware/get_throttled")
# With these drivers "powersave" is the usual governor and does not slow down computation.
_OWN_GOVERNORS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")


@dataclass(frozen=True)
class Memory:
    """Current memory figures in bytes."""

    available: int  # for this process: without swapping, within the limits of its control groups
    machine_available: int  # available on the machine
    total: int
    swap_total: int
    swap_used: int


@dataclass(frozen=True)
class Folder:
    """Folder for files of edge."""

    path: str
    error: str  # reason why no file can be created in the folder; empty if one can
    free_bytes: int


@dataclass(frozen=True)
class Cores:
    """Number of cores and usable threads."""

    logical: int
    threads: int  # default number of threads
    quota: float | None  # CPU quota of control groups
    load: float | None  # average number of running or waiting threads over a minute; None: unknown


@dataclass(frozen=True)
class Clocks:
    """Clock limits of the cores."""

    governors: frozenset[tuple[str, str]]  # (governor, driver)
    cap: float  # lowest limit of a core, as a fraction of its highest clock


@dataclass(frozen=True)
class Heat:
    """Temperature level of the processor, and signs of throttling."""

    level: str | None  # "normal", "hot", "critical"; None: no sensor
    throttled: int  # number of times since boot
    low_voltage: bool  # current state, as a Raspberry Pi reports it


@dataclass(frozen=True)
class Port:
    """Port of workers."""

    number: int
    free: bool
    holder: str = ""  # program that listens on the port, if visible
    is_worker: bool = False  # True: that program is an edge worker


def read_memory() -> Memory:
    """Read the current memory figures."""
    machine, swap = psutil.virtual_memory(), psutil.swap_memory()
    return Memory(probe.available_memory(), machine.available, machine.total, swap.total, swap.used)


def memory(memory: Memory) -> Verdict:
    """Check that a model has room in memory."""
    seen = f"{bytes_text(memory.available)} free of {bytes_text(memory.total)}"
    if memory.available < memory.machine_available:
        seen += f"; a control group limits it, the machine has {bytes_text(memory.machine_available)} free"
    if memory.swap_total:
        seen += f"; {bytes_text(memory.swap_used)} of {bytes_text(memory.swap_total)} swap in use"
    close = "close programs, raise the control group's limit, or give edge a budget with --memory"
    if memory.available < LEAST_MEMORY:
        return Verdict(PROBLEM, seen, close)
    if memory.available < ENOUGH_MEMORY or memory.swap_used > memory.swap_total / 2 > 0:
        return Verdict(NOTE, seen, close)
    return Verdict(OK, seen)


def read_folder(folder: Path) -> Folder:
    """Check that a folder is writable, or its nearest existing parent, because it is created on first use."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    error = ""
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0")
    except OSError as failure:
        error = failure.strerror or str(failure)
    return Folder(str(folder), error, shutil.disk_usage(existing).free)


def folder(folder: Folder) -> Verdict:
    """Check that a folder is writable and has free space."""
    seen = f"{bytes_text(folder.free_bytes)} free for {folder.path}"
    if folder.error:
        return Verdict(
            PROBLEM, f"{folder.path} cannot be written: {folder.error}", f"make {folder.path} yours to write"
        )
    if folder.free_bytes < LEAST_DISK:
        return Verdict(PROBLEM, seen, "remove files; edge model list shows those of edge, edge model rm removes them")
    if folder.free_bytes < ENOUGH_DISK:
        return Verdict(NOTE, seen, "models and slices need more; edge model list shows what is kept of them")
    return Verdict(OK, seen)


def read_cores() -> Cores:
    """Read the cores and the current load."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # missing on older Androids
        load = None
    return Cores(psutil.cpu_count() or 1, probe.default_threads(), probe.cpu_quota(), load)


def cores(cores: Cores) -> Verdict:
    """Report the number of computing cores."""
    seen = f"{cores.logical} logical, {counted(cores.threads, 'thread')} by default"
    if cores.quota is not None and cores.quota < cores.logical:
        seen += f"; control groups limit it to {cores.quota:g} cores"
        return Verdict(NOTE, seen, "raise the CPU quota of the container or service, if all cores are to compute")
    return Verdict(OK, seen)


def load(cores: Cores) -> Verdict:
    """Check that other programs leave the cores free."""
    if cores.load is None:
        return Verdict(OK, "this system does not report it")
    seen = f"{cores.load:.1f} threads ran or waited in the last minute, for {cores.logical} logical cores"
    if cores.load > BUSY_SHARE * cores.logical:
        return Verdict(NOTE, seen, "end other programs that compute, or give edge fewer --threads")
    return Verdict(OK, seen)


def read_clocks(cpus: Path = _CPUS) -> Clocks | None:
    """Return the clock limits that Linux reports, or None if it reports none.

    cpus: folder of the processors in /sys.
    """
    folders = [path for path in cpus.glob("cpu[0-9]*/cpufreq") if read_line(path / "scaling_governor")]
    if not folders:
        return None
    limits = [(read_number(path / "scaling_max_freq"), read_number(path / "cpuinfo_max_freq")) for path in folders]
    governors = ((read_line(path / "scaling_governor"), read_line(path / "scaling_driver")) for path in folders)
    return Clocks(frozenset(governors), min((limit / most for limit, most in limits if limit and most), default=1.0))


def clocks(clocks: Clocks | None) -> Verdict:
    """Check that cores may run at their highest clock."""
    if clocks is None:
        return Verdict(OK, "this system does not report them")
    seen = ", ".join(f"{governor} ({driver or 'no driver named'})" for governor, driver in sorted(clocks.governors))
    if any(governor == "powersave" and driver not in _OWN_GOVERNORS for governor, driver in clocks.governors):
        return Verdict(NOTE, f"cores stay at their lowest clock: {seen}", "sudo cpupower frequency-set -g schedutil")
    if clocks.cap < _CAPPED:
        what = f"cores are held at {clocks.cap:.0%} of their highest clock: {seen}"
        return Verdict(NOTE, what, "sudo cpupower frequency-set -u with the highest clock, or leave the power profile")
    return Verdict(OK, seen)


def read_heat(cpus: Path = _CPUS, pi: Path = _PI_THROTTLED) -> Heat:
    """Read the current temperature level.

    cpus: folder of the processors in /sys.
    pi: throttling file of a Raspberry Pi.
    """
    counts = [read_number(path) for path in cpus.glob("cpu[0-9]*/thermal_throttle/core_throttle_count")]
    try:
        # bit 0: low voltage; bit 2: slowed down now; bit 18: slowed down since boot
        bits = int(read_line(pi) or "0", 16)
    except ValueError:
        bits = 0
    return Heat(thermal_level(), max([*counts, int(bool(bits & (1 << 2 | 1 << 18)))]), bool(bits & 1))


def heat(heat: Heat) -> Verdict:
    """Check that neither heat nor low voltage slows this device down."""
    seen = f"temperature is {heat.level}" if heat.level else "no sensor reports a temperature"
    if heat.throttled:
        seen += f"; slowed down {counted(heat.throttled, 'time')} since the start"
    cool = "improve its cooling and clean its fans; plans measured while it is hot do not hold when it is cool"
    if heat.low_voltage:
        return Verdict(PROBLEM, f"{seen}; the supply gives too little voltage", "use the supply made for this board")
    if heat.level == "critical":
        return Verdict(PROBLEM, seen, cool)
    return Verdict(NOTE, seen, cool) if heat.level == "hot" or heat.throttled else Verdict(OK, seen)


def read_files() -> int:
    """Return the maximum number of open files of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def files(most: int) -> Verdict:
    """Check that enough files may be open for many connections. most: limit; below 0 if there is none."""
    seen = "no limit on open files" if most < 0 else f"{most} files may be open"
    if 0 <= most < ENOUGH_FILES:
        return Verdict(NOTE, seen, "ulimit -n 4096, or LimitNOFILE=4096 in the unit of the service")
    return Verdict(OK, seen)


def read_port(number: int = DEFAULT_PORT) -> Port:
    """Return whether a worker could listen on a port, and the program that already does."""
    with socket.socket() as probing:
        probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probing.bind(("", number))
            return Port(number, free=True)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    try:
        pids = [c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == number and c.pid]
        process = psutil.Process(pids[0]) if pids else None
        name, command = (process.name(), process.cmdline()) if process else ("", [])
    except (psutil.Error, OSError):  # other users' processes may be hidden, and Android hides all ports
        return Port(number, free=False)
    # Without the command line, which may hold a secret such as a token.
    return Port(number, False, f"process {pids[0]}, {name[:80]}" if pids else "", _is_worker(command))


def port(port: Port) -> Verdict:
    """Check that the port is free for a worker, or used by one."""
    if port.free:
        return Verdict(OK, f"port {port.number} is free for edge worker")
    holder = port.holder or "a process that this user cannot see"
    if port.is_worker:
        return Verdict(OK, f"an edge worker has port {port.number} ({holder})")
    return Verdict(
        NOTE, f"port {port.number} is taken by {holder}", "edge worker --listen with another port, or end it"
    )


def _is_worker(command: Sequence[str]) -> bool:
    return "worker" in command and any(Path(word).name == "edge" or word == "apps.cli" for word in command)
