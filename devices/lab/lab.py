"""A lab: a cluster emulated on one machine.

Workers are processes with the processor time and memory of their devices; links behave as the lab file states. The
lab process owns all parts of the lab. A packet switch runs if links are shaped. A cleaner waits for the end of the lab
process and removes the rest.

A lab ends with the process that started it, even if that is killed. A lab of `up` stays until `down`. If lab process
and cleaner are both killed, the next lab, or `down`, removes what is left.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from devices.errors import LabError
from devices.files import make_private, try_lock
from devices.lab.cleaner import LAB_FILE, LASTING, clean, lock_file
from devices.lab.config import LabConfig
from devices.lab.network import in_namespace
from devices.lab.process import STATE_FILE
from devices.lab.worker import ROOT
from devices.paths import state_folder
from devices.processes.interpreter import module_command
from devices.sleeping import VARIABLE

_END_S = 60.0


@dataclass(frozen=True)
class LabState:
    """A running lab."""

    folder: Path  # contains a folder for each device, with its log
    values: dict[str, Any]  # state that the lab process reported when all workers answered

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
        """Settings that cannot be enforced here, as `device` (None for all), `what` and `why`."""
        return list(self.values["not_enforced"])

    def command(self, name: str, args: Sequence[str]) -> list[str]:
        """Return a command line that runs `args` in the network of a device, without its limits of time and memory.

        On a sleeping device the command sleeps, too. Raises KeyError if there is no such device.
        """
        device = {device["name"]: device for device in self.values["devices"]}[name]
        if profile := device.get("profile"):
            args = ["env", f"{VARIABLE}={profile}", *args]
        namespace = device["namespace"]
        return list(args) if namespace is None else in_namespace(namespace, args)

    def to_json(self) -> dict[str, Any]:
        """Return the whole state, with the workers that run now. docs/cli/lab.md lists the keys."""
        devices = [{**device, "running": _runs(device["pid"])} for device in self.values["devices"]]
        return {**self.values, "devices": devices}


def _runs(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def labs_folder() -> Path:
    """Return the folder for the files of labs."""
    return state_folder() / "labs"


def up(config: LabConfig, progress: Callable[[int, str], None] = lambda *_: None) -> LabState:
    """Start a lab that stays until `down`. Raises LabError if a lab is running, or if a worker does not start."""
    running = start(config, labs_folder(), LASTING, progress)
    running.keep()
    return running.state


def status() -> LabState | None:
    """Return the lab of `up`, or None if there is none or it is not ready yet."""
    folder = labs_folder() / LASTING
    lock = _try_lock(labs_folder(), LASTING) if labs_folder().is_dir() else None
    if lock is not None:
        os.close(lock)
        return None
    try:
        return LabState(folder, json.loads((folder / STATE_FILE).read_text()))
    except (OSError, ValueError, RecursionError):
        return None


def down() -> bool:
    """End the lab of `up`, and remove what killed labs left. Return whether a lab of `up` existed.

    Raises LabError if the lab does not end.
    """
    base = labs_folder()
    if not base.is_dir():
        return False
    deadline = time.monotonic() + _END_S
    is_lasting = (base / LASTING).exists()
    while (lock := _try_lock(base, LASTING)) is None:
        _terminate(base / LASTING)
        if time.monotonic() > deadline:
            raise LabError(f"the lab in {base / LASTING} does not end within {_END_S:.0f} s; try edge lab down again")
        time.sleep(0.05)
    clean(base / LASTING)
    os.close(lock)
    _sweep(base)
    return is_lasting


def _terminate(folder: Path) -> None:
    """Send SIGTERM to the process of a lab, unless it is ending already."""
    command = _lab_process(folder)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[1 : len(command)] == command[1:]:
                process.terminate()


def _lab_process(folder: Path) -> list[str]:
    return module_command("devices.lab.process", str(folder.absolute()))


class RunningLab:
    """A lab process that this process started."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self.state = LabState(folder, {})

    def wait(self, progress: Callable[[int, str], None]) -> None:
        """Wait until all workers answer. Raises LabError if one does not."""
        for line in self._output:
            message = json.loads(line)
            if "ready" in message:
                self.state = LabState(self._folder, message["ready"])
                return
            if "error" in message:
                raise LabError(message["error"])
            progress(message["answers"], message["name"])
        raise LabError("the lab process ended while it started; its log says why")

    def keep(self) -> None:
        """Let the lab stay when this process ends."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"stay")
        self._process.stdin.close()
        self._output.close()
        self._process.returncode = 0  # as if the lab process had ended, because no code here waits for it any more

    def end(self) -> None:
        """End the lab. Wait until the cleaner, which also holds the other end of the pipe, has removed everything."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with self._output:
            while self._output.read(1 << 16):
                pass
        self._process.wait(_END_S)

    @property
    def _output(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout


def start(config: LabConfig, base: Path, name: str, progress: Callable[[int, str], None]) -> RunningLab:
    """Start a lab with files in `base / name`, and wait until its workers answer.

    progress: called with the number of workers that answer, and the name of the last one.

    Raises LabError if a lab of this name is running, or if a worker does not start.
    """
    make_private(base)
    _sweep(base)
    lock = _try_lock(base, name)
    if lock is None:
        raise LabError("a lab is already running; end it with `edge lab down`")
    folder = base / name
    try:
        if folder.exists():  # left by a lasting lab whose lab process and cleaner were killed
            clean(folder)
        folder.mkdir(mode=0o700)
        settings = {"id": secrets.token_hex(6), "config": config.data, "folder": str(config.folder)}
        (folder / LAB_FILE).write_text(json.dumps(settings))
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*_lab_process(folder), str(lock)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[lock],
                start_new_session=True,
            )
    finally:
        os.close(lock)
    running = RunningLab(process, folder)
    try:
        running.wait(progress)
    except BaseException:
        running.end()
        raise
    return running


def _sweep(base: Path) -> None:
    """Remove what labs left whose lab process and cleaner are gone."""
    for path in base.glob("lab-*.lock"):
        lock = _try_lock(base, path.stem)
        if lock is not None:
            clean(path.with_suffix(""))
            os.close(lock)


def _try_lock(base: Path, name: str) -> int | None:
    """Return a descriptor that holds the lock of a lab, or None if its process or cleaner holds it."""
    handle = os.open(lock_file(base / name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not try_lock(handle):
        os.close(handle)
        return None
    return handle
