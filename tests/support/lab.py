"""Start a lab for a `with` block.

with Lab(read_lab(path)) as lab:
    print(lab.addresses)    # {"pi": "10.213.0.2:7070", ...}
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from devices.lab.config import LabConfig
from devices.lab.lab import LabState, RunningLab, labs_folder, start


class Lab:
    """A lab for the time of a `with` block."""

    def __init__(
        self, config: LabConfig, folder: Path | None = None, progress: Callable[[int, str], None] = lambda *_: None
    ) -> None:
        """Nothing starts before the block. folder: for the devices' files while it is up, by default this user's state
        folder. progress: called with the number of workers that answer, and the name of the last."""
        self._config = config
        self._base = folder or labs_folder()
        self._progress = progress
        self._running: RunningLab | None = None

    def __enter__(self) -> Lab:
        """LabError where a worker does not start."""
        self._running = start(self._config, self._base, f"lab-{secrets.token_hex(6)}", self._progress)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, and wait until nothing is left."""
        if self._running is not None:
            self._running.end()
            self._running = None

    @property
    def state(self) -> LabState:
        """All about it."""
        assert self._running is not None, "a lab is up inside its `with` block"
        return self._running.state

    @property
    def addresses(self) -> dict[str, str]:
        """HOST:PORT of each device's worker, by name."""
        return self.state.addresses

    @property
    def shaped(self) -> bool:
        """True if links are shaped. Workers then listen beyond loopback, and commands need --insecure."""
        return self.state.shaped

    @property
    def not_enforced(self) -> list[dict[str, Any]]:
        """List what could not be had here: each `device` (None: all), `what` and `why`."""
        return self.state.not_enforced

    def pid(self, name: str) -> int:
        """The process of a device's worker. KeyError where there is no such device."""
        return int({device["name"]: device["pid"] for device in self.state.values["devices"]}[name])

    def command(self, name: str, args: Sequence[str]) -> list[str]:
        """A command line that runs another one in the network of a device, without its limits. KeyError where there is
        no such device."""
        return self.state.command(name, args)

    def log(self, name: str) -> str:
        """All that a device's worker said so far."""
        return (self.state.folder / name / "log").read_text(errors="replace")
