"""Figures that took long to measure, remembered on this device by what they depend on, with when that was."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from devices.files import locked, note_unkept, write_whole
from devices.paths import state_folder
from devices.profile import DeviceProfile

MAX_AGE_S = 86400.0  # then it is measured anew: systems are updated, and cases gather dust
BUSY_AGE_S = 60.0  # of what was measured while something else kept a device busy: then it is measured anew
_MOST = 500  # entries of a file


class Remembered:
    """A file of this user's. What cannot be read counts as nothing remembered."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self._path = (folder or state_folder()) / f"{name}.json"

    def get(self, key: str, max_age_s: float = MAX_AGE_S) -> tuple[Any, float] | None:
        """(value, its age in seconds) under a key; None if there is none, or it is older than that."""
        entry: Any = self._read().get(key)
        try:
            age_s = time.time() - float(entry["measured_at"])
            value = entry["value"]
        except (TypeError, KeyError, ValueError, OverflowError):
            return None
        # From the future: a clock was wrong, so its age is not known.
        return (value, age_s) if 0 <= age_s <= max_age_s else None

    def put(self, key: str, value: Any) -> None:
        """Remember a value, which json.dumps takes, as measured now.

        Where it cannot be written, as on a full disk, it is not remembered: what was measured is worth more than that.
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
    """Return the key of remembered figures: what is timed, the processors and limits, and the versions."""
    described = [
        [p.name, p.cpu, p.machine, p.threads, p.cpu_quota, p.gpu, p.system, p.runtime, p.llama_cpp] for p in profiles
    ]
    return hashlib.sha256(json.dumps([list(parts), described]).encode()).hexdigest()
