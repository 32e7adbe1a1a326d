"""Hosts in one machine: network namespaces of Linux, joined by virtual cables. Needs root and iproute2.

    with two_hosts() as (one, two):
        server = one.start([sys.executable, "-m", "apps.cli", "worker", "--listen", one.address])
        done = two.run([sys.executable, "-c", "..."])

The hosts see each other and nothing else: no internet, no other test, no worker of another session. Each has a loopback
interface and an Ethernet one, `eth0`. In a host /sys is the namespace's own, without control groups.
"""

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from devices.processes.forking import ForkServer
from tests.support import FORKED_COMMAND, ROOT

INTERFACE = "eth0"
SETUP_S = 20
RUN_S = 60
END_S = 60
_NUMBERS = itertools.count()
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where iproute2 is, also for people who are not root


class Host:
    """One of them: an address of its own, and processes that run in it."""

    def __init__(self, namespace: str, address: str) -> None:
        self.namespace = namespace
        self.address = address
        self._started: list[subprocess.Popen[str]] = []
        self.fork_server = ForkServer(FORKED_COMMAND, under=self.under)  # of `edge` there

    def run(
        self, args: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout: float = RUN_S
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end, with pipes as its standard streams. `env` is added to the environment."""
        return subprocess.run(
            self._command(args),
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, args: Sequence[str | Path], env: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
        """Start a command with pipes as its standard streams; it is killed at the end if it still runs then.

        The process is the command itself, so that signals sent to it arrive.
        """
        process = subprocess.Popen(
            self._command(args),
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def unplug(self) -> None:
        """Pull the cable: nothing arrives any more, and nobody is told."""
        _ip("-n", self.namespace, "link", "set", INTERFACE, "down")

    def plug(self) -> None:
        """Put the cable back."""
        _ip("-n", self.namespace, "link", "set", INTERFACE, "up")

    def limit(self, mbit: float) -> None:
        """Let at most `mbit` megabits a second leave this host."""
        burst = max(16_000, int(mbit * 125_000 / 100))  # bytes: ten milliseconds, so that the timer keeps up
        tbf = ["tbf", "rate", f"{int(mbit * 1e6)}bit", "burst", str(burst), "latency", "100ms"]
        _checked(["tc", "-n", self.namespace, "qdisc", "replace", "dev", INTERFACE, "root", *tbf])

    def close(self) -> None:
        """End everything that runs in it, and remove it."""
        self.fork_server.close()
        for process in self._started:
            process.kill()
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with suppress(OSError):  # what was not written yet has no reader
                        stream.close()
        # Children that outlived the commands would keep the namespace alive.
        for pid in _ip("netns", "pids", self.namespace, check=False).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", self.namespace, check=False)

    @property
    def under(self) -> list[str]:
        """A command that runs another one there."""
        return [_tool("ip"), "netns", "exec", self.namespace]

    def _command(self, args: Sequence[str | Path]) -> list[str]:
        return [*self.under, *map(str, args)]


@contextmanager
def two_hosts(mbit: float | None = None) -> Iterator[tuple[Host, Host]]:
    """Two hosts joined by a cable, that carries `mbit` megabits a second each way if given.

    Skips the test where that cannot be set up; fails it in CI, where it must be possible.
    """
    with _hosts("10.77.0.1", "10.77.0.2") as (first, two):
        _cable(first, INTERFACE, first.address, two, INTERFACE, two.address)
        for host in (first, two):
            if mbit is not None:
                host.limit(mbit)
        yield first, two


@contextmanager
def owner_between_two_workers() -> Iterator[tuple[Host, Host, Host]]:
    """An owner with a cable to each of two workers, which have a cable of their own: three subnets. What one worker
    sends to the other's address at the owner vanishes at the owner, and no error comes back."""
    with _hosts("10.77.1.1", "10.77.1.2", "10.77.2.2") as (owner, first, second):
        _cable(owner, INTERFACE, owner.address, first, INTERFACE, first.address)
        _cable(owner, "eth1", "10.77.2.1", second, INTERFACE, second.address)
        _cable(first, "eth1", "10.77.3.1", second, "eth1", "10.77.3.2")
        _checked([*owner.under, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward"])
        for host, gateway in ((first, owner.address), (second, "10.77.2.1")):
            _ip("-n", host.namespace, "route", "add", "default", "via", gateway)
        yield owner, first, second


@contextmanager
def _hosts(*addresses: str) -> Iterator[list[Host]]:
    """Hosts with a loopback interface alone. An error of iproute2 is one of setting up."""
    need(os.geteuid() == 0, "network namespaces need root")
    need(_found("ip") is not None, "network namespaces need ip, of iproute2")
    name = f"edge-{os.getpid()}-{next(_NUMBERS)}"
    hosts = [Host(f"{name}{side}", address) for side, address in zip("abc", addresses, strict=False)]
    with ExitStack() as stack:
        with _possible():
            for host in hosts:
                stack.callback(host.close)  # before it exists: closing one that is not there does nothing
                _ip("netns", "add", host.namespace)
                _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts


def _cable(first: Host, interface: str, address: str, second: Host, others_interface: str, others_address: str) -> None:
    """Join two hosts."""
    with _possible():
        end = ["peer", "name", others_interface, "netns", second.namespace]
        _ip("-n", first.namespace, "link", "add", interface, "type", "veth", *end)
        for host, name, own in ((first, interface, address), (second, others_interface, others_address)):
            _ip("-n", host.namespace, "addr", "add", f"{own}/24", "dev", name)
            _ip("-n", host.namespace, "link", "set", name, "up")


@contextmanager
def _possible() -> Iterator[None]:
    """Skip the test if this machine cannot set up namespaces; fail it in CI."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or ""
        need(False, f"network namespaces are not possible here: {error} {said}".strip())


def need(there: bool, what: str) -> None:
    """Skip the test without it; fail in CI, where a skipped test would hide that nothing was tested."""
    if not there:
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(what)
        pytest.skip(what)


def _found(tool: str) -> str | None:
    return shutil.which(tool, path=_PATH)


def _tool(tool: str) -> str:
    path = _found(tool)
    if path is None:
        raise FileNotFoundError(f"{tool}, of iproute2, is not installed")
    return path


def _ip(*args: str, check: bool = True) -> str:
    return _checked(["ip", *args], check)


def _checked(args: Sequence[str], check: bool = True) -> str:
    """Run a tool of iproute2; what it prints."""
    command = [_tool(args[0]), *args[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=SETUP_S, check=check).stdout
