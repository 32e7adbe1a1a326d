"""Allowance of prefix warming: its computing time, and whether this device has energy to spare."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from devices.machine import thermal_level

HOUR_S = 3600.0
_LOOK_S = 5.0  # interval of reading the sensors


def spares_energy() -> bool:
    """Return False on battery power, or if a thermal sensor is at its limit.

    A device without sensors has energy to spare.
    """
    read = getattr(psutil, "sensors_battery", None)
    battery = read() if read is not None else None
    return (battery is None or battery.power_plugged is not False) and thermal_level() in (None, "normal")


class Allowance:
    """Remaining computing time in seconds. It refills evenly over an hour, up to one hour's allowance."""

    def __init__(
        self,
        seconds_per_hour: float,
        clock: Callable[[], float] = time.monotonic,
        spares: Callable[[], bool] = spares_energy,
    ) -> None:
        """clock: returns seconds. spares: returns True if the device has energy to spare."""
        self._most, self._clock, self._spares = seconds_per_hour, clock, spares
        self._left, self._counted_at = seconds_per_hour, clock()
        self._looked: tuple[float, bool] | None = None

    @property
    def is_left(self) -> bool:
        """True if computing is allowed now."""
        return self._count() > 0 and self._has_energy

    def spend(self, seconds: float) -> None:
        """Subtract computing time."""
        self._left = self._count() - seconds

    def _count(self) -> float:
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._counted_at) * self._most / HOUR_S)
        self._counted_at = now
        return self._left

    @property
    def _has_energy(self) -> bool:
        now = self._clock()
        if self._looked is None or now - self._looked[0] >= _LOOK_S:
            self._looked = now, self._spares()
        return self._looked[1]
