"""Formatting of numbers, names and errors for people, and how texts overlap."""

import math
import unicodedata
from collections.abc import Sequence


def bytes_text(n: float) -> str:
    """Bytes in binary units with three digits: "640 B", "1.23 GiB"."""
    return f"{n:.0f} B" if abs(n) < 1024 else _scaled(n, 1024, ("KiB", "MiB", "GiB", "TiB"))


def count_text(n: float) -> str:
    """A count in thousands, millions or billions with three digits: "640", "1.10 B"."""
    return f"{n:.0f}" if abs(n) < 1000 else _scaled(n, 1000, ("K", "M", "B", "T"))


def counted(n: float, what: str) -> str:
    """A number and what it counts: "1 thread", "1.5 cores", "2 microbatches"."""
    return f"{n:g} {what}" if n == 1 else f"{n:g} {what}{'es' if what.endswith(('ch', 's', 'x')) else 's'}"


def with_article(noun: str) -> str:
    """A noun after its article: "a token", "an input"."""
    return f"{'an' if noun[:1].lower() in tuple('aeio') else 'a'} {noun}"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence, each once: "pi, nas and this device"."""
    *others, last = list(dict.fromkeys(names)) or [""]
    return f"{', '.join(others)} and {last}" if others else last


def number_text(value: float) -> str:
    """A number with three digits and no exponent, down to a millionth: "1,764", "12.3", "0.00102"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = min(6, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{digits}f}"


def seconds_text(seconds: float) -> str:
    """A time as `number_text` has it, with its unit: "12.3 ms"."""
    return f"{number_text(1e3 * seconds)} ms"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _scaled(n: float, base: int, units: tuple[str, ...]) -> str:
    value, unit = n / base, 0
    # 999.5 would be shown as "1000": that is the next unit's 1.00.
    while abs(value) >= base - 0.5 and unit < len(units) - 1:
        value, unit = value / base, unit + 1
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {units[unit]}"


def age_text(seconds: float) -> str:
    """Describe how long ago something was."""
    for unit, n in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= n:
            return f"{seconds / n:.0f} {unit} ago"
    return "now" if seconds < 1 else f"{seconds:.0f} s ago"


def printable(text: str, *, lines: bool = False) -> str:
    """Return text of a stranger so that a terminal shows it and obeys nothing in it.

    Control characters become spaces, and bytes that are no text a mark. Characters that are invisible and change
    what others look like, as those that turn the direction of writing, are left out.
    lines: keep newlines and tabs, and what several lines are written with: wide spaces and joiners of letters.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _shown(c, lines) for c in text)


def _shown(char: str, lines: bool) -> str:
    if lines and (char in _LAYOUT or unicodedata.category(char) in _HARMLESS):
        return char
    category = unicodedata.category(char)
    return "\ufffd" if category == "Cs" else "" if category == "Cf" or (lines and char == "\r") else " "


_LAYOUT = "\n\t\u200c\u200d"  # with the joiners of Persian, of Indian scripts and of emoji
_HARMLESS = ("Zs", "Cn", "Co")  # wide spaces, and characters that are newer than this Python or are of a font
