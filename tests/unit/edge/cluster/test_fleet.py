"""Test connecting to several workers together."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devices.profile import describe
from devices.sleeping import VARIABLE
from edge.cluster import client as remotes
from edge.cluster import fleet as fleets
from edge.cluster.client import Remote
from edge.cluster.fleet import Fleet, check_versions, device, label
from edge.cluster.session import RemoteSession
from edge.errors import WorkerError
from edge.models.demo import MODEL_PATH
from edge.parallel.engine_kinds import own_kind
from edge.version import version
from partition.plan.plan import LOCAL
from partition.slices.recipe import whole
from tests.support.deployments import ONE_THREAD, own_folders
from tests.support.helpers import TIMEOUT_S
from tests.support.links import start
from tests.support.workers import SECRET, worker
from transport.errors import LinkClosed, Refused


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(monkeypatch, tmp_path / "own")


def test_one_device_has_many_addresses(tmp_path: Path) -> None:
    assert device("pi") == device("PI:7070") == "pi:7070"
    assert device("::1") == device("[::1]") == "[::1]:7070"
    assert device(LOCAL) == LOCAL
    with worker(tmp_path / "w", *ONE_THREAD) as item:
        addresses = (f"localhost:{item.port}", f"LOCALHOST:{item.port}")
        with Fleet((*addresses, addresses[0])) as fleet:
            first, second = (fleet.workers[address] for address in addresses)
            assert first is second
            assert fleet.profiles[addresses[0]] is fleet.profiles[addresses[1]]


class Named:
    """A worker that says its name."""

    def __init__(self, name: str, port: int) -> None:
        self.name = self.label = name
        self.host, self.port = "10.1.1.1", port


def test_devices_of_one_name_are_told_apart_by_their_addresses() -> None:
    """One that is named as this device is, too."""
    workers: list[Any] = [Named("pi", 1), Named("pi", 2), Named("desk", 3), Named("nas", 4)]
    label(workers, "desk")
    assert [item.label for item in workers] == ["pi at 10.1.1.1:1", "pi at 10.1.1.1:2", "desk at 10.1.1.1:3", "nas"]


@pytest.mark.parametrize("changed", ["runtime", "llama_cpp"])
def test_a_device_with_another_version_takes_no_part(changed: str) -> None:
    own = replace(describe("pi"), runtime=version("edge-runtime"), llama_cpp=version("llama-cpp-python"))
    check_versions("pi", own)
    with pytest.raises(WorkerError, match=r"pi runs .* 9\.9\.9, this device .*; install the same version on both"):
        check_versions("pi", replace(own, **{changed: "9.9.9"}))


def test_what_is_reached_after_the_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    go, closed = threading.Event(), threading.Event()

    class Late:
        name = "late"
        close = closed.set

    def reach(address: str, **_: Any) -> Any:
        if address.startswith("early"):
            raise Refused("early does not want us")
        go.wait(TIMEOUT_S)
        return Late()

    monkeypatch.setattr(fleets, "reach", reach)
    with pytest.raises(Refused, match="early"):
        Fleet(["late", "early"])
    assert not closed.is_set()
    go.set()
    assert closed.wait(TIMEOUT_S)


# What was closed here.


def test_a_closed_connection_is_not_made_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = whole("0" * 64, MODEL_PATH.stat().st_size)
    with worker(tmp_path / "w", *ONE_THREAD) as first:
        remote = first.remote()
        until_moved = threading.Event()

        def progress(done: float, total: float) -> None:
            until_moved.set()
            remote.close()

        done = start(remote.send_slice, recipe, MODEL_PATH, "0" * 64, progress)
        error = done.exception(TIMEOUT_S)
        assert until_moved.is_set()
        assert isinstance(error, LinkClosed), repr(error)
        assert "was closed here" in str(error)
        with pytest.raises(LinkClosed, match="was closed here"):
            remote.send_slice(recipe, MODEL_PATH, "0" * 64)
        with pytest.raises(LinkClosed, match="was closed here"):
            remote.describe()
    assert "Traceback" not in capfd.readouterr().err


def test_who_waits_for_a_worker_to_come_back_ends_with_the_connection(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = whole("0" * 64, MODEL_PATH.stat().st_size)
    with worker(tmp_path / "w", *ONE_THREAD) as first:
        remote: Remote = first.remote()
        first.end()
        remote.return_s = 0.1  # after a loss, an answer waits for it
        with pytest.raises(LinkClosed, match=r"did not come back for 0\.1 s"):
            remote.send_slice(recipe, MODEL_PATH, "0" * 64)
        remote.return_s = None
        done = start(remote.send_slice, recipe, MODEL_PATH, "0" * 64)
        with pytest.raises(TimeoutError):
            done.result(1.0)
        remote.close()
        error = done.exception(remotes.RECONNECT_S / 6)
        assert isinstance(error, LinkClosed)
        assert "was closed here" in str(error)
    assert "Traceback" not in capfd.readouterr().err


# What they are called.


def test_workers_of_one_name_are_told_apart(tmp_path: Path) -> None:
    named = ("--name", "vm", *ONE_THREAD)
    with (
        worker(tmp_path / "a", *named) as a,
        worker(tmp_path / "b", *named) as b,
        worker(tmp_path / "c", "--name", "pi", *ONE_THREAD) as c,
        Fleet([a.address, b.address, c.address], return_s=1.5) as fleet,
    ):
        assert {item.return_s for item in fleet.workers.values()} == {1.5}
        labels = [item.label for item in fleet.workers.values()]
        assert labels == [f"vm at {a.address}", f"vm at {b.address}", "pi"]
        with RemoteSession(fleet.workers[b.address], 0, 1, SECRET) as session:
            os.kill(session.pid, signal.SIGKILL)
            with pytest.raises(WorkerError, match=f"^vm at {b.address}: the engine process was killed by SIGKILL"):
                session.answer()
        a.kill()
        with pytest.raises(LinkClosed, match=f"^vm at {a.address} cannot be reached"):
            fleet.workers[a.address].describe()


def test_sleeping_and_computing_devices_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    own_kind().check_worker("pi", sleeps=False)
    with pytest.raises(Refused, match=r"pi is a sleeping device of a lab.*edge lab run"):
        own_kind().check_worker("pi", sleeps=True)
    monkeypatch.setenv(VARIABLE, "profile.json")
    own_kind().check_worker("pi", sleeps=True)
    with pytest.raises(Refused, match="pi computes"):
        own_kind().check_worker("pi", sleeps=False)
