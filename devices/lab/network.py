"""The network of a lab: each device has a network namespace with one interface, and a packet switch joins them.

An interface is a TUN device. It is created here and moved into its namespace, while its descriptor goes to the switch.
This machine's own end is such an interface, too. The network needs root, iproute2, nsenter and sysctl.

Addresses are those of the first 10.213.N.0/24 that is not used here. A socket claims the subnet, so that two labs that
start at the same time use different ones.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from devices.lab.config import OWNER, LabConfig
from devices.lab.shaper import JUMBO_MTU, Shape
from devices.processes.interpreter import module_command

NAMESPACES = Path("/run/netns")
_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x1001
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # the tools may be outside the PATH of ordinary users
_TOOL_S = 20
_QUEUE_PACKETS = 2000  # packets that wait for the switch; only the shaper drops packets of a full link
_END_S = 10.0
# Settings with which one TCP connection fills a link of 200 ms: large windows, and no slow start after a pause.
_SETTINGS = (
    "net.ipv4.tcp_rmem=4096 67108864 134217728",
    "net.ipv4.tcp_wmem=4096 65536 134217728",
    "net.ipv4.tcp_slow_start_after_idle=0",
)
# Congestion control of most devices; this machine may have another default.
_CONGESTION = "cubic"
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


class NoNetwork(Exception):
    """Namespaces cannot be created here. The message gives the reason."""


class LabNetwork:
    """Namespaces of a lab's devices, and the switch between them.

    To end it, kill the process `switch` and call `remove_namespaces`.
    """

    def __init__(self, prefix: str, config: LabConfig, environment: dict[str, str]) -> None:
        """Create the network.

        prefix: start of the namespaces' names.
        environment: environment of the switch.

        Raises NoNetwork if that is not possible here.
        """
        if os.geteuid() != 0:
            raise NoNetwork("network namespaces need root")
        self._claim, subnet = _claim_subnet()
        names = [OWNER, *(device.name for device in config.devices)]
        self.addresses = {name: f"{subnet}.{number}" for number, name in enumerate(names, 1)}
        self.namespaces = {name: f"{prefix}-{number}" for number, name in enumerate(names) if name != OWNER}
        descriptors: list[int] = []
        try:
            for number, name in enumerate(names):
                interface = f"edge{os.getpid()}-{number}"
                descriptors.append(_open_tun(interface))
                self._set_up(name, interface, config)
            self.switch = self._start_switch(descriptors, names, config, environment)
        except (OSError, subprocess.SubprocessError) as error:
            self._claim.close()
            output = getattr(error, "stderr", "") or ""
            raise NoNetwork(f"a network cannot be made here: {' '.join(f'{error} {output}'.split())}") from error
        finally:
            for fd in descriptors:
                os.close(fd)

    def command(self, name: str, args: Sequence[str]) -> list[str]:
        """Return a command line that runs `args` on a device."""
        return in_namespace(self.namespaces[name], args)

    def _set_up(self, name: str, interface: str, config: LabConfig) -> None:
        """Create a device's interface and its routes to the others, each with the largest packet of that link."""
        inside = interface if name == OWNER else "eth0"
        how = f" congctl {_CONGESTION}" if _CONGESTION in _AVAILABLE.read_text().split() else ""
        lines = [
            f"addr add {self.addresses[name]}/24 dev {inside}",
            f"link set {inside} mtu {JUMBO_MTU} txqueuelen {_QUEUE_PACKETS} up",
            *(
                f"route replace {address}/32 dev {inside} mtu {config.shape(name, other).mtu()}{how}"
                for other, address in self.addresses.items()
                if other != name
            ),
        ]
        where: list[str] = []
        if name != OWNER:
            namespace = self.namespaces[name]
            where = ["-n", namespace]
            _run(["ip", "netns", "add", namespace])
            _run(["ip", "link", "set", interface, "netns", namespace, "name", inside])
            _run(self.command(name, [_tool("sysctl"), "-q", "-w", *_SETTINGS]))
            lines.insert(0, "link set lo up")
        _run(["ip", *where, "-batch", "-"], "\n".join(lines))

    def _start_switch(
        self, descriptors: list[int], names: list[str], config: LabConfig, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        rates = {device.name: device.bytes_per_s for device in config.devices}
        ports = [[fd, self.addresses[name], rates.get(name)] for fd, name in zip(descriptors, names, strict=True)]
        lines = [
            [i, j, vars(shape)]
            for i, a in enumerate(names)
            for j, b in enumerate(names)
            if i != j and (shape := config.shape(a, b)) != Shape()
        ]
        return subprocess.Popen(
            module_command(
                "devices.lab.packet_switch", json.dumps({"ports": ports, "lines": lines, "first": config.sleeps})
            ),
            cwd=Path(__file__).parents[2],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=descriptors,
        )


def in_namespace(namespace: str, args: Sequence[str]) -> list[str]:
    """Return a command line that runs `args` in a namespace.

    Unlike `ip netns exec` it keeps the mount of /sys, in which a process finds its control groups.
    """
    return [_tool("nsenter"), f"--net={NAMESPACES / namespace}", *args]


def remove_namespaces(prefix: str) -> None:
    """Remove all namespaces with this prefix of their names, and kill the processes in them."""
    if not NAMESPACES.is_dir():
        return
    for path in sorted(NAMESPACES.glob(f"{prefix}-*")):
        deadline = time.monotonic() + _END_S
        while (pids := _run(["ip", "netns", "pids", path.name], check=False).split()) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)
        _run(["ip", "netns", "del", path.name], check=False)


def _claim_subnet() -> tuple[socket.socket, str]:
    """Return (socket that holds the claim while it is open, first three bytes of the addresses)."""
    used = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    for number in range(256):
        subnet = f"10.213.{number}"
        if any(address.startswith(f"{subnet}.") for address in used):
            continue
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0edge-lab-{subnet}")
            return claim, subnet
        except OSError:  # another lab has claimed it and is about to use it
            claim.close()
    raise NoNetwork("all networks from 10.213.0.0/24 to 10.213.255.0/24 are in use")


def _open_tun(interface: str) -> int:
    """Create an interface that exists until its descriptor is closed; return the descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _IFF_TUN_NO_PI))
    except OSError:
        os.close(fd)
        raise
    return fd


def _tool(name: str) -> str:
    path = shutil.which(name, path=_PATH)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed")
    return path


def _run(args: list[str], stdin: str = "", check: bool = True) -> str:
    """Run a tool; return its standard output."""
    command = [_tool(args[0]), *args[1:]]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=_TOOL_S, check=check)
    return done.stdout
