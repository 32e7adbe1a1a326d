"""Test the description of a machine whose system hides its files from programs, as Android does."""

from typing import Any

import psutil
import pytest

from devices.busy import OthersLoad
from devices.network import interface_of, own_networks
from edge.profiling.doctor import machine


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/stat, /proc/net and the interfaces; older Androids have no load average."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    for name in ("cpu_times", "net_if_addrs", "net_if_stats", "net_connections"):
        monkeypatch.setattr(psutil, name, refuse)
    monkeypatch.delattr(machine.os, "getloadavg")  # type: ignore[attr-defined]


def test_nobody_is_counted_as_using_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devices.busy._LEAST_S", 0.0)
    assert OthersLoad().cores() == 0.0
    assert machine.read_cores().load is None


def test_no_interface_is_known() -> None:
    assert interface_of("127.0.0.1") is None
    assert own_networks() == []


def test_who_has_the_port_is_not_known() -> None:
    with machine.socket.create_server(("", 0)) as used:  # type: ignore[attr-defined]
        result = machine.read_port(used.getsockname()[1])
    assert (result.free, result.holder) == (False, "")
