"""The caller of the request that is being answered: its key, its rights, and the models that it keeps loaded."""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field

from edge.errors import NotAllowed


@dataclass
class Caller:
    """Caller of one request, or of work of the server's own, which may do everything."""

    owner: str = ""  # digest of its key; empty where no key is needed
    client: str = ""  # shares its places in queues with nobody: the digest of the key, or the address without keys
    is_administrator: bool = True
    among_several: bool = False  # whether there are several keys, so that none may fill a queue
    _held: list[tuple[Counter[str], str]] | None = field(default=None, repr=False)  # None: it holds nothing

    def begin(self) -> None:
        """Let the request hold models from now on."""
        self._held = []

    def hold(self, counter: Counter[str], name: str) -> None:
        """Count a model in `counter` until the request ends. Work that outlives its request holds nothing."""
        if self._held is not None and (counter, name) not in self._held:
            counter[name] += 1
            self._held.append((counter, name))

    def end(self) -> None:
        """Give back all that the request holds."""
        ended, self._held = self._held or (), None
        for counter, name in ended:
            counter[name] -= 1


CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 - it holds nothing


def check_administrator(what: str) -> None:
    """Raise NotAllowed unless the caller is an administrator. what: what only they may do."""
    if not CALLER.get().is_administrator:
        raise NotAllowed(
            f"only an administrator may {what}, because it concerns every key; ask with a key of --admin-key"
        )
