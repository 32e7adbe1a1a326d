"""A running device of a lab: its worker's process, its limits and its address."""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devices.lab.config import LabDevice
from devices.lab.control_group import ControlGroup, NoGroups
from devices.lab.network import LabNetwork
from devices.processes.interpreter import module_command
from devices.sleeping import VARIABLE

PORT = 7070  # port if links are shaped, because each device then has its own address
ROOT = Path(__file__).parents[2]  # folder from which `apps` can be imported
_WORKER_SHARE = 0.9  # share of a device's memory for the worker, so that it pages before the kernel kills it
_CONNECT_S = 30.0  # enough for the slowest link of a lab
_LISTENS = re.compile(r" INFO listening .*address=(\S+)")
_LAST_WORDS = 500


class LabWorker:
    """A started worker. `notes` lists limits that could not be enforced, as `device`, `what` and `why`."""

    def __init__(
        self, device: LabDevice, folder: Path, group: str, network: LabNetwork | None, environment: Mapping[str, str]
    ) -> None:
        """Start the worker.

        folder: folder to create for its files.
        group: name for its control group.
        network: None for loopback.
        """
        self.device = device
        self.notes: list[dict[str, str | None]] = []
        self.address = ""  # HOST:PORT, once the worker answers
        self._namespace = network.namespaces[device.name] if network else None
        self.log = folder / "log"
        folder.mkdir()
        self._group = self._limited(group)
        own = {f"XDG_{kind.upper()}_HOME": str(folder / kind) for kind in ("config", "cache", "state")}
        self._profile = None if device.profile is None else folder / "profile.json"
        if self._profile is not None and device.profile is not None:
            self._profile.write_text(device.profile)
            own[VARIABLE] = str(self._profile)
        command = module_command("apps.cli", "worker", *self._options(network))
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                network.command(device.name, command) if network else command,
                cwd=ROOT,
                env={**environment, **own, "TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=self._group.add if self._group else None,  # safe, because the lab process has no threads
            )

    def answers(self) -> bool:
        """Return whether the worker can be reached; if so, `address` is set."""
        match = None if self.address else _LISTENS.search(self.log.read_text(errors="replace"))
        if match:
            host, _, port = match[1].rpartition(":")
            try:
                socket.create_connection((host, int(port)), _CONNECT_S).close()
            except OSError:
                return False
            self.address = match[1]
        return bool(self.address)

    def last_words(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-_LAST_WORDS:]

    def limit_cpu(self) -> None:
        """Limit the processor time of the worker to that of its device."""
        if self._group is not None and self.device.cpu is not None:
            self._group.limit_cpu(self.device.cpu)

    def to_json(self) -> dict[str, Any]:
        """Return the worker's part of `edge lab up --json`."""
        return {
            "name": self.device.name,
            "address": self.address,
            "namespace": self._namespace,
            "pid": self.process.pid,
            "cpu": self.device.cpu,
            "memory_bytes": self.device.memory_bytes,
            "preset": self.device.preset,
            "profile": None if self._profile is None else str(self._profile),
            "log": str(self.log),
        }

    def _limited(self, name: str) -> ControlGroup | None:
        """Return a control group with the limits of the device, or None. The worker's own options hold in any case."""
        device, cores = self.device, os.cpu_count() or 1
        if device.cpu is not None and device.cpu > cores:
            self._note("cpu", f"the device has {device.cpu:g} cores, but this machine only {cores}")
        if (device.cpu is None and device.memory_bytes is None) or device.profile is not None:
            return None
        try:
            # The worker starts with the whole machine, so that the lab starts quickly; `limit_cpu` follows.
            return ControlGroup(name, cores=None if device.cpu is None else cores, memory=device.memory_bytes)
        except NoGroups as error:
            if device.cpu is not None:
                self._note("cpu", f"only the number of threads is limited: {error}")
            if device.memory_bytes is not None:
                self._note("memory", f"only the worker's own --memory limits it: {error}")
            return None

    def _note(self, setting: str, why: str) -> None:
        self.notes.append({"device": self.device.name, "what": setting, "why": why})

    def _options(self, network: LabNetwork | None) -> list[str]:
        device, threads = self.device, self.device.threads
        if threads is None and device.cpu is not None:
            threads = max(1, min(math.ceil(device.cpu), os.cpu_count() or 1))
        share = _WORKER_SHARE if device.profile is None else 1.0  # a sleeping device loads nothing into memory
        memory = None if device.memory_bytes is None else int(device.memory_bytes * share)
        values = {
            "--listen": f"{network.addresses[device.name]}:{PORT}" if network else "127.0.0.1:0",
            "--name": device.name,
            "--threads": threads,
            "--memory": None if memory is None else f"{memory}B",
            "--affinity": ",".join(map(str, device.affinity)) or None,
            "--cache-size": None if device.cache_bytes is None else f"{device.cache_bytes}B",
            "--models": device.models,
        }
        options = [str(part) for pair in values.items() if pair[1] is not None for part in pair]
        return [*options, "--insecure", "--no-announce"]
