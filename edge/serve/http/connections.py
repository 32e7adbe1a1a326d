"""Bounds on connections: how long one may take to make a request, and how many may be idle."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 20.0  # for the headers of a request to arrive
MOST_IDLE = 256  # connections without a running request
GRACE_S = 1.0  # so that of many new connections none is closed before it could be read


def bounded_connections() -> type[asyncio.Protocol]:
    """Return the protocol of a server that closes connections without a request within HEADERS_S. If more than
    MOST_IDLE are idle, those that have been idle longest are closed: a client that sends its request at once is never
    among them. A client that reads a response slowly is not idle; it is closed if it takes nothing for HEADERS_S."""
    idle: dict[Connection, asyncio.TimerHandle] = {}  # the longest idle first

    class Connection(H11Protocol):  # httptools would accept headers without end
        transport: asyncio.Transport
        cycle: Any  # the running request, or the last one
        _last_unsent = 0  # bytes, when its timer began

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._note()
            for oldest, timer in [*idle.items()][: max(0, len(idle) - MOST_IDLE)]:
                if timer.when() - HEADERS_S + GRACE_S > asyncio.get_running_loop().time():
                    break
                if not oldest._unsent():
                    oldest._close()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._note()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._note()

        def connection_lost(self, error: Exception | None) -> None:
            if timer := idle.pop(self, None):
                timer.cancel()
            super().connection_lost(error)

        def _note(self) -> None:
            """Note whether it is idle; its time begins when it becomes idle."""
            if self.cycle is not None and not self.cycle.response_complete:
                if timer := idle.pop(self, None):
                    timer.cancel()
            elif self not in idle and (self._unsent() or not self.transport.is_closing()):
                self._last_unsent = self._unsent()
                idle[self] = asyncio.get_running_loop().call_later(HEADERS_S, self._time_out)

        def _unsent(self) -> int:
            """Return bytes of responses that are complete, and that its client has not taken yet."""
            inner = getattr(getattr(self.transport, "_ssl_protocol", None), "_transport", None)  # which TLS writes to
            return (inner or self.transport).get_write_buffer_size()

        def _time_out(self) -> None:
            """Close it, unless its client has taken a part of a response meanwhile."""
            if self._unsent() < self._last_unsent:
                del idle[self]
                self._note()
            else:
                self._close()

        def _close(self) -> None:
            if timer := idle.pop(self, None):
                timer.cancel()
            self.transport.abort()

    return Connection
