"""Devices that a person leaves out: paused ones, and removed ones. They stay so when the server starts again."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from devices.remembered import Remembered

_FILE = "left-out-devices"


@dataclass(frozen=True)
class LeftOut:
    """One device that is left out."""

    name: str
    address: str  # canonical address, or "" if it was not known
    removed: bool  # False: paused
    since: float  # Unix seconds


class LeftOutDevices:
    """All devices that are left out, by name."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: folder of the file; None: the folder of states."""
        self._file = Remembered(_FILE, folder)

    def load(self) -> dict[str, LeftOut]:
        """Return the devices by name. Damaged entries are left out."""
        entries: dict[str, LeftOut] = {}
        for name in self._file.keys(math.inf):
            value, age_s = self._file.get(name, math.inf) or ({}, 0.0)
            try:
                address, removed = value["address"], value["removed"]
            except (TypeError, KeyError):
                continue
            if isinstance(address, str) and isinstance(removed, bool):
                entries[name] = LeftOut(name, address, removed, time.time() - age_s)
        return entries

    def put(self, entry: LeftOut) -> None:
        """Leave a device out."""
        self._file.put(entry.name, {key: asdict(entry)[key] for key in ("address", "removed")})

    def forget(self, name: str) -> None:
        """Use a device again."""
        self._file.forget(name)
