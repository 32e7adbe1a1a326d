"""Run a command to its end on a pseudo-terminal."""

import fcntl
import os
import re
import select
import struct
import termios
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support.helpers import TIMEOUT_S, begin


def on_terminal(*args: str | Path, width: int, env: Mapping[str, str]) -> tuple[int, list[str]]:
    """`edge` with these arguments: its exit code, and the lines it shows, without colours. `env` is added."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    with os.fdopen(theirs, "r+b", buffering=0) as end:
        process = begin(args, {**plain, "TERM": "xterm", **env}, (end, end, end))
    try:
        shown = _read(ours)
        code = process.wait(TIMEOUT_S)
    finally:
        os.close(ours)
        process.kill()
        process.wait()
    return code, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "").splitlines()


def _read(terminal: int) -> str:
    """All that is shown until nobody has the terminal any more."""
    shown, deadline = b"", time.monotonic() + TIMEOUT_S
    while True:
        left = max(0.0, deadline - time.monotonic())
        assert select.select([terminal], [], [], left)[0], f"not at its end after {TIMEOUT_S} s: {shown!r}"
        try:
            some = os.read(terminal, 1 << 16)
        except OSError:  # Linux: the last one closed it
            some = b""
        if not some:
            return shown.decode()
        shown += some
