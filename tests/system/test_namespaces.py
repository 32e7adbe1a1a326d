"""Test the two network namespaces of other tests: they reach each other, nothing else, and leave nothing behind."""

import os
import subprocess
import sys

import pytest

from tests.support import namespaces
from tests.support.helpers import until
from tests.support.namespaces import Host, two_hosts

SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    peer, _ = server.accept()
    with peer:
        received = 0
        while data := peer.recv(1 << 16):
            received += len(data)
        peer.sendall(b"%d" % received)
"""
CLIENT = """
import socket, sys, time
began = time.perf_counter()
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as peer:
    peer.sendall(bytes(int(sys.argv[3])))
    peer.shutdown(socket.SHUT_WR)
    print(peer.recv(100).decode(), time.perf_counter() - began)
"""
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


def transfer(to: Host, by: Host, n_bytes: int) -> tuple[int, float]:
    """Bytes that arrived, and seconds, of a transfer between the hosts."""
    server = to.start([sys.executable, "-c", SERVER, to.address])
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    done = by.run([sys.executable, "-c", CLIENT, to.address, port, str(n_bytes)])
    assert done.returncode == 0, done.stderr
    received, seconds = done.stdout.split()
    return int(received), float(seconds)


def exists(namespace: str) -> bool:
    return namespace in namespaces._ip("netns", "list").split()


def test_each_reaches_the_other_and_nothing_else() -> None:
    with two_hosts() as (first, two):
        assert transfer(first, two, 1000)[0] == 1000
        assert transfer(two, first, 1000)[0] == 1000
        code = "import psutil; print(sorted(psutil.net_if_addrs()))"
        assert first.run([sys.executable, "-c", code]).stdout.strip() == "['eth0', 'lo']"
        out = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"
        assert "unreachable" in first.run([sys.executable, "-c", out]).stderr


def test_the_cable_may_be_slow() -> None:
    with two_hosts(mbit=20) as (first, two):
        for to, by in ((first, two), (two, first)):
            received, seconds = transfer(to, by, 2_500_000)  # one second's worth
            assert received == 2_500_000
            assert seconds > 0.8


def test_a_pulled_cable_carries_nothing_until_it_is_back() -> None:
    with two_hosts() as (first, two):
        two.unplug()
        out = f"import socket; socket.create_connection(('{two.address}', 80), 0.5)"
        assert "timed out" in first.run([sys.executable, "-c", out]).stderr
        two.plug()
        assert transfer(two, first, 1000)[0] == 1000


def test_the_environment_is_passed_and_failures_are_seen() -> None:
    with two_hosts() as (first, _):
        done = first.run(["sh", "-c", "echo $EDGE_TEST; exit 3"], env={"EDGE_TEST": "here"})
        assert (done.stdout.strip(), done.returncode) == ("here", 3)
        with pytest.raises(subprocess.TimeoutExpired):
            first.run([sys.executable, "-c", SLEEPER], timeout=0.5)


def test_nothing_is_left_behind_whatever_happens() -> None:
    def fail_in_the_middle() -> None:
        with two_hosts() as (first, two):
            process = first.start(["sh", "-c", f'{sys.executable} -c "{SLEEPER}" & wait'])
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            pids.extend(map(int, namespaces._ip("netns", "pids", first.namespace).split()))
            names.extend([first.namespace, two.namespace])
            raise KeyError("on purpose")

    pids: list[int] = []
    names: list[str] = []
    with pytest.raises(KeyError):
        fail_in_the_middle()
    assert len(pids) == 2
    until(lambda: not any(_runs(pid) for pid in pids), "processes in the host have ended")
    assert not any(exists(name) for name in names)


def test_without_root_it_skips_but_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="root"), two_hosts():
        pass
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="root"), two_hosts():
        pass


def test_two_pairs_at_once_do_not_meet() -> None:
    with two_hosts() as (first, two), two_hosts() as (other, _):
        assert first.namespace != other.namespace
        assert first.address == other.address
        assert transfer(first, two, 10)[0] == 10


def _runs(pid: int) -> bool:
    """Return whether a process runs; one that ended and was not fetched yet does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
