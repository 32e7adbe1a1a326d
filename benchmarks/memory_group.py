"""A memory group of Linux's control groups, which kills what asks for more than its limit, and a process inside one.

    python benchmarks/memory_group.py RANK RANKS FOLDER SCRIPT    (started by `Grouped`)

joins the group of that folder and becomes the script. So all that the script is and loads is charged to the group, from
Python's own first page on.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from pathlib import Path

from ranks import Ranks

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the test suite's groups

from tests.support.groups import CountedGroup

_numbers = count()


def memory_group(limit: int) -> CountedGroup:
    """A control group with `limit` bytes of memory and no swap. A context: it ends with it. NoGroups where this user,
    or this machine, has none to give."""
    return CountedGroup(f"edge-bench-memory-{os.getpid()}-{next(_numbers)}", memory=limit)


class Grouped(Ranks):
    """One process of a script, in a memory group from its start on, or in none. A context: it ends with it."""

    def __init__(self, script: Path, group: CountedGroup | None) -> None:
        if group is None:
            super().__init__(script, 1)
        else:
            super().__init__(Path(__file__), 1, [str(group.folders[0]), str(script)])

    @property
    def killed(self) -> bool:
        """Whether the process was killed by the kernel; known after `close`."""
        return any(process.returncode == -signal.SIGKILL for process in self._processes)


def _join(rank: str, ranks: str, folder: str, script: str) -> None:
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    os.execv(sys.executable, [sys.executable, script, rank, ranks])


if __name__ == "__main__":
    _join(*sys.argv[1:])
