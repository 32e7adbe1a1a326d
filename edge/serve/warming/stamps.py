"""Time stamps in system prompts: texts with the current date or time, which differ in the next prompt.

Stamps are not parsed. Instead, the current moment is written in the usual forms and searched in the text. The same form
then gives the text of a later moment. Stamps with seconds are recognized, although their next value is unpredictable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import NamedTuple

_DAY_S, _MINUTE_S = 86400, 60
_DATES = (
    "%A, %B {day}, %Y",
    "%A, %B %d, %Y",
    "%A, {day} %B %Y",
    "%A, %d %B %Y",
    "%A %d %B %Y",
    "%a %b %d %Y",
    "%B {day}, %Y",
    "%B %d, %Y",
    "%b {day}, %Y",
    "%b %d, %Y",
    "{day} %B %Y",
    "%d %B %Y",
    "{day} %b %Y",
    "%d %b %Y",
    "%Y-%m-%d",
    "%Y/%m/%d",
    "%d.%m.%Y",
    "%m/%d/%Y",
    "%d/%m/%Y",
)
_TIMES = ("%H:%M", "%I:%M %p", "{hour}:%M %p", "%I:%M%p", "{hour}:%M%p")
_SECONDS = re.compile(r":\d\d")


class Stamp(NamedTuple):
    """A date or a time in a text."""

    text: str
    form: str
    in_utc: bool  # otherwise in the time zone of this device

    @property
    def lasts_s(self) -> int:
        """Maximum seconds until the text changes."""
        return 1 if "%S" in self.form else _MINUTE_S if "%M" in self.form else _DAY_S


def stamps_in(text: str, now: float) -> list[Stamp]:
    """Return the stamps in a text that was written at most a minute ago, without duplicates, longest first.

    now: seconds since the epoch.
    """
    stamps: dict[str, Stamp] = {}
    for moment in (now, now - _MINUTE_S):
        for in_utc in (False, True):
            for form in (*_DATES, *_TIMES):
                stamp = Stamp(_written(form, moment, in_utc), form, in_utc)
                for end in _ends(stamp.text, text):
                    seconds = _SECONDS.match(text, end) if form == "%H:%M" else None
                    if seconds is None:
                        stamps.setdefault(stamp.text, stamp)
                    else:
                        stamps.setdefault(stamp.text + seconds[0], Stamp(stamp.text + seconds[0], "%H:%M:%S", in_utc))
    return sorted(stamps.values(), key=lambda stamp: -len(stamp.text))


def moved(text: str, stamps: Sequence[Stamp], then: float) -> str:
    """Return a text with its stamps at another moment. then: seconds since the epoch."""
    if not stamps:
        return text
    later = {stamp.text: _written(stamp.form, then, stamp.in_utc) for stamp in stamps}
    return re.sub(_pattern(*later), lambda place: later[place[0]], text)


def next_change(stamps: Sequence[Stamp], now: float) -> float:
    """Return the moment at which the first of the stamps changes."""
    lasts_s = min(stamp.lasts_s for stamp in stamps)
    if lasts_s < _DAY_S or all(stamp.in_utc for stamp in stamps):
        return (now // lasts_s + 1) * lasts_s
    midnight = datetime.fromtimestamp(now).replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
    return midnight + _DAY_S  # wrong by an hour twice a year


def _written(form: str, moment: float, in_utc: bool) -> str:
    at = datetime.fromtimestamp(moment, timezone.utc if in_utc else None)
    return at.strftime(form.replace("{day}", str(at.day)).replace("{hour}", str(at.hour % 12 or 12)))


def _pattern(*texts: str) -> str:
    """Return a pattern for these texts that does not match inside longer numbers."""
    return rf"(?<!\d)(?:{'|'.join(map(re.escape, texts))})(?!\d)"


def _ends(stamp: str, text: str) -> list[int]:
    """Return the end positions of a stamp in a text."""
    return [place.end() for place in re.finditer(_pattern(stamp), text)] if stamp in text else []
