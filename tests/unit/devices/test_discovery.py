"""Test finding workers by real multicast DNS, on loopback and between two hosts."""

import asyncio
import ipaddress
import itertools
import json
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psutil
import pytest
import zeroconf

from devices import discovery
from devices.discovery import SERVICE, Announcement, Announcer, Discovered, announced_addresses, browse
from devices.errors import DiscoveryError
from devices.names import MAX_NAME
from devices.network import MAX_ADDRESSES, nearest_first, own_networks, usable_elsewhere
from tests.support.helpers import until
from tests.support.namespaces import Host, two_hosts
from tests.support.thorough import thorough

LOOPBACK = ["127.0.0.1"]
BROWSE_S = 1.5
CLUSTER = "9f86d081884c7d65"
MINE = secrets.token_hex(4)  # in names on loopback, where the tests of another run may be heard

needs_loopback = pytest.mark.skipif(
    not discovery._can_multicast("127.0.0.1"), reason="multicast does not work on this machine's loopback interface"
)

WORKER = """
import sys
from devices.discovery import Announcement, Announcer, announced_addresses
said = Announcement(sys.argv[1], 7001, announced_addresses("0.0.0.0"), "0.1.0", "9f86d081884c7d65", True)
with Announcer(said) as announcer:
    print(announcer.name, flush=True)
    sys.stdin.read()
"""
BROWSER = """
import json, sys
from devices.discovery import browse
print(json.dumps([(one.name, one.addresses, one.port, dict(one.properties)) for one in browse(float(sys.argv[1]))]))
"""


def announcement(name: str, port: int = 7000) -> Announcement:
    return Announcement(name, port, ("127.0.0.1",), "0.1.0", CLUSTER, secure=True)


def longer_and_longer() -> Iterator[float]:
    """Yield times to browse for what is there: answers take 0.2 s, and on a busy machine longer."""
    return (BROWSE_S / 3 * 2 ** min(i, 4) for i in itertools.count())


def found_within(expected: Callable[[list[Discovered]], bool]) -> list[Discovered]:
    """Return the devices on loopback once they are as expected; other tests' workers may be there too."""
    results: list[Discovered] = []

    def look() -> bool:
        results[:] = browse(next(seconds), LOOPBACK)
        return expected(results)

    seconds = longer_and_longer()

    until(look, "the workers announced are found")
    return results


@needs_loopback
def test_a_worker_is_found_until_it_says_goodbye() -> None:
    name = f"Küche 2.0 {MINE}"
    with Announcer(announcement(name)) as announcer:
        assert announcer.name == name
        result = found_within(lambda all_: any(item.name == name for item in all_))
        (first,) = (item for item in result if item.name == name)
        assert (first.addresses, first.port) == (("127.0.0.1",), 7000)
        assert first.properties == {"version": "0.1.0", "cluster": CLUSTER, "secure": "1"}
    until(lambda: name not in {item.name for item in browse(BROWSE_S, LOOPBACK)}, "its goodbye arrived")
    announcer.close()


@needs_loopback
def test_a_goodbye_during_the_browse_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"short-lived {MINE}"
    announcer = Announcer(announcement(name))
    seen: list[bool] = []

    class Listener(discovery._Listener):
        def infos(self, zeroconf: zeroconf.Zeroconf) -> list[zeroconf.ServiceInfo]:
            until(lambda: name in str(self._alive), "it was there")
            seen.append(True)
            announcer.close()
            until(lambda: name not in str(self._alive), "its goodbye arrived")
            return super().infos(zeroconf)

    monkeypatch.setattr(discovery, "_Listener", Listener)
    announcer.start()
    assert name not in {item.name for item in browse(BROWSE_S, LOOPBACK)}
    assert seen


@needs_loopback
@pytest.mark.parametrize("length", [*thorough(12), MAX_NAME])
def test_two_of_one_name_are_told_apart(length: int) -> None:
    """Also if it is as long as a device's name may be."""
    name = MINE.ljust(length, "t")
    with Announcer(announcement(name, 7000)) as first, Announcer(announcement(name, 7001)) as second:
        assert first.name == name
        assert second.name == f"{name}-2"
        result = found_within(lambda all_: {name, f"{name}-2"} <= {item.name for item in all_})
        assert [item.name for item in result] == sorted(item.name for item in result)
        assert {item.name: item.port for item in result}.items() >= {(name, 7000), (f"{name}-2", 7001)}


@needs_loopback
def test_it_works_within_an_event_loop() -> None:
    async def blocking() -> list[Discovered]:
        with Announcer(announcement(f"looped {MINE}")):
            return found_within(lambda all_: any(item.name == f"looped {MINE}" for item in all_))

    assert asyncio.run(blocking())


@needs_loopback
def test_a_hostile_announcement_is_cut_to_size() -> None:
    text = b"".join(bytes([len(entry)]) + entry for entry in (b"k%d\x1b=" % i + b"\xff\x1b[2J" * 40 for i in range(40)))
    info = zeroconf.ServiceInfo(
        SERVICE,
        f"ev\x9bil {MINE}.{SERVICE}",
        port=7000,
        server="evil.local.",
        properties=text,
        parsed_addresses=["127.0.0.1", "0.0.0.0", "224.0.0.1", "fe80::1", "255.255.255.255"],
    )
    nowhere = zeroconf.ServiceInfo(
        SERVICE, f"nowhere {MINE}.{SERVICE}", port=0, server="e.local.", parsed_addresses=LOOPBACK
    )
    with zeroconf.Zeroconf(interfaces=LOOPBACK) as responder:
        responder.register_service(info)
        responder.register_service(nowhere)
        result = found_within(lambda all_: any(item.name == f"ev?il {MINE}" for item in all_))
    assert f"nowhere {MINE}" not in {item.name for item in result}
    (first,) = (item for item in result if item.name == f"ev?il {MINE}")
    assert first.addresses == ("127.0.0.1",)
    assert not {"version", "cluster", "secure"} & first.properties.keys()
    assert 0 < len(first.properties) <= discovery.MAX_PROPERTIES
    for key, value in first.properties.items():
        assert len(key) <= discovery.MAX_KEY
        assert len(value) <= discovery.MAX_VALUE
        assert (key + value).isprintable()


def test_a_flood_of_names_is_bounded() -> None:
    listener = discovery._Listener(0.0)
    added, removed = zeroconf.ServiceStateChange.Added, zeroconf.ServiceStateChange.Removed
    idle = SimpleNamespace(loop=None)
    for number in range(2 * discovery.MAX_FOUND):
        listener(zeroconf=idle, service_type=SERVICE, name=f"w{number}.{SERVICE}", state_change=added)
    assert len(listener._alive) == discovery.MAX_FOUND
    listener(zeroconf=idle, service_type=SERVICE, name=f"W7.{SERVICE}", state_change=removed)
    assert len(listener._alive) == discovery.MAX_FOUND - 1
    listener(zeroconf=idle, service_type=SERVICE, name="not of this type", state_change=added)
    assert len(listener._alive) == discovery.MAX_FOUND - 1


@pytest.mark.parametrize("name", ["", "a\nb", "x" * (MAX_NAME + 1)])
def test_a_name_that_cannot_be_announced(name: str) -> None:
    with pytest.raises(DiscoveryError, match="a device name needs"):
        Announcer(announcement(name))


def test_without_an_interface_the_error_says_what_to_do() -> None:
    nowhere = ["203.0.113.77"]  # an address this machine does not have
    with pytest.raises(DiscoveryError, match=r"203\.0\.113\.77.*addresses of the workers instead"):
        browse(0.1, nowhere)
    announcer = Announcer(announcement("alone"), nowhere)
    with pytest.raises(DiscoveryError, match="addresses of the workers instead"):
        announcer.start()
    announcer.close()


def test_a_port_that_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(discovery, "_can_multicast", lambda _: True)
    monkeypatch.setattr(zeroconf, "Zeroconf", refuse)
    with pytest.raises(DiscoveryError, match=r"UDP port 5353 \(not permitted\)"):
        browse(0.1)


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on two networks, with a container bridge and an interface that is down."""
    entries = {
        "lo": [("127.0.0.1", "255.0.0.0"), ("::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")],
        "eth0": [("192.168.1.7", "255.255.255.0"), ("fd00::7", "ffff:ffff:ffff:ffff::"), ("fe80::1%eth0", None)],
        "docker0": [("172.17.0.1", "255.255.0.0")],
        "eth1": [("10.0.0.5", "255.0.0.0")],
    }
    monkeypatch.setattr(
        psutil,
        "net_if_addrs",
        lambda: {
            name: [
                SimpleNamespace(
                    family=socket.AF_INET6 if ":" in address else socket.AF_INET, address=address, netmask=mask
                )
                for address, mask in entry  # type: ignore[attr-defined]
            ]
            for name, entry in entries.items()
        },
    )
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=name != "eth1") for name in entries}
    )


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("0.0.0.0", ("172.17.0.1", "192.168.1.7")),
        ("::", ("172.17.0.1", "192.168.1.7", "fd00::7")),
        ("", ("172.17.0.1", "192.168.1.7", "fd00::7")),
        ("10.1.2.3", ("10.1.2.3",)),
        ("127.0.0.1", ("127.0.0.1",)),
        ("::1", ("::1",)),
    ],
)
@pytest.mark.usefixtures("addresses")
def test_what_is_announced_for_a_listen_address(listen: str, expected: tuple[str, ...]) -> None:
    assert announced_addresses(listen) == expected


@pytest.mark.parametrize("listen", ["fe80::1", "224.0.0.1", "no such host", "." * 300])
def test_what_nobody_could_connect_to_is_not_announced(listen: str) -> None:
    with pytest.raises(DiscoveryError, match=r"cannot announce|no address to announce"):
        announced_addresses(listen)


def test_without_a_network_there_is_nothing_to_announce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "own_networks", lambda: [ipaddress.ip_interface("127.0.0.1/8")])
    with pytest.raises(DiscoveryError, match="connect this device to a network"):
        announced_addresses("0.0.0.0")


@pytest.mark.usefixtures("addresses")
def test_addresses_in_a_network_of_this_machine_come_first() -> None:
    own = own_networks()
    theirs = ["10.8.0.9", "172.17.0.1", "192.168.1.9", "fd00::9", "fe80::9"]
    # 172.17.0.1 is this machine's own bridge as well as theirs.
    assert nearest_first(theirs, own) == ("192.168.1.9", "fd00::9", "10.8.0.9")
    assert nearest_first(["192.168.1.7"], own) == ("192.168.1.7",)


def test_what_a_worker_tells_is_checked_and_bounded() -> None:
    useless = [
        "",
        "pi.local",
        "127.0.0.1",
        "::1",
        "::ffff:127.0.0.1",
        "0.0.0.0",
        "::",
        "224.0.0.251",
        "ff02::1",
        "fe80::1",
    ]
    useless += ["255.255.255.255", "fe80::1%eth0", "10.0.0.300", "10.0.0.1:80", "\x1b[2J", "9" * 5000]
    good = ["10.0.0.7", "169.254.3.4", "fd00::7"]
    assert usable_elsewhere([*useless, *good, "::ffff:10.0.0.7", "FD00:0::7"]) == tuple(good)
    many = [f"10.0.{i}.1" for i in range(256)]
    assert usable_elsewhere(many) == tuple(many[:MAX_ADDRESSES])
    assert len(nearest_first(many, [])) == MAX_ADDRESSES


def found_from(host: Host, seconds: float = BROWSE_S) -> list[tuple[str, list[str], int, dict[str, str]]]:
    done = host.run([sys.executable, "-c", BROWSER, str(seconds)])
    assert done.returncode == 0, done.stderr
    return [tuple(load) for load in json.loads(done.stdout)]


def test_two_hosts_find_each_other() -> None:
    with two_hosts() as (item, two):
        first = item.start([sys.executable, "-c", WORKER, "pi"])
        assert first.stdout is not None
        assert first.stdout.readline() == "pi\n"
        second = two.start([sys.executable, "-c", WORKER, "pi"])
        assert second.stdout is not None
        assert second.stdout.readline() == "pi-2\n"
        said = {"version": "0.1.0", "cluster": CLUSTER, "secure": "1"}
        both = [("pi", [item.address], 7001, said), ("pi-2", [two.address], 7001, said)]
        for host in (item, two):
            seconds = longer_and_longer()
            until(lambda host=host, seconds=seconds: found_from(host, next(seconds)) == both, "both are found")  # type: ignore[misc]
        first.communicate("", timeout=30)
        assert first.returncode == 0
        until(lambda: found_from(two) == both[1:], "the one that left is not found")
        until(lambda: found_from(item) == both[1:], "the one that stayed is found from the other host")


def test_a_host_whose_network_is_down_is_told() -> None:
    with two_hosts() as (first, _):
        first.unplug()
        done = first.run(
            [sys.executable, "-c", "import devices.discovery as d; print(d.announced_addresses('0.0.0.0'))"]
        )
        assert "DiscoveryError: no address to announce" in done.stderr


def test_an_interface_that_goes_logs_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    opened = discovery._opened(LOOPBACK)
    try:
        [*protocols] = opened.engine.protocols
        assert protocols
        for protocol in protocols:
            protocol.error_received(OSError(19, "No such device"))
    finally:
        opened.close()
    assert caplog.records == []
