"""What a person is told of devices that were lost while a model ran."""

from __future__ import annotations

from collections.abc import Sequence


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
