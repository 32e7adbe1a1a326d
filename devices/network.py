"""Addresses of this machine, and hints that a better path to another device may exist.

The hints are about Wi-Fi next to a cable, a slow cable, or a tunnel. The caller supplies measurements; properties of
interfaces come from Linux's /sys. Other systems get only the hints that need no /sys.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from devices.machine_cores import read_line, read_number

SYS = Path("/sys/class/net")

# Values of an interface's `type` file: Ethernet frames, or no link layer, as tunnels have (WireGuard, Tailscale,
# OpenVPN).
_TYPE_ETHERNET = "1"
_TYPE_NONE = "65534"

# On an idle link, messages take a few ten percent longer than the best. Three times the best means waiting. A wait
# below a millisecond comes from the other side's scheduler and needs no hint.
MEDIAN_FAR_ABOVE_BEST = 3.0
MEDIAN_WAIT_S = 0.001
# On any busy system one message in a hundred is late. Ten times the median and 20 ms mean retransmissions or sleeping
# radios.
P99_FAR_ABOVE_MEDIAN = 10.0
P99_LATE_S = 0.020
# Ethernet and its switches take some tenths of a millisecond one way; 5 ms is not a local cable.
WIRED_BEST_S = 0.005
# TCP reaches 94 percent of the Ethernet rate; from 70 percent on, the link is the limit.
LINK_IS_LIMIT = 0.7
# 100 Mbit/s and most Wi-Fi are below 15 percent of a gigabit; a slow processor that encrypts is above.
LINK_IS_NOT_LIMIT = 0.15
FAST_MBIT = 1000  # speed that every Ethernet port of the last fifteen years can reach
_MBIT_BYTES = 125_000  # bytes a second in a megabit a second

MAX_ADDRESSES = 16  # maximum number of addresses of one device

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


def interface_addresses() -> dict[str, list[Any]]:
    """Return the addresses of each interface, as psutil reports them; {} if the system hides them, as new Androids."""
    try:
        return dict(psutil.net_if_addrs())
    except OSError:
        return {}


def own_networks() -> list[Interface]:
    """Return the addresses of this machine with their networks, for interfaces that are up."""
    try:
        stats = psutil.net_if_stats()
    except OSError:  # Android hides the statistics and the addresses
        return []
    interfaces: list[Interface] = []
    for name, entries in interface_addresses().items():
        if name in stats and not stats[name].isup:
            continue
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            ip = ipaddress.ip_address(entry.address.partition("%")[0])
            with contextlib.suppress(ValueError):  # point-to-point interfaces may have no mask
                # ipaddress accepts an IPv6 mask only as a length.
                length = int(ipaddress.ip_address(entry.netmask or "")).bit_count()
                interfaces.append(ipaddress.ip_interface(f"{ip}/{length}"))
                continue
            interfaces.append(ipaddress.ip_interface(str(ip)))
    return interfaces


def is_usable(ip: Address) -> bool:
    """Return whether a connection can use an address as it is.

    Link-local IPv6 addresses need a scope (an interface). Link-local IPv4 addresses do not, and two machines on one
    cable may have no others.
    """
    if ip.is_multicast or ip.is_unspecified:
        return False
    return not (ip.is_link_local if ip.version == 6 else ip.is_reserved)


def usable_elsewhere(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses that other machines may be able to connect to, at most MAX_ADDRESSES.

    Loopback addresses are left out. So is text that is not an address, because another machine may have sent it.
    """
    usable = dict.fromkeys(str(ip) for ip in _usable(addresses) if not ip.is_loopback)
    return tuple(islice(usable, MAX_ADDRESSES))


def nearest_first(addresses: Iterable[str], own: Sequence[Interface]) -> tuple[str, ...]:
    """Return the usable addresses, those in a network of this machine first, at most MAX_ADDRESSES.

    An address that this machine has too is dropped if others are left: bridges of containers and virtual machines
    have the same address everywhere.
    """
    usable = set(_usable(addresses))
    elsewhere = usable - {entry.ip for entry in own}

    def order(ip: Address) -> tuple[bool, int, int]:
        return (not any(ip in entry.network for entry in own), ip.version, int(ip))

    return tuple(str(ip) for ip in sorted(elsewhere or usable, key=order))[:MAX_ADDRESSES]


def _usable(addresses: Iterable[str]) -> list[Address]:
    ips = (address_of(text) for text in islice(addresses, 4 * MAX_ADDRESSES))
    return [ip for ip in ips if ip is not None and is_usable(ip)]


def interface_of(local_address: str) -> str | None:
    """Return the interface that has this address of this machine, or None if none has."""
    address = address_of(local_address)
    for name, entries in interface_addresses().items():
        if address is not None and any(address_of(entry.address) == address for entry in entries):
            return str(name)
    return None


def is_wireless(interface: str, sys: Path = SYS) -> bool:
    """Return whether an interface is Wi-Fi, according to /sys."""
    return (sys / interface / "wireless").exists() or (sys / interface / "phy80211").exists()


def is_tunnel(interface: str, sys: Path = SYS) -> bool:
    """Return whether an interface is a tunnel (a VPN), according to /sys."""
    return read_line(sys / interface / "type") == _TYPE_NONE and not (sys / interface / "device").exists()


def wired_alternatives(sys: Path = SYS) -> list[str]:
    """Return the Ethernet interfaces with a connected cable, sorted. Bridges and other virtual ones are left out."""
    try:
        names = sorted(path.name for path in sys.iterdir())
    except OSError:  # not Linux
        return []
    return [
        name
        for name in names
        if read_line(sys / name / "type") == _TYPE_ETHERNET
        and read_line(sys / name / "operstate") == "up"
        and read_line(sys / name / "carrier") == "1"
        and (sys / name / "device").exists()  # it has hardware
        and not is_wireless(name, sys)
    ]


def path_hints(
    local_address: str,
    latency_best_s: float,
    latency_median_s: float,
    latency_p99_s: float,
    bandwidth_bytes_per_s: float | None,
    sys: Path = SYS,
) -> list[str]:
    """Return likely problems of a path, one sentence each.

    local_address: this machine's address in the connection.
    latency_*_s: one-way latencies in seconds of small messages on an otherwise idle connection.
    bandwidth_bytes_per_s: None if it was not measured.
    """
    interface = interface_of(local_address)
    ip = address_of(local_address)
    if interface is None or ip is None or ip.is_loopback:
        return []
    wireless = is_wireless(interface, sys)
    tunnel = is_tunnel(interface, sys)
    hints = []
    if wireless or tunnel:
        hints += _detour(interface, wireless, sys)
    hints += _latency(wireless, tunnel, latency_best_s, latency_median_s, latency_p99_s)
    if not wireless and not tunnel:
        hints += _cable(interface, bandwidth_bytes_per_s, sys)
    return hints


def _detour(interface: str, wireless: bool, sys: Path) -> list[str]:
    """Return hints about a detour: Wi-Fi while a cable is connected, or a tunnel, which always costs time."""
    via = f"Wi-Fi ({interface})" if wireless else f"a tunnel ({interface})"
    wired = [(name, address) for name in wired_alternatives(sys) if (address := _address(name))]
    if wired:
        name, address = wired[0]
        return [
            f"traffic goes over {via} although a cable is connected ({name}, {address}): "
            f"use the other device's address in the network of {name}"
        ]
    if unaddressed := wired_alternatives(sys):
        return [f"traffic goes over {via}; a cable is connected ({unaddressed[0]}) but has no address yet"]
    if wireless:
        return []
    return [f"traffic goes through {via}: if both devices are in one network, use their addresses in that network"]


def _latency(wireless: bool, tunnel: bool, best: float, median: float, p99: float) -> list[str]:
    hints = []
    if not wireless and not tunnel and best > WIRED_BEST_S:
        hints.append(
            f"even the fastest message takes {_ms(best)} one way, a local cable takes well below 1 ms: "
            "the other device may be on Wi-Fi, or behind a router or tunnel"
        )
    reason = (
        "Wi-Fi power saving (iw dev IF set power_save off) and busy channels are the usual reasons"
        if wireless
        else "other traffic on the link, a busy device or Wi-Fi further on are the usual reasons"
    )
    if median > MEDIAN_FAR_ABOVE_BEST * best and median - best >= MEDIAN_WAIT_S:
        hints.append(f"latency median {_ms(median)} is far above the best seen, {_ms(best)}: {reason}")
    elif p99 > P99_FAR_ABOVE_MEDIAN * median and p99 >= P99_LATE_S:
        hints.append(f"one message in a hundred takes {_ms(p99)}, the median is {_ms(median)}: {reason}")
    return hints


def _cable(interface: str, bandwidth: float | None, sys: Path) -> list[str]:
    """Return hints from comparing the speed of an Ethernet link with the measured bandwidth."""
    speed = read_number(sys / interface / "speed")  # 0 for virtual machines (-1) and Wi-Fi (cannot be read)
    if not speed:
        return []
    hints = []
    if read_line(sys / interface / "duplex") == "half":
        hints.append(f"{interface} runs at half duplex: set both ends to negotiate on their own, and check the cable")
    share = None if bandwidth is None else bandwidth / (speed * _MBIT_BYTES)
    if share is not None and share >= LINK_IS_LIMIT and speed < FAST_MBIT:
        hints.append(
            f"{interface} runs at {speed} Mbit/s and limits the transfer: check the cable (a gigabit needs all "
            "four pairs) and the port at its other end"
        )
    if bandwidth is not None and share is not None and share < LINK_IS_NOT_LIMIT and speed >= FAST_MBIT:
        hints.append(
            f"{interface} runs at {speed} Mbit/s but only {bandwidth / _MBIT_BYTES:.0f} Mbit/s arrive: a part further "
            "on is slower, such as Wi-Fi or a 100 Mbit/s port at the other device"
        )
    return hints


def _address(interface: str) -> str | None:
    """Return an address of an interface that other devices in its network can use, or None."""
    for entry in interface_addresses().get(interface, []):
        ip = address_of(entry.address)
        if ip is not None and not ip.is_link_local:
            return str(ip)
    return None


def address_of(text: str) -> Address | None:
    """Return the address in a text, or None if it is not an address.

    An interface after "%" is removed. An IPv4 address that a dual-stack socket shows as IPv6 becomes IPv4 again.
    """
    try:
        ip = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:  # psutil lists hardware addresses, too
        return None
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
