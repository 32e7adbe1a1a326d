"""Energy that this machine uses: counters of the processors, their memory and NVIDIA's GPUs, or the battery's power.

Linux has the counters of processors and memory (RAPL, folder `powercap`). NVML has those of GPUs, if the package
`nvidia-ml-py` is installed. Without RAPL, a battery that discharges has the power of the whole machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")
SUPPLIES = Path("/sys/class/power_supply")
_PARTS = ("package", "dram")  # counters to add; other counters are parts of a package, or of the whole machine
_MICRO = 1e-6


class EnergyMeter:
    """Counts joules from one call to the next."""

    def __init__(
        self, folder: Path = POWERCAP, supplies: Path = SUPPLIES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """folder: folder of the counters. supplies: folder of the batteries."""
        self._zones = [zone for zone in sorted(folder.glob("intel-rapl:*")) if _name(zone).startswith(_PARTS)]
        self._batteries, self._clock, self._gpus = sorted(supplies.glob("BAT*")), clock, _gpus()
        self._before, self._gpu_before, self._power_before = self._counters(), self._gpu_joules(), self._power()

    @property
    def source(self) -> str:
        """Measured parts of the machine, for people."""
        if not self._before:
            return "the battery"
        return "the processors, their memory and the GPU" if self._gpus else "the processors and their memory"

    def joules(self) -> float | None:
        """Return the joules since the last call, or None if this machine does not report them to this user."""
        counters, before = self._counters(), self._before
        gpu_joules, gpu_before = self._gpu_joules(), self._gpu_before
        power, power_before = self._power(), self._power_before
        self._before, self._gpu_before, self._power_before = counters, gpu_joules, power
        if not counters or before is None:
            if power is None or power_before is None:
                return None
            return (power[1] + power_before[1]) / 2 * (power[0] - power_before[0])
        used = 0
        for (now, most), (last, _) in zip(counters, before, strict=True):
            used += now - last if now >= last else now - last + most  # a counter begins again at 0 after its most
        return used * _MICRO + gpu_joules - gpu_before

    def _counters(self) -> list[tuple[int, int]] | None:
        """Return (microjoules, most that the counter shows) of each zone, or None if a counter cannot be read."""
        try:
            return [(_number(zone / "energy_uj"), _number(zone / "max_energy_range_uj")) for zone in self._zones]
        except (OSError, ValueError):  # on most systems only root may read them
            return None

    def _gpu_joules(self) -> float:
        """Return the joules of all GPUs since their driver was loaded."""
        return sum(read() for read in self._gpus) / 1e3

    def _power(self) -> tuple[float, float] | None:
        """Return (seconds, watts that batteries give now), or None if no battery discharges."""
        watts = 0.0
        for battery in self._batteries:
            try:
                if (battery / "status").read_text().strip() == "Discharging":
                    watts += _watts(battery)
            except (OSError, ValueError):
                continue
        return (self._clock(), watts) if watts > 0 else None


def _gpus() -> Sequence[Callable[[], int]]:
    """Return functions that read the millijoules of each NVIDIA GPU; () without them, their driver or the package."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        reads = [partial(nvml.nvmlDeviceGetTotalEnergyConsumption, handle) for handle in handles]
        for read in reads:
            read()  # GPUs before Volta do not count
    except nvml.NVMLError:
        return ()
    return reads


def _watts(battery: Path) -> float:
    """Return the watts of a battery. Raises OSError or ValueError if it does not report them."""
    try:
        return _MICRO * abs(_number(battery / "power_now"))
    except OSError:
        return _MICRO * abs(_number(battery / "current_now")) * _MICRO * _number(battery / "voltage_now")


def _name(zone: Path) -> str:
    try:
        return (zone / "name").read_text()
    except OSError:
        return ""


def _number(path: Path) -> int:
    return int(path.read_text())
