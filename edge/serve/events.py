"""Lines about what happened to a served model: a lost device, another plan, a restart."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from quant.text import printable

_MOST = 50  # lines
_LONGEST = 500  # characters of a line


class Events:
    """The latest lines about one model, which also go to the server's output."""

    def __init__(self, name: str, say: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        """name: name of the model. say: called with each line. clock: returns seconds since 1970."""
        self._prefix, self._say, self._clock = f"{name}: ", say, clock
        self._lines: deque[tuple[float, str]] = deque(maxlen=_MOST)

    def say(self, line: str) -> None:
        """Keep a line, and print it."""
        self._lines.append((self._clock(), printable(line.removeprefix(self._prefix))[:_LONGEST]))
        self._say(line)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the lines with their times, the oldest first."""
        return [{"time": at, "text": text} for at, text in self._lines]
