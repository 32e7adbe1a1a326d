"""Progress of loading in a child process, as lines for the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from edge.tasks import ShowStep, Steps


class RemoteSteps(Steps):
    """Steps that a child process reports to the server."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        """send: sends a message to the server."""
        self._send = send

    @contextmanager
    def step(self, label: str, total: float | None = None, unit: str = "bytes") -> Iterator[ShowStep]:
        self._send({"say": label})
        yield lambda n, total=None, what="": None

    def say(self, line: str) -> None:
        self._send({"say": line})
