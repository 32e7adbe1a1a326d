"""Processes of benchmarks: they receive commands in lines of JSON over pipes, and always end.

The parent makes `Ranks(script, n)`; the script calls `serve(object)`, and each command runs the object's method of
that name. A command has a time limit: the parent stops waiting then, and the rank's own alarm ends it a little later
even if nobody is left to ask. A rank whose parent is gone ends at its next look at the pipe.

    python benchmarks/processes.py RANK RANKS FOLDER SCRIPT    (started by `Grouped`)

joins the memory group of that folder and becomes the script. So all that the script is and loads is charged to the
group, from Python's own first page on.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from tests.support.groups import CountedGroup

LIMIT_S = 60.0  # of a command that names no other
_GRACE_S = 2.0  # from asking a process to end until it is killed
_READ_BYTES = 1 << 16
MEASURE_S = 120.0  # what measures of sides may take at most
_numbers = count()


class RankFailed(Exception):
    """A rank ended, or gave no answer in time. What it said is on standard error."""


class Ranks:
    """`n` processes of one script, called with its rank, n, and `arguments`. A context: they end with it."""

    def __init__(self, script: Path, n: int, arguments: Sequence[str] = ()) -> None:
        self.n = n
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines = [b""] * n  # what came of each rank's next answer
        try:
            for rank in range(n):
                command = [sys.executable, str(script), str(rank), str(n), *arguments]
                # A session of its own: Ctrl-C comes to the parent, which ends them.
                self._processes.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
                )
        except BaseException:
            self.close()
            raise

    def tell(self, do: str, limit_s: float = LIMIT_S, **arguments: Any) -> list[Any]:
        """Run a method at all ranks at once; their answers, by rank."""
        return self.tell_each(do, [arguments] * self.n, limit_s)

    def tell_each(self, do: str, arguments: Sequence[dict[str, Any] | None], limit_s: float = LIMIT_S) -> list[Any]:
        """The same with arguments for each rank; those with None do nothing and answer None."""
        for process, own in zip(self._processes, arguments, strict=True):
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([do, limit_s, own]).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it ended: that shows below
        deadline = time.monotonic() + limit_s
        answers: list[Any] = [None] * self.n
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = sorted(key.data for key in selector.get_map().values())
                    raise RankFailed(f"{do}: no answer of ranks {late} within {limit_s:g} s")
                for key, _ in ready:
                    data = os.read(key.fd, _READ_BYTES)
                    if not data:
                        raise RankFailed(f"{do}: rank {key.data} ended")
                    self._lines[key.data] += data
                    if data.endswith(b"\n"):
                        answers[key.data] = json.loads(self._lines[key.data])
                        self._lines[key.data] = b""
                        selector.unregister(key.fd)
        return answers

    def close(self) -> None:
        """End all processes and wait for them."""
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sides(Ranks):
    """Processes by name, each kept to some cores."""

    def __init__(self, cores: Mapping[str, Sequence[int]], script: Path) -> None:
        super().__init__(script, len(cores))
        self.names = list(cores)
        try:
            self.each("pin", {name: {"cores": list(some)} for name, some in cores.items()})
        except BaseException:
            self.close()
            raise

    def each(self, do: str, arguments: Mapping[str, dict[str, Any]], limit_s: float = MEASURE_S) -> dict[str, Any]:
        """Run a method at some sides at once; their answers."""
        answers = self.tell_each(do, [arguments.get(name) for name in self.names], limit_s)
        return {name: answer for name, answer in zip(self.names, answers, strict=True) if name in arguments}

    def at(self, side: str, do: str, limit_s: float = MEASURE_S, **arguments: Any) -> Any:
        """Run a method at one side."""
        return self.each(do, {side: arguments}, limit_s)[side]


@contextmanager
def sides(cores: Mapping[str, Sequence[int]], script: Path) -> Iterator[Sides]:
    """Side processes for the time of a block; where it ends well, they free everything first."""
    some = Sides(cores, script)
    with some:
        yield some
        some.tell("close")


@contextmanager
def loops(n: int, limit_s: float) -> Iterator[None]:
    """Run `n` processes that compute without a pause, until the end of the block, or for `limit_s` seconds."""
    loop = f"import time\nend = time.monotonic() + {limit_s}\nwhile time.monotonic() < end: pass"
    with contextlib.ExitStack() as stack:
        for _ in range(n):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", loop]))
            stack.callback(process.kill)
        yield


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
        """True if the process was killed by the kernel; known after `close`."""
        return any(process.returncode == -signal.SIGKILL for process in self._processes)


def serve(target: object) -> NoReturn:
    """A rank's whole life: do what the parent says until it closes the pipe."""
    for line in sys.stdin.buffer:
        name, limit_s, arguments = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s + _GRACE_S)  # unless it is done by then, SIGALRM ends us
        answer = None if arguments is None else getattr(target, name)(**arguments)
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            break
    os._exit(0)  # whatever threads still wait for


def _join(rank: str, ranks: str, folder: str, script: str) -> None:
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    os.execv(sys.executable, [sys.executable, script, rank, ranks])


if __name__ == "__main__":
    _join(*sys.argv[1:])
