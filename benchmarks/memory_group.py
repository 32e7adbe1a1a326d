"""A memory group of Linux's control groups, which kills what asks for more than its limit, and a process inside one.

    python benchmarks/memory_group.py RANK RANKS FOLDER SCRIPT    (started by `Grouped`)

joins the group of that folder and becomes the script. So all that the script is and loads is charged to the group, from
Python's own first page on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from ranks import Ranks

_GROUPS = Path("/sys/fs/cgroup")
_END_S = 15.0  # until the processes of a group that is removed are gone
_numbers = count()


def remove_group(folder: Path, before: Callable[[], None] = lambda: None) -> None:
    """Remove a control group; `before` is called before each attempt. What still runs in it is killed."""
    deadline = time.monotonic() + _END_S
    while folder.exists() and time.monotonic() < deadline:
        before()
        with suppress(OSError):  # its processes are still ending
            folder.rmdir()
            return
        with suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


class NoMemoryGroups(Exception):
    """Memory groups cannot be made here."""


class MemoryGroup:
    """A control group with `limit` bytes of memory and no swap. `close()` removes it, and ends what runs in it."""

    def __init__(self, limit: int) -> None:
        """NoMemoryGroups where this user, or this machine, has none to give."""
        self._new = (_GROUPS / "cgroup.controllers").exists()  # version 2: one tree for everything
        parent = _GROUPS if self._new else _GROUPS / "memory"
        self.folder = parent / f"edge-bench-memory-{os.getpid()}-{next(_numbers)}"
        try:
            self.folder.mkdir()
            if self._new:
                if not (self.folder / "memory.max").exists():
                    (_GROUPS / "cgroup.subtree_control").write_text("+memory")
                self._write("memory.max", limit)
                self._write("memory.swap.max", 0, optional=True)
            else:
                self._write("memory.limit_in_bytes", limit)
                self._write("memory.memsw.limit_in_bytes", limit, optional=True)  # memory and swap together
        except OSError as error:
            self.close()
            raise NoMemoryGroups(f"a memory group cannot be made in {parent}: {error.strerror}") from error

    def report(self) -> dict[str, int]:
        """max_usage_bytes: the most it ever held, page cache and what the kernel keeps for it included. failcnt: how
        often it was at its limit and something had to be given back; some kernels do not count that. oom_kills:
        processes killed for want of memory."""
        most = "memory.peak" if self._new else "memory.max_usage_in_bytes"
        events = self._events("memory.events" if self._new else "memory.oom_control")
        # Where memory and swap have the same limit, it may be that of both together that counts.
        counters = [self.folder / f"memory{kind}.failcnt" for kind in ("", ".memsw")]
        failed = [int(counter.read_text()) for counter in counters if counter.exists()]
        return {
            "max_usage_bytes": int((self.folder / most).read_text()),
            "failcnt": max(failed, default=events.get("max", 0)),
            "oom_kills": events.get("oom_kill", 0),
        }

    def close(self) -> None:
        """Remove it. What still runs in it is killed."""
        remove_group(self.folder, self._empty)

    def _empty(self) -> None:
        if not self._new:
            with suppress(OSError):  # its page cache would keep it in the kernel after it was removed
                self._write("memory.force_empty", 0)

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, name: str, value: int, optional: bool = False) -> None:
        """optional: this kernel may have no such file."""
        if not optional or (self.folder / name).exists():
            (self.folder / name).write_text(str(value))

    def _events(self, name: str) -> dict[str, int]:
        pairs = (line.split() for line in (self.folder / name).read_text().splitlines())
        return {key: int(value) for key, value in pairs}


class Grouped(Ranks):
    """One process of a script, in a memory group from its start on, or in none. A context: it ends with it."""

    def __init__(self, script: Path, group: MemoryGroup | None) -> None:
        if group is None:
            super().__init__(script, 1)
        else:
            super().__init__(Path(__file__), 1, [str(group.folder), str(script)])

    @property
    def killed(self) -> bool:
        """Whether the process was killed by the kernel; known after `close`."""
        return any(process.returncode == -signal.SIGKILL for process in self._processes)


def _join(rank: str, ranks: str, folder: str, script: str) -> None:
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    os.execv(sys.executable, [sys.executable, script, rank, ranks])


if __name__ == "__main__":
    _join(*sys.argv[1:])
