"""Classification of failures: the most informative of several errors, the lost devices, and devices to avoid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edge.errors import WorkerError
from quant.text import listed
from transport.errors import TransportError

# If one device is lost, the other ranks only report that their links to it broke. The numbers order error classes from
# causes to consequences. A refused or timed-out link may be the cause; a broken link rarely is. Errors of other
# classes, and the end of a process or session, are causes and have rank 0.
_OF_LINKS = {"Refused": 1, "LinkTimeout": 1, "ProtocolError": 2, "LinkClosed": 3}


def is_cause(reason: Exception) -> bool:
    """Return True if a session's error is a cause, and not the consequence of another rank's failure."""
    return getattr(reason, "error", "") not in _OF_LINKS


def is_loss(error: Exception) -> bool:
    """Return True if a device, its process or a link was lost, so that other devices may take over. False means that
    the request was refused.
    """
    if isinstance(error, WorkerError):
        return not error.error or error.error in _OF_LINKS
    return isinstance(error, TransportError)


def failure_reason(reasons: Iterable[Exception], error: Exception | None = None) -> Exception:
    """Return the most informative error; the first one if several are equally informative.

    reasons: errors from sessions, which name their class in `error`.
    error: an error of a link of this device, which is ranked by its own class.

    Raises ValueError if there is no error at all.
    """
    ranked = [(_OF_LINKS.get(getattr(reason, "error", ""), 0), reason) for reason in reasons]
    if error is not None:
        kind = type(error).__name__
        # A rank that was refused a link ends, and then other ranks cannot reach it. So its refusal comes first.
        before = [candidate for candidate in ranked if kind == getattr(candidate[1], "error", "") == "Refused"]
        ranked = [*before, (_OF_LINKS.get(kind, 0), error), *ranked]
    return min(ranked, key=lambda candidate: candidate[0])[1]


def loss_reason(names: Sequence[str], error: Exception) -> str:
    """Return a sentence about lost devices, for example "pi was lost (went away)". names: the known device names."""
    reason = str(error)
    for name in names:
        reason = reason.removeprefix(f"{name}: ").removeprefix(f"{name} ")
    who = listed(names) or "a device"
    return f"{who} {'were' if len(names) > 1 else 'was'} lost ({reason})"


class LostLately:
    """Devices that were lost in consecutive attempts at the same work."""

    def __init__(self) -> None:
        self._lost: set[str] = set()

    def again(self, now: Iterable[str], losses_in_a_row: int) -> set[str]:
        """Return the devices among `now` that were also lost in an earlier attempt. They answer, but fail at their
        part.

        now: addresses of the devices that were lost in this attempt.
        losses_in_a_row: number of failed attempts at the current work, including this one.
        """
        if losses_in_a_row == 1:
            self._lost.clear()
        returned = self._lost & set(now)
        self._lost |= set(now)
        return returned
