"""Log lines of a daemon on standard error: time, level, event, and figures as key=value."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

from quant.text import printable

_PLAIN = re.compile(r"[\w.:/@+,\[\]-]+")
_logger = logging.getLogger("edge")


def set_up(*, events: bool = True) -> None:
    """Send log lines to standard error: warnings and errors of all libraries, and `events` of this project. Without
    this call they go nowhere."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PrintableLines("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"))
    logging.getLogger().addHandler(handler)
    if events:
        _logger.setLevel(logging.INFO)


class _PrintableLines(logging.Formatter):
    """Formatter whose lines, also those of tracebacks, have no control characters: some of it is text of a client."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), lines=True)


def info(event: str, **fields: Any) -> None:
    """Log an event that is as it should be."""
    _logger.info(_line(event, fields))


def warning(event: str, **fields: Any) -> None:
    """Log an event that somebody should know of."""
    _logger.warning(_line(event, fields))


def _line(event: str, fields: dict[str, Any]) -> str:
    """Return one log line, whatever the values hold: text from a peer cannot start another line."""
    return " ".join([event, *(f"{key}={_value(str(value))}" for key, value in fields.items() if value is not None)])


def _value(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
