"""Advice on models that fit the devices of the server, kept for a while because it takes seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from edge.errors import EdgeError
from edge.serve.planning.process import planned

ANSWER_S = 4.0  # time after which a request is answered although the advice is not complete
FRESH_S = 60.0  # maximum age; older advice is replaced in the background
LIMIT_S = 300.0  # maximum time of the process


class Advice:
    """The advice of one server. Use it in one event loop."""

    def __init__(self) -> None:
        self._result: Mapping[str, Any] = {"rows": [], "devices": [], "notes": []}
        self._tried_at, self._error = float("-inf"), ""
        self._making: asyncio.Task[None] | None = None

    async def get(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON of `edge advise`, with `state`: "ready", "computing" or "failed", and then `error`.

        It takes at most ANSWER_S. While advice is made again, the previous advice is returned.
        arguments: those of `edge.serve.planning.child.advice`.
        """
        if self._making is None and time.monotonic() >= self._tried_at + FRESH_S:
            self._making = asyncio.create_task(self._make(arguments))
        if self._making is not None and not self._result["rows"]:
            await asyncio.wait({self._making}, timeout=ANSWER_S)
        if self._error:
            return {**self._result, "state": "failed", "error": self._error}
        return {**self._result, "state": "ready" if self._result["rows"] else "computing"}

    async def _make(self, arguments: Mapping[str, Any]) -> None:
        try:
            self._result, self._error = await planned("advice", arguments, LIMIT_S), ""
        except (EdgeError, OSError) as error:
            self._error = str(error)
        finally:
            self._tried_at, self._making = time.monotonic(), None
