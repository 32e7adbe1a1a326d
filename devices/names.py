"""Names and addresses of devices."""

from __future__ import annotations

import ipaddress
import re
import socket

from devices.errors import TrustError

MAX_NAME = 56  # mDNS allows 63 bytes; the rest is for the number that a rename adds
# The first character is not '-' or '.', because names appear in command lines.
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")
DEFAULT_PORT = 7070
_ADDRESS = re.compile(r"(?:\[(?P<inside>[^\[\]]+)\]|(?P<name>[^\s:/\[\]@]{1,253}))(?::(?P<port>[0-9]{1,5}))?")


def is_name(text: str) -> bool:
    """Return whether `text` is a valid name of a device."""
    return _NAME.fullmatch(text) is not None


def check_name(text: str) -> str:
    """Return `text` if it is a valid name of a device. Raises TrustError otherwise."""
    if not is_name(text):
        raise TrustError(
            f"a device's name has 1 to {MAX_NAME} letters, digits, '-', '_' or '.', and begins with a letter or digit; "
            f"got {text[:80]!r}"
        )
    return text


def host_name() -> str:
    """Return this machine's host name as a valid device name."""
    return name_from(socket.gethostname().partition(".")[0])


def name_from(text: str) -> str:
    """Return the valid device name nearest to `text`, such as a host name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:MAX_NAME] or "device"


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT, or [HOST]:PORT for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """Return (host, port) from "host", "host:port", "[::1]:7070" or "::1". Raises ValueError if it is not valid."""
    if _is_ipv6(text):
        return text, DEFAULT_PORT
    match = _ADDRESS.fullmatch(text)
    port = int(match["port"] or DEFAULT_PORT) if match else 0
    if not match or port > 65535 or (match["inside"] and not _is_ipv6(match["inside"])):
        raise ValueError(f"an address is HOST or HOST:PORT, got {text[:80]!r}")
    return match["inside"] or match["name"], port


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False
