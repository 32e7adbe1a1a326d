"""Ways in which a worker can fail: `LosableWorker.lose`.

| way | what happens |
| --- | --- |
| kill process | SIGKILL to its engine processes |
| stop process | SIGSTOP to its engine processes |
| kill daemon | SIGKILL to `edge worker` |
| stop all | SIGSTOP to all of it, as where a host vanishes |
| cut links | connections of others to it are closed, and no more are taken |
| cut one link | one of these connections is closed |
| freeze links | nothing passes on these connections, which stay open |
| corrupt frame | another bit in the header of the next frame on one of them; payloads have no checksum of their own |
| full disk | its folder has no byte left |
| memory limit | it may have no more memory than it holds, and a small program beside it asks for some: the kernel |
|              | kills the process with the most, which is an engine process |

A disk stays full and a limit stays as low until the worker ends; everything else is undone by `back`.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.lent_device import worker
from benchmarks.relays import Relays
from devices.lab.control_group import NoGroups
from devices.names import parse_address
from tests.support.groups import CountedGroup
from tests.support.workers import is_fork_server

_DISK_BYTES = 96 << 20  # of a worker's folder: its slices of the bundled model, and the prefix cache
_PLENTY_BYTES = 4 << 30
_TAKEN_BYTES = 8 << 20  # by what asks for memory beside a worker
_TAKES_S = 5.0
_OF_LINKS = {"cut links": "cut", "cut one link": "break", "freeze links": "freeze", "corrupt frame": "corrupt"}
WAYS = ("kill process", "stop process", "kill daemon", "stop all", *_OF_LINKS, "full disk", "memory limit")


@dataclass
class LosableWorker:
    """A worker that may be lost."""

    address: str  # by which others reach it: of its relay
    pid: int
    folder: Path
    group: CountedGroup | None
    relays: Relays

    def engines(self) -> list[psutil.Process]:
        """Its engine processes."""
        there = psutil.Process(self.pid).children(recursive=True)
        return [process for process in there if not is_fork_server(process)]

    def lose(self, way: str) -> None:
        """Make it fail in one of WAYS."""
        if way in ("kill process", "stop process", "stop all"):
            for child in self.engines():
                with suppress(psutil.NoSuchProcess):
                    child.send_signal(signal.SIGKILL if way == "kill process" else signal.SIGSTOP)
        if way == "kill daemon":
            psutil.Process(self.pid).kill()
        elif way == "stop all":
            psutil.Process(self.pid).suspend()
        elif way in _OF_LINKS:
            self.relays.tell(_OF_LINKS[way], self._front)
        elif way == "full disk":
            self._fill()
        elif way == "memory limit":
            self._limit()

    def back(self) -> None:
        """Let what stands still go on."""
        self.relays.tell("heal", self._front)
        with suppress(psutil.NoSuchProcess):
            daemon = psutil.Process(self.pid)
            for process in (daemon, *self.engines()):
                process.resume()

    @property
    def is_there(self) -> bool:
        """True if its daemon runs."""
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    @property
    def _front(self) -> str:
        return parse_address(self.address)[0]

    def _fill(self) -> None:
        """Leave no byte of its disk."""
        with (self.folder / "full").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 20))  # the last one in part

    def _limit(self) -> None:
        """Let it have what it holds and no more, and make the kernel take some of that."""
        assert self.group is not None
        command = ["dd", "of=/dev/null", f"bs={_TAKEN_BYTES}", "iflag=fullblock", "status=none"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
            self.group.add(other.pid)
            for _ in range(100):  # it may come to hold more between the two lines
                try:
                    self.group.limit_memory(self.group.held_bytes())
                    break
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        raise
            try:
                other.communicate(bytes(_TAKEN_BYTES), _TAKES_S)
            except subprocess.TimeoutExpired:
                other.kill()


def possible_ways(folder: Path) -> list[str]:
    """Those of WAYS that this user may do on this machine; of the others a line is said."""
    result = list(WAYS)
    try:
        with _small_disk(folder / "disk"):
            pass
    except OSError as error:
        _leave_out(result, "full disk", error)
    try:
        _group("try").close()
    except NoGroups as error:
        _leave_out(result, "memory limit", error)
    return result


@contextmanager
def losable_workers(folder: Path, n: int, ways: list[str]) -> Iterator[list[LosableWorker]]:
    """So many workers, each on a small disk, in a memory group and behind a relay, as far as `ways` need it."""
    net = f"127.{1 + os.getpid() // 256 % 250}.{os.getpid() % 256}"  # two runs have two
    backs = {f"{net}.{101 + i}": f"{net}.{1 + i}" for i in range(n)}
    with ExitStack() as stack:
        relays = stack.enter_context(Relays(backs))
        workers = []
        for i, (front, back) in enumerate(backs.items()):
            own = folder / str(i)
            if "full disk" in ways:
                stack.enter_context(_small_disk(own))
            group = stack.enter_context(_group(str(i))) if "memory limit" in ways else None
            address, pid = stack.enter_context(worker(own, group, f"{back}:0"))
            port = parse_address(address)[1]
            relays.tell(f"port {port}", front)
            workers.append(LosableWorker(f"{front}:{port}", pid, own, group, relays))
        try:
            yield workers
        finally:
            for item in workers:
                item.back()


def _leave_out(ways: list[str], way: str, error: Exception) -> None:
    ways.remove(way)
    print(f"left out: {way}: {error}", file=sys.stderr)


def _group(name: str) -> CountedGroup:
    return CountedGroup(f"edge-bench-survive-{os.getpid()}-{name}", memory=_PLENTY_BYTES)


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """A disk of memory at that folder. OSError where this user may not have one."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip())
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)  # an engine process may be about to end
