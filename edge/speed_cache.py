"""What devices were measured to take for a model's parts, remembered by what that depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from devices.profile import DeviceProfile
from edge.remembered import MAX_AGE_S, Remembered
from partition.errors import PlanError
from partition.speeds import DeviceSpeed, speed_of, speed_to_json


class SpeedCache:
    """Speeds by key."""

    def __init__(self, folder: Path | None = None) -> None:
        self._remembered = Remembered("speeds", folder)

    def get(self, key: str, device: str, name: str, max_age_s: float = MAX_AGE_S) -> DeviceSpeed | None:
        """What is remembered and no older, of a device called so now; None where it has to be measured."""
        found = self._remembered.get(key, max_age_s)
        if found is None:
            return None
        value, age_s = found
        try:
            return speed_of(value, device, name, age_s)
        except PlanError:  # of another version
            return None

    def put(self, key: str, speed: DeviceSpeed) -> None:
        """Remember it as measured now, where it can be written."""
        self._remembered.put(key, speed_to_json(speed))

    def forget(self, key: str) -> None:
        """Measure it next time."""
        self._remembered.forget(key)


def key_of(parts: Sequence[str], *profiles: DeviceProfile) -> str:
    """What figures depend on: what is timed, processors and what may be used of them, versions."""
    said = [
        [p.name, p.cpu, p.machine, p.threads, p.cpu_quota, p.gpu, p.system, p.runtime, p.llama_cpp] for p in profiles
    ]
    return hashlib.sha256(json.dumps([list(parts), said]).encode()).hexdigest()
