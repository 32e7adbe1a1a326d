"""Test hints about the path to another device: they are given only if they are likely true."""

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from devices.network import interface_of, is_tunnel, is_wireless, path_hints, wired_alternatives

WLAN, CABLE, DOCKER, VPN = "192.168.1.20", "192.168.1.7", "172.17.0.1", "100.64.0.3"
FAST, GIGABIT, FAST_ETHERNET = 0.0002, 117_000_000.0, 11_700_000.0


def interface(sys: Path, name: str, kind: str = "1", device: bool = True, **files: str) -> None:
    """Write what /sys says of an interface."""
    folder = sys / name
    folder.mkdir()
    for file, text in {"type": kind, "operstate": "up", "carrier": "1", **files}.items():
        (folder / file).write_text(text + "\n")
    if device:
        (folder / "device").mkdir()


@pytest.fixture
def sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with everything: Wi-Fi, a cable, a container bridge and a VPN."""
    interface(tmp_path, "lo", "772", device=False)
    interface(tmp_path, "wlan0")
    (tmp_path / "wlan0" / "wireless").mkdir()
    interface(tmp_path, "eth0", speed="1000", duplex="full")
    interface(tmp_path, "docker0", device=False)
    interface(tmp_path, "wg0", "65534", device=False, operstate="unknown")
    addresses = {
        "lo": [("127.0.0.1", socket.AF_INET)],
        "wlan0": [(WLAN, socket.AF_INET), ("fe80::1%wlan0", socket.AF_INET6)],
        "eth0": [("02:fc:00:00:00:01", 17), (CABLE, socket.AF_INET), ("fd00::7", socket.AF_INET6)],
        "docker0": [(DOCKER, socket.AF_INET)],
        "wg0": [(VPN, socket.AF_INET)],
    }
    entries = {
        name: [SimpleNamespace(address=address, family=family) for address, family in result]  # type: ignore[attr-defined]
        for name, result in addresses.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    return tmp_path


def quick(address: str, sys: Path, bandwidth: float | None = GIGABIT) -> list[str]:
    """The hints of a path whose latency is fine."""
    return path_hints(address, FAST, FAST * 1.3, FAST * 4, bandwidth, sys)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (WLAN, "wlan0"),
        ("fe80::1%wlan0", "wlan0"),
        ("fd00:0::7", "eth0"),
        (f"::ffff:{CABLE}", "eth0"),
        ("10.9.9.9", None),
        ("02:fc:00:00:00:01", None),
        ("eth0", None),
        ("", None),
    ],
)
def test_the_interface_of_an_address(sys: Path, address: str, name: str | None) -> None:
    assert interface_of(address) == name


def test_kinds_of_interfaces(sys: Path) -> None:
    names = ["lo", "wlan0", "eth0", "docker0", "wg0", "none"]
    assert [name for name in names if is_wireless(name, sys)] == ["wlan0"]
    assert [name for name in names if is_tunnel(name, sys)] == ["wg0"]
    assert wired_alternatives(sys) == ["eth0"]
    assert wired_alternatives(sys / "none") == []


@pytest.mark.parametrize(("file", "text"), [("carrier", "0"), ("operstate", "down"), ("type", "772")])
def test_a_port_without_a_cable_is_no_alternative(sys: Path, file: str, text: str) -> None:
    (sys / "eth0" / file).write_text(text)
    assert wired_alternatives(sys) == []
    assert quick(WLAN, sys) == []


def test_wifi_although_a_cable_is_plugged_in(sys: Path) -> None:
    (hint,) = quick(WLAN, sys)
    for words in ("Wi-Fi (wlan0)", "a cable is connected (eth0, 192.168.1.7)", "address in the network of eth0"):
        assert words in hint


def test_a_cable_without_an_address(sys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = psutil.net_if_addrs()
    entries["eth0"] = [SimpleNamespace(address="169.254.7.7", family=socket.AF_INET)]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    (hint,) = quick(WLAN, sys)
    assert "(eth0) but has no address yet" in hint


def test_a_tunnel(sys: Path) -> None:
    (hint,) = quick(VPN, sys)
    assert "a tunnel (wg0)" in hint
    assert "eth0" in hint
    (sys / "eth0" / "carrier").write_text("0")
    (hint,) = quick(VPN, sys)
    assert "if both devices are in one network" in hint


@pytest.mark.parametrize("address", [CABLE, DOCKER, "127.0.0.1", "10.9.9.9"])
def test_nothing_is_said_of_a_good_path(sys: Path, address: str) -> None:
    assert quick(address, sys) == []
    assert quick(address, sys, None) == []


def test_on_loopback_latency_is_nobodys_fault(sys: Path) -> None:
    assert path_hints("127.0.0.1", 0.001, 0.5, 0.9, 1000.0, sys) == []


@pytest.mark.parametrize(
    ("best", "median", "p99", "words"),
    [
        (0.0012, 0.0081, 0.5, "median 8.1 ms is far above the best seen, 1.2 ms"),
        (0.0012, 0.0020, 0.0300, "one message in a hundred takes 30.0 ms, the median is 2.0 ms"),
        (0.0060, 0.0070, 0.0100, "even the fastest message takes 6.0 ms"),
        (0.0001, 0.0009, 0.0100, None),  # nine times the best, but below a millisecond
        (0.0012, 0.0030, 0.0200, None),
    ],
)
def test_latency(sys: Path, best: float, median: float, p99: float, words: str | None) -> None:
    hints = path_hints(CABLE, best, median, p99, GIGABIT, sys)
    assert len(hints) == (words is not None)
    assert words is None or words in hints[0]


def test_the_reason_fits_the_medium(sys: Path) -> None:
    (sys / "eth0" / "carrier").write_text("0")
    (hint,) = path_hints(WLAN, 0.0012, 0.0081, 0.5, 1e6, sys)
    assert "power saving" in hint
    assert path_hints(WLAN, 0.006, 0.007, 0.010, 1e6, sys) == []  # for Wi-Fi that is ordinary
    (hint,) = path_hints(CABLE, 0.0012, 0.0081, 0.5, None, sys)
    assert "other traffic" in hint


@pytest.mark.parametrize(
    ("speed", "bandwidth", "words"),
    [
        ("100", FAST_ETHERNET, "eth0 runs at 100 Mbit/s and limits"),
        ("100", 2e6, None),  # something else limits, and what is not known
        ("100", None, None),
        ("1000", FAST_ETHERNET, "eth0 runs at 1000 Mbit/s but only 94 Mbit/s arrive"),
        ("1000", 60e6, None),
        ("2500", GIGABIT, None),  # the other device has a gigabit port
        ("-1", FAST_ETHERNET, None),
        ("", FAST_ETHERNET, None),
    ],
)
def test_the_speed_of_the_cable(sys: Path, speed: str, bandwidth: float | None, words: str | None) -> None:
    (sys / "eth0" / "speed").write_text(speed)
    hints = quick(CABLE, sys, bandwidth)
    assert len(hints) == (words is not None)
    assert words is None or words in hints[0]


def test_half_duplex(sys: Path) -> None:
    (sys / "eth0" / "duplex").write_text("half\n")
    (hint,) = quick(CABLE, sys)
    assert "half duplex" in hint


def test_on_this_machine() -> None:
    assert interface_of("127.0.0.1") is not None
    assert path_hints("127.0.0.1", FAST, FAST, FAST, None) == []
    assert not any(is_wireless(name) for name in wired_alternatives())
