"""A control group of Linux: how much processor time and memory the processes in it get together.

Needs root, and a system that lets it make groups. Versions 1 and 2 of control groups differ in their files. A
group that reaches its processor time waits for the next period; one that reaches its memory has a process killed.
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
PERIOD_US = 4_000  # short, so that who is out of processor time waits for milliseconds
_END_S = 15.0  # until the processes of a group that is removed are gone


class NoGroups(Exception):
    """Control groups cannot be made here; the message says where and why."""


def _remove(folder: Path) -> None:
    """Remove a control group. What still runs in it is killed."""
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
    """Remove all groups whose name begins so, as `ControlGroup` made them. What still runs in them is killed."""
    for pattern in (f"{prefix}*", f"cpu/{prefix}*", f"memory/{prefix}*"):
        for folder in sorted(GROUPS.glob(pattern)):
            _remove(folder)


class ControlGroup:
    """A control group with a limit of processor time, of memory without swap, or both.

    `close()` removes it, and ends what runs in it; it is also a context that does so.
    """

    def __init__(self, name: str, *, cores: float | None = None, memory: int | None = None) -> None:
        """cores: of processor time; memory: bytes. NoGroups if this user, or this machine, has none to give."""
        self._new = (GROUPS / "cgroup.controllers").exists()  # version 2: one tree for everything
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
        """A process, and all it will start. 0: the one that calls this."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def limit_cpu(self, cores: float, period_us: int = PERIOD_US) -> None:
        """Give all in the group together `cores` of processor time in every period, which is longer where that would be
        less than the kernel gives."""
        folder = self._folder("cpu")
        period_us = max(period_us, math.ceil(LEAST_QUOTA_US / cores))
        quota_us = round(cores * period_us)
        if self._new:
            (folder / "cpu.max").write_text(f"{quota_us} {period_us}")
            return
        (folder / "cpu.cfs_quota_us").write_text("-1")  # or a longer period with the old quota may be refused
        (folder / "cpu.cfs_period_us").write_text(str(period_us))
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us))

    def limit_memory(self, limit: int) -> None:
        """Let all in the group together hold `limit` bytes, with their page cache and without swap."""
        folder = self._folder("memory")
        (folder / ("memory.max" if self._new else "memory.limit_in_bytes")).write_text(str(limit))
        # Version 1 counts memory and swap together there. Some kernels have no such file.
        swap, value = ("memory.swap.max", 0) if self._new else ("memory.memsw.limit_in_bytes", limit)
        if (folder / swap).exists():
            (folder / swap).write_text(str(value))

    def close(self) -> None:
        """Remove it. What still runs in it is killed."""
        for folder in self.folders:
            _remove(folder)

    def __enter__(self) -> ControlGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _folder(self, kind: str) -> Path:
        return self.folders[0] if self._new else next(f for f in self.folders if f.parent.name == kind)

    def _enable(self, controllers: list[str]) -> None:
        """Version 2: a tree hands its kinds of limits down only on request."""
        there = (self.folders[0] / "cgroup.controllers").read_text().split()
        for kind in controllers:
            if kind not in there:
                (GROUPS / "cgroup.subtree_control").write_text(f"+{kind}")


def _empty(folder: Path) -> None:
    """Version 1: let go of the page cache of a group, which would keep it in the kernel after it was removed."""
    with suppress(OSError):
        if (folder / "memory.force_empty").exists():
            (folder / "memory.force_empty").write_text("0")
