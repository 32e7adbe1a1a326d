"""A lab that is up, as its supervisor describes it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from devices.lab.network import in_namespace
from devices.sleeping import VARIABLE


@dataclass(frozen=True)
class LabState:
    """A lab that is up."""

    folder: Path  # each device has one in it, with its log
    values: dict[str, Any]  # by the supervisor, once all workers answered

    @property
    def addresses(self) -> dict[str, str]:
        """HOST:PORT of each device's worker, by name."""
        return {device["name"]: device["address"] for device in self.values["devices"]}

    @property
    def shaped(self) -> bool:
        """True if links are shaped. Workers then listen beyond loopback, and commands need --insecure."""
        return bool(self.values["shaped"])

    @property
    def not_enforced(self) -> list[dict[str, Any]]:
        """Settings that could not be enforced here: each `device` (None: all), `what` and `why`."""
        return list(self.values["not_enforced"])

    def pid(self, name: str) -> int:
        """The process of a device's worker. KeyError if there is no such device."""
        return int({device["name"]: device["pid"] for device in self.values["devices"]}[name])

    def command(self, name: str, args: Sequence[str]) -> list[str]:
        """A command line that runs another one in the network of a device, without its limits; where the device sleeps,
        the command does, too. KeyError if there is no such device."""
        device = {device["name"]: device for device in self.values["devices"]}[name]
        if profile := device.get("profile"):
            args = ["env", f"{VARIABLE}={profile}", *args]
        namespace = device["namespace"]
        return list(args) if namespace is None else in_namespace(namespace, args)

    def to_json(self) -> dict[str, Any]:
        """Return the whole state, with which workers run now; docs/cli/lab.md has the keys."""
        devices = [{**device, "running": _runs(device["pid"])} for device in self.values["devices"]]
        return {**self.values, "devices": devices}


def _runs(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False
