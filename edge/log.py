"""Log lines of a daemon on standard error: time, level, event name and key=value fields."""

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
    """Send log lines to standard error. Without this call nothing is logged.

    Warnings and errors of all libraries are always included.
    events: also include this project's INFO events.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PrintableLines("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"))
    logging.getLogger().addHandler(handler)
    if events:
        _logger.setLevel(logging.INFO)


class _PrintableLines(logging.Formatter):
    """Formatter that removes control characters from lines and tracebacks, because they may contain client text."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), lines=True)


def info(event: str, **fields: Any) -> None:
    """Log a normal event."""
    _logger.info(_line(event, fields))


def warning(event: str, **fields: Any) -> None:
    """Log an event that an operator should notice."""
    _logger.warning(_line(event, fields))


def _line(event: str, fields: dict[str, Any]) -> str:
    """Return a single log line. Field values are escaped, so text from a peer cannot start another line."""
    return " ".join([event, *(f"{key}={_value(str(value))}" for key, value in fields.items() if value is not None)])


def _value(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
