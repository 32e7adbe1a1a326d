"""Cleaner of a lab: a process that outlives the lab, however that ended, and removes what it left on the machine.

    python -m devices.lab.cleaner FOLDER

waits for the end of its standard input, which only the lab's supervisor holds, and clears up. Where somebody killed
this process as well, the next `edge lab up`, `down` or `Lab` does it: what belongs to a lab has the lab's id, in the
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

VARIABLE = "EDGE_LAB"  # in the environment of all that a lab starts: its id
LAB_FILE = "lab.json"
LASTING = "up"  # the lab of `edge lab up`; there is one a user
_END_S = 15.0


def prefix(lab: str) -> str:
    """Return the prefix of a lab's control groups and namespaces."""
    return f"edge-lab-{lab}"


def clean(folder: Path) -> None:
    """End and remove all there is of the lab of a folder, with the folder. Nothing if there is none.

    Whoever calls this holds the lab's lock.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):  # it ended before it made anything
        lab = str(json.loads((folder / LAB_FILE).read_text())["id"])
        if lab.isalnum():
            _kill(lab)
            remove_groups(prefix(lab))
            remove_namespaces(prefix(lab))
    shutil.rmtree(folder, ignore_errors=True)
    if folder.name != LASTING:  # nobody else will ever wait for this one
        lock_file(folder).unlink(missing_ok=True)


def lock_file(folder: Path) -> Path:
    """The file whose lock the supervisor and the cleaner of a lab hold."""
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
        with suppress(psutil.Error, OSError):  # it has ended, or belongs to somebody else
            if process.environ().get(VARIABLE) == lab:
                processes.append(process)
    return processes


def main(folder: Path) -> None:
    """Wait for the end of the lab, then clear up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 1 << 10):
        pass
    clean(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
