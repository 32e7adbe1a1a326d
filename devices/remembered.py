"""Stored results of slow measurements, by the conditions they depend on, with the time of measurement."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from devices.files import locked, note_unkept, write_whole
from devices.paths import state_folder
from devices.profile import DeviceProfile

MAX_AGE_S = 86400.0  # then it is measured again: systems are updated, and cooling gets worse
KEPT_AGE_S = 30 * MAX_AGE_S  # the same for speeds of devices and links
_MOST = 500  # entries in a file


class Remembered:
    """A file of stored values. A file that cannot be read counts as empty."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self._path = (folder or state_folder()) / f"{name}.json"

    def get(self, key: str, max_age_s: float = MAX_AGE_S) -> tuple[Any, float] | None:
        """Return (value, age in seconds) of a key, or None if there is none or it is older than `max_age_s`.

        max_age_s: math.inf also accepts a time in the future, which has a negative age.
        """
        entry: Any = self._read().get(key)
        try:
            age_s = time.time() - float(entry["measured_at"])
            value = entry["value"]
        except (TypeError, KeyError, ValueError, OverflowError):
            return None
        # A time in the future comes from a wrong clock, so the age is unknown.
        return (value, age_s) if 0 <= age_s <= max_age_s or max_age_s == math.inf else None

    def keys(self, max_age_s: float = MAX_AGE_S) -> list[str]:
        """Return the keys of entries that are not older than `max_age_s`, in the order in which they were stored."""
        return [key for key in self._read() if self.get(key, max_age_s) is not None]

    def put(self, key: str, value: Any) -> None:
        """Store a value that json.dumps accepts, with the current time.

        If the file cannot be written, as on a full disk, the value is not stored and no error is raised.
        """
        try:
            with locked(self._path.parent):
                entries = self._read()
                entries.pop(key, None)
                entries[key] = {"measured_at": time.time(), "value": value}
                write_whole(self._path, json.dumps(dict(list(entries.items())[-_MOST:])).encode())
        except OSError as error:
            note_unkept(self._path.parent, error)

    def forget(self, key: str) -> None:
        """Remove the entry of a key."""
        with suppress(OSError), locked(self._path.parent):
            entries = self._read()
            if entries.pop(key, None) is not None:
                write_whole(self._path, json.dumps(entries).encode())

    def _read(self) -> dict[str, Any]:
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}


def key_of(parts: Sequence[str], *profiles: DeviceProfile) -> str:
    """Return a key for stored measurements, from the measured parts and the profiles of the devices."""
    described = [
        [p.name, p.cpu, p.machine, p.threads, p.cpu_quota, p.gpu, p.system, p.runtime, p.llama_cpp] for p in profiles
    ]
    return hashlib.sha256(json.dumps([list(parts), described]).encode()).hexdigest()
