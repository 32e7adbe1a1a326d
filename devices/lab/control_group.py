"""Control groups of Linux: limits of processor time and memory for a set of processes together.

They need root, and a system that allows new groups. Versions 1 and 2 differ in their files. A group that has used its
processor time waits for the next period. If a group exceeds its memory, the kernel kills one of its processes.
"""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
LEAST_QUOTA_US = 1_000  # the kernel refuses less
PERIOD_US = 4_000  # short, so that a process without processor time left waits only milliseconds
_END_S = 15.0  # time for the processes of a removed group to end


class NoGroups(Exception):
    """Control groups cannot be created here. The message says where and why."""


def _remove(folder: Path) -> None:
    """Remove a control group, and kill the processes in it."""
    deadline = time.monotonic() + _END_S
    while folder.exists() and time.monotonic() < deadline:
        _empty(folder)
        with suppress(OSError):  # its processes are still ending
            folder.rmdir()
            return
        with suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


def remove_groups(prefix: str) -> None:
    """Remove all groups that `ControlGroup` created with this prefix of their names, and kill their processes."""
    for pattern in (f"{prefix}*", f"cpu/{prefix}*", f"memory/{prefix}*"):
        for folder in sorted(GROUPS.glob(pattern)):
            _remove(folder)


class ControlGroup:
    """A control group with a limit of processor time, of memory without swap, or both.

    `close()`, or the end of a `with` block, removes it and kills the processes in it.
    """

    def __init__(self, name: str, *, cores: float | None = None, memory: int | None = None) -> None:
        """cores: limit of processor time. memory: limit in bytes. Raises NoGroups if it cannot be created here."""
        self._new = (GROUPS / "cgroup.controllers").exists()  # version 2 has one tree for all controllers
        controllers = [kind for kind, limit in (("cpu", cores), ("memory", memory)) if limit is not None]
        parents = [GROUPS] if self._new else [GROUPS / kind for kind in controllers]
        self.folders = [parent / name for parent in parents]
        try:
            for folder in self.folders:
                folder.mkdir()
            if self._new:
                self._enable(controllers)
            if cores is not None:
                self.limit_cpu(cores)
            if memory is not None:
                self.limit_memory(memory)
        except OSError as error:
            self.close()
            where = error.filename or GROUPS
            raise NoGroups(f"a control group cannot be made: {where}: {error.strerror}") from error

    def add(self, pid: int = 0) -> None:
        """Add a process, and all processes it will start. 0: the process that calls this."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def limit_cpu(self, cores: float, period_us: int = PERIOD_US) -> None:
        """Limit the group to `cores` of processor time in each period.

        The period is longer if the quota would otherwise be below the kernel's minimum.
        """
        folder = self._folder("cpu")
        period_us = max(period_us, math.ceil(LEAST_QUOTA_US / cores))
        quota_us = round(cores * period_us)
        if self._new:
            (folder / "cpu.max").write_text(f"{quota_us} {period_us}")
            return
        (folder / "cpu.cfs_quota_us").write_text("-1")  # otherwise a longer period may conflict with the old quota
        (folder / "cpu.cfs_period_us").write_text(str(period_us))
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us))

    def limit_memory(self, limit: int) -> None:
        """Limit the group to `limit` bytes of memory, including page cache, without swap."""
        folder = self._folder("memory")
        (folder / ("memory.max" if self._new else "memory.limit_in_bytes")).write_text(str(limit))
        # This file of version 1 counts memory and swap together. Some kernels lack it.
        swap, value = ("memory.swap.max", 0) if self._new else ("memory.memsw.limit_in_bytes", limit)
        if (folder / swap).exists():
            (folder / swap).write_text(str(value))

    def close(self) -> None:
        """Remove the group, and kill the processes in it."""
        for folder in self.folders:
            _remove(folder)

    def __enter__(self) -> ControlGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _folder(self, kind: str) -> Path:
        return self.folders[0] if self._new else next(f for f in self.folders if f.parent.name == kind)

    def _enable(self, controllers: list[str]) -> None:
        """Enable controllers in version 2, where a tree passes them to its groups only on request."""
        there = (self.folders[0] / "cgroup.controllers").read_text().split()
        for kind in controllers:
            if kind not in there:
                (GROUPS / "cgroup.subtree_control").write_text(f"+{kind}")


def _empty(folder: Path) -> None:
    """Drop the page cache of a version 1 group, which would otherwise keep the removed group in the kernel."""
    with suppress(OSError):
        if (folder / "memory.force_empty").exists():
            (folder / "memory.force_empty").write_text("0")
