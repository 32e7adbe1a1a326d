"""Cleaner of a lab: a process that outlives the lab and removes everything the lab left on the machine.

    python -m devices.lab.cleaner FOLDER

It waits for the end of its standard input, which only the lab process holds open. If the cleaner is killed too,
the next `edge lab up`, `down` or `Lab` does its work. It finds the parts of a lab by the lab's id, which is in the
environment of its processes and in the names of its control groups and namespaces.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from devices.lab.control_group import remove_groups
from devices.lab.network import remove_namespaces

VARIABLE = "EDGE_LAB"  # the lab's id, in the environment of every process of a lab
LAB_FILE = "lab.json"
LASTING = "up"  # name of the lab of `edge lab up`; each user can have one
_END_S = 15.0


def prefix(lab: str) -> str:
    """Return the prefix of a lab's control groups and namespaces."""
    return f"edge-lab-{lab}"


def clean(folder: Path) -> None:
    """Kill and remove everything that belongs to the lab of a folder, and the folder.

    The caller holds the lab's lock. Does nothing if there is no lab.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):  # the lab ended before it created anything
        lab = str(json.loads((folder / LAB_FILE).read_text())["id"])
        if lab.isalnum():
            _kill(lab)
            remove_groups(prefix(lab))
            remove_namespaces(prefix(lab))
    shutil.rmtree(folder, ignore_errors=True)
    if folder.name != LASTING:  # no other process will wait for the lock of this lab
        lock_file(folder).unlink(missing_ok=True)


def lock_file(folder: Path) -> Path:
    """Return the file whose lock the lab process and the cleaner of a lab hold."""
    return folder.with_name(f"{folder.name}.lock")


def _kill(lab: str) -> None:
    deadline = time.monotonic() + _END_S
    while (processes := lab_processes(lab)) and time.monotonic() < deadline:
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)


def lab_processes(lab: str) -> list[psutil.Process]:
    """Return all processes that a lab started, and their descendants."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # the process has ended, or belongs to another user
            if process.environ().get(VARIABLE) == lab:
                processes.append(process)
    return processes


def main(folder: Path) -> None:
    """Wait for the end of the lab, then remove what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 1 << 10):
        pass
    clean(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
