"""Formatting of numbers, names and errors for people, and overlaps of texts."""

import math
import unicodedata
from collections.abc import Sequence


def bytes_text(n: float) -> str:
    """Return bytes in binary units with three digits: "640 B", "1.23 GiB"."""
    return f"{n:.0f} B" if abs(n) < 1024 else _scaled(n, 1024, ("KiB", "MiB", "GiB", "TiB"))


def count_text(n: float) -> str:
    """Return a count in thousands, millions or billions with three digits: "640", "1.10 B"."""
    return f"{n:.0f}" if abs(n) < 1000 else _scaled(n, 1000, ("K", "M", "B", "T"))


def counted(n: float, what: str) -> str:
    """Return a number with its unit: "1 thread", "1.5 cores", "2 microbatches"."""
    return f"{n:g} {what}" if n == 1 else f"{n:g} {what}{'es' if what.endswith(('ch', 's', 'x')) else 's'}"


def with_article(noun: str) -> str:
    """Return a noun with its article: "a token", "an input"."""
    return f"{'an' if noun[:1].lower() in tuple('aeio') else 'a'} {noun}"


def listed(names: Sequence[str]) -> str:
    """Return names as a part of a sentence, each once: "pi, nas and this device"."""
    *others, last = list(dict.fromkeys(names)) or [""]
    return f"{', '.join(others)} and {last}" if others else last


def number_text(value: float) -> str:
    """Return a number with three digits and no exponent, down to a millionth: "1,764", "12.3", "0.00102"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = min(6, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{digits}f}"


def seconds_text(seconds: float) -> str:
    """Return a time in milliseconds with its unit: "12.3 ms"."""
    return f"{number_text(1e3 * seconds)} ms"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _scaled(n: float, base: int, units: tuple[str, ...]) -> str:
    value, unit = n / base, 0
    # 999.5 would become "1000", which is 1.00 of the next unit.
    while abs(value) >= base - 0.5 and unit < len(units) - 1:
        value, unit = value / base, unit + 1
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {units[unit]}"


def age_text(seconds: float) -> str:
    """Return a text such as "3 h ago"."""
    for unit, n in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= n:
            return f"{seconds / n:.0f} {unit} ago"
    return "now" if seconds < 1 else f"{seconds:.0f} s ago"


def printable(text: str, *, lines: bool = False) -> str:
    """Return text from another machine so that a terminal displays it and obeys no part of it.

    Control characters become spaces, and bytes that are not text become a mark. Invisible characters that change the
    look of others, such as those for the direction of writing, are removed.

    lines: keep newlines and tabs, and characters of multi-line text: wide spaces and joiners of letters.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _shown(c, lines) for c in text)


def _shown(char: str, lines: bool) -> str:
    if lines and (char in _LAYOUT or unicodedata.category(char) in _HARMLESS):
        return char
    category = unicodedata.category(char)
    return "\ufffd" if category == "Cs" else "" if category == "Cf" or (lines and char == "\r") else " "


_LAYOUT = "\n\t\u200c\u200d"  # including the joiners of Persian, Indian scripts and emoji
_HARMLESS = ("Zs", "Cn", "Co")  # wide spaces, and characters that are newer than this Python or belong to a font
