"""Which of several errors says why. One that is lost takes others with it, which only say that their links broke."""

from __future__ import annotations

from collections.abc import Iterable

from edge.errors import WorkerError
from transport.errors import TransportError

# How little a class of errors says: a link that is refused or timed out may be the cause, one that breaks seldom is.
# Classes that are not here, and the end of a process or of a worker's session, are causes.
_OF_LINKS = {"Refused": 1, "LinkTimeout": 1, "ProtocolError": 2, "LinkClosed": 3}


def is_cause(word: Exception) -> bool:
    """Whether what a session said is why it ended, and not what another's end did to it."""
    return getattr(word, "error", "") not in _OF_LINKS


def is_loss(error: Exception) -> bool:
    """Whether a device, its process or a link is gone, so that others may do what was asked. Else it was refused."""
    if isinstance(error, WorkerError):
        return not error.error or error.error in _OF_LINKS
    return isinstance(error, TransportError)


def failure_reason(words: Iterable[Exception], error: Exception | None = None) -> Exception:
    """The error that says most, the first of those that say as much: of what sessions said, and of what failed here.

    There must be one. `error` comes from a link of this device, so its own class counts.
    """
    ranked = [(_OF_LINKS.get(getattr(word, "error", ""), 0), word) for word in words]
    if error is not None:
        kind = type(error).__name__
        # A rank that could not reach another one ends, and then cannot be reached: what it was refused comes first.
        before = [candidate for candidate in ranked if kind == getattr(candidate[1], "error", "") == "Refused"]
        ranked = [*before, (_OF_LINKS.get(kind, 0), error), *ranked]
    return min(ranked, key=lambda candidate: candidate[0])[1]
