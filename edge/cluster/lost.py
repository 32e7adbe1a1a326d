"""Devices that were lost while a model ran: what is shown of them, and which of them not to try again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def lost_words(names: Sequence[str], error: Exception) -> str:
    """Which devices were lost, and why: "pi was lost (went away)". names: as far as they are known."""
    reason = str(error)
    for name in names:
        reason = reason.removeprefix(f"{name}: ").removeprefix(f"{name} ")
    who = listed(names) or "a device"
    return f"{who} {'were' if len(names) > 1 else 'was'} lost ({reason})"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence, each once: "pi, nas and this device"."""
    *others, last = list(dict.fromkeys(names)) or [""]
    return f"{', '.join(others)} and {last}" if others else last


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
