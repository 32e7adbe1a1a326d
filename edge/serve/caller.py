"""Caller of the current request: its key, its rights, and the models that it keeps loaded."""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field

from edge.errors import NotAllowed


@dataclass
class Caller:
    """Caller of one request. The server's own work has a caller with all rights."""

    owner: str = ""  # digest of the key; empty if no key is needed
    client: str = ""  # identity for fair queuing: digest of the key, or the address if there are no keys
    is_administrator: bool = True
    weight: float = 1.0  # share of the key while requests wait
    among_several: bool = False  # whether there are several keys, so that no key may fill a queue
    # Models that it keeps loaded; None: not a request.
    _held: list[tuple[Counter[str], str]] | None = field(default=None, repr=False)

    def begin(self) -> None:
        """Let the request keep models loaded from now on."""
        self._held = []

    def hold(self, counter: Counter[str], name: str) -> None:
        """Count a use of a model in `counter` until the request ends. Work that outlives its request is not counted."""
        if self._held is not None and (counter, name) not in self._held:
            counter[name] += 1
            self._held.append((counter, name))

    def end(self) -> None:
        """Release all models that the request keeps loaded."""
        ended, self._held = self._held or (), None
        for counter, name in ended:
            counter[name] -= 1


CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 - it holds nothing


def check_administrator(what: str) -> None:
    """Raise NotAllowed unless the caller is an administrator. what: the action, for the message."""
    if not CALLER.get().is_administrator:
        raise NotAllowed(f"only an administrator may {what}, because it concerns every key; use a key of --admin-key")
