"""The lab process: it owns a lab. It creates the network and starts the workers.

    python -m devices.lab.process FOLDER LOCK    (started by devices/lab/lab.py)

Its standard input comes from the process that started it. When that input ends, the lab ends, unless it contained
"stay". On standard output the lab process reports progress, one JSON object in each line. When it ends for any reason,
so does the standard input of the cleaner (devices/lab/cleaner.py), which then removes everything. Workers are killed
without a chance to end: they leave nothing that matters after the lab.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from devices.errors import LabError
from devices.files import write_whole
from devices.lab.cleaner import LAB_FILE, VARIABLE, prefix
from devices.lab.config import OWNER, parse_lab
from devices.lab.network import LabNetwork, NoNetwork, remove_namespaces
from devices.lab.worker import ROOT, LabWorker
from devices.processes.interpreter import module_command

STATE_FILE = "state.json"
START_S = 60.0  # time for all workers to listen
_LOOK_S = 0.02
_IDLE_LOOK_S = 0.5
_END_S = 5.0
_FAST = 50e6  # bytes per second that one connection to this machine's own end should reach


class _Ended(Exception):
    """The owner of this lab has ended, or asked it to end."""


class LabProcess:
    """A lab while it runs."""

    def __init__(self, folder: Path) -> None:
        """Read the configuration from `folder`; `run` starts the lab."""
        settings = json.loads((folder / LAB_FILE).read_text())
        self._folder = folder
        self._prefix = prefix(settings["id"])
        self._config = parse_lab(settings["config"], Path(settings["folder"]))
        self._environment = {**os.environ, VARIABLE: settings["id"]}
        self._network: LabNetwork | None = None
        self._workers: list[LabWorker] = []
        self._notes: list[dict[str, str | None]] = []
        self._stays = False

    def run(self) -> None:
        """Start the lab, report it, and keep it until `_Ended`. Raises LabError if it cannot start."""
        try:
            if self._config.shaped:
                self._network = self._made_network()
            for number, device in enumerate(self._config.devices):
                folder, group = self._folder / device.name, f"{self._prefix}-{number}"
                self._workers.append(LabWorker(device, folder, group, self._network, self._environment))
            self._wait_until_all_answer()
            for worker in self._workers:
                worker.limit_cpu()
            state = self._state()
            write_whole(self._folder / STATE_FILE, json.dumps(state).encode())
            _say({"ready": state})
            while True:
                self._look(_IDLE_LOOK_S)
        finally:
            self._end()

    def _made_network(self) -> LabNetwork | None:
        """Return the network, or None, with a note, if it cannot be created."""
        try:
            network = LabNetwork(self._prefix, self._config, self._environment)
        except NoNetwork as error:
            remove_namespaces(self._prefix)
            self._note("links", f"they are not shaped, devices are plain processes on loopback: {error}")
            return None
        for device in self._config.devices:
            self._note_own_end(device.name)
        return network

    def _note_own_end(self, name: str) -> None:
        """Note settings of this machine that may limit a long link. A lab must not change them."""
        shape = self._config.shape(OWNER, name)
        if not shape.delay_s:
            return
        most = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])
        reached = most / (2 * shape.delay_s)
        if reached < min(_FAST, shape.bytes_per_s or _FAST):
            why = (
                f"this machine's net.ipv4.tcp_wmem allows {most / 2**20:.1f} MiB in flight to {name} over one"
                f" connection, {reached / 1e6:.0f} MB/s; connections between devices allow more"
            )
            self._note("links", why, name)

    def _wait_until_all_answer(self) -> None:
        deadline = time.monotonic() + START_S
        left = list(self._workers)
        while left:
            self._look(_LOOK_S)
            for worker in list(left):
                name = worker.device.name
                if worker.process.poll() is not None:
                    raise LabError(f"the worker {name} ended while it started; its last output: {worker.last_words()}")
                if worker.answers():
                    left.remove(worker)
                    _say({"answers": len(self._workers) - len(left), "name": name})
                elif time.monotonic() > deadline:
                    raise LabError(f"the worker {name} does not answer after {START_S:.0f} s: {worker.last_words()}")

    def _look(self, seconds: float) -> None:
        """Wait for up to `seconds` for input from the process that started this one. Raises _Ended if it has ended."""
        if select.select([] if self._stays else [sys.stdin], [], [], seconds)[0]:
            if b"stay" not in os.read(sys.stdin.fileno(), 100):
                raise _Ended
            self._stays = True
        for worker in self._workers:
            if worker.process.returncode is None and worker.process.poll() is not None:
                print(f"the worker {worker.device.name} ended: {worker.process.returncode}", file=sys.stderr)

    def _note(self, setting: str, why: str, device: str | None = None) -> None:
        self._notes.append({"device": device, "what": setting, "why": why})

    def _state(self) -> dict[str, Any]:
        """Return the state of the lab as docs/cli/lab.md describes it."""
        cores, cores_used = os.cpu_count() or 1, sum(device.cpu or 0 for device in self._config.devices)
        if cores_used > cores:
            why = f"all devices together have {cores_used:g} cores, this machine {cores}: they slow each other down"
            self._note("cpu", why)
        return {
            "supervisor_pid": os.getpid(),
            "owner_address": self._network.addresses[OWNER] if self._network else "127.0.0.1",
            "shaped": self._network is not None,
            "devices": [worker.to_json() for worker in self._workers],
            "not_enforced": self._notes + [note for worker in self._workers for note in worker.notes],
        }

    def _end(self) -> None:
        """Kill all processes that this one started, and wait for their end. The cleaner removes the rest."""
        processes = [worker.process for worker in self._workers]
        if self._network is not None:
            processes.append(self._network.switch)
        for process in processes:
            process.kill()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)


def _say(message: dict[str, Any]) -> None:
    with suppress(OSError):  # the reader has ended
        print(json.dumps(message), flush=True)


def _start_cleaner(folder: Path, lock: int) -> None:
    """Start a cleaner that waits for the end of this process, which closes the other end of its pipe.

    The cleaner also holds the lab's lock and our standard output. So the process that started us sees the end of our
    output only when everything is removed.
    """
    cleaner_end, _ours = os.pipe()
    command = module_command("devices.lab.cleaner", str(folder))
    subprocess.Popen(command, cwd=ROOT, stdin=cleaner_end, pass_fds=[lock], start_new_session=True)
    os.close(cleaner_end)


def main(folder: Path, lock: int) -> None:
    """Own the lab of a folder until it ends. lock: descriptor of the lab's lock, which this process holds."""
    _start_cleaner(folder, lock)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def on_signal(*_: object) -> None:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the end
        raise _Ended

    for number in signals:
        signal.signal(number, on_signal)
    try:
        LabProcess(folder).run()
    except _Ended:
        pass
    except Exception as error:
        # The process that started us gets every error, because the folder with our log will be removed.
        _say({"error": str(error) or type(error).__name__})
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
