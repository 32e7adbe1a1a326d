"""Causes of failures: which of several errors says why, which devices were lost, and which of them not to try again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edge.errors import WorkerError
from quant.text import listed
from transport.errors import TransportError

# A device that is lost takes others with it, which only say that their links broke.
# How little a class of errors says: a link that is refused or timed out may be the cause, one that breaks seldom is.
# Classes that are not here, and the end of a process or of a worker's session, are causes.
_OF_LINKS = {"Refused": 1, "LinkTimeout": 1, "ProtocolError": 2, "LinkClosed": 3}


def is_cause(reason: Exception) -> bool:
    """Return whether what a session said is why it ended, and not what another's end did to it."""
    return getattr(reason, "error", "") not in _OF_LINKS


def is_loss(error: Exception) -> bool:
    """Return whether a device, its process or a link is gone, so that others may do what was asked. Else it was
    refused."""
    if isinstance(error, WorkerError):
        return not error.error or error.error in _OF_LINKS
    return isinstance(error, TransportError)


def failure_reason(reasons: Iterable[Exception], error: Exception | None = None) -> Exception:
    """The error that says most, the first of those that say as much: of what sessions said, and of what failed here.

    There must be one. `error` comes from a link of this device, so its own class counts.
    """
    ranked = [(_OF_LINKS.get(getattr(reason, "error", ""), 0), reason) for reason in reasons]
    if error is not None:
        kind = type(error).__name__
        # A rank that could not reach another one ends, and then cannot be reached: what it was refused comes first.
        before = [candidate for candidate in ranked if kind == getattr(candidate[1], "error", "") == "Refused"]
        ranked = [*before, (_OF_LINKS.get(kind, 0), error), *ranked]
    return min(ranked, key=lambda candidate: candidate[0])[1]


def loss_reason(names: Sequence[str], error: Exception) -> str:
    """Which devices were lost, and why: "pi was lost (went away)". names: as far as they are known."""
    reason = str(error)
    for name in names:
        reason = reason.removeprefix(f"{name}: ").removeprefix(f"{name} ")
    who = listed(names) or "a device"
    return f"{who} {'were' if len(names) > 1 else 'was'} lost ({reason})"


class LostLately:
    """The devices that were lost while one thing was done, in one attempt after the other."""

    def __init__(self) -> None:
        self._lost: set[str] = set()

    def again(self, now: Iterable[str], losses_in_a_row: int) -> set[str]:
        """Return those of the lost devices that were lost in an attempt before: they answer, and fail at their part.
        losses_in_a_row: attempts at this one thing, this one included."""
        if losses_in_a_row == 1:
            self._lost.clear()
        returned = self._lost & set(now)
        self._lost |= set(now)
        return returned
