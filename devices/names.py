"""Names of devices."""

from __future__ import annotations

import re
import socket

from devices.errors import TrustError

MAX_NAME = 56  # mDNS allows 63 bytes; the rest is for the number that a rename adds
# The first is no '-' or '.': names stand in command lines.
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")


def is_name(text: str) -> bool:
    """Return whether `text` is a valid name of a device."""
    return _NAME.fullmatch(text) is not None


def check_name(text: str) -> str:
    """The name itself; TrustError if it cannot be one."""
    if not is_name(text):
        raise TrustError(
            f"a device's name has 1 to {MAX_NAME} letters, digits, '-', '_' or '.', and begins with a letter or digit; "
            f"got {text[:80]!r}"
        )
    return text


def host_name() -> str:
    """This machine's own name, as a device can have it."""
    return name_from(socket.gethostname().partition(".")[0])


def name_from(text: str) -> str:
    """A device name as near to `text`, such as a host name, as the rules allow."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:MAX_NAME] or "device"
