"""Limits of connections: time to send a request, and number of idle connections."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 20.0  # maximum time for the headers of a request to arrive
MOST_IDLE = 256  # maximum connections without a running request
GRACE_S = 1.0  # minimum age before a new connection may be closed as idle


def bounded_connections() -> type[asyncio.Protocol]:
    """Return a server protocol that closes connections without a request within HEADERS_S.

    If more than MOST_IDLE connections are idle, the longest idle ones are closed first. Clients that send their
    request promptly are therefore not affected. A client that reads a response slowly is not idle, but its connection
    is closed if it reads nothing for HEADERS_S.
    """
    idle: dict[Connection, asyncio.TimerHandle] = {}  # the longest idle first

    class Connection(H11Protocol):  # httptools would accept endless headers
        transport: asyncio.Transport
        cycle: Any  # the running or the last request
        _last_unsent = 0  # unsent bytes when the timer started

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # asyncio does this only for sockets whose protocol number is set. Otherwise the end of a response may wait
            # for the client's acknowledgement of its beginning, up to 40 ms.
            self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
            """Update the idle state. The timer starts when the connection becomes idle."""
            if self.cycle is not None and not self.cycle.response_complete:
                if timer := idle.pop(self, None):
                    timer.cancel()
            elif self not in idle and (self._unsent() or not self.transport.is_closing()):
                self._last_unsent = self._unsent()
                idle[self] = asyncio.get_running_loop().call_later(HEADERS_S, self._time_out)

        def _unsent(self) -> int:
            """Return the bytes of complete responses that the client has not read yet."""
            inner = getattr(getattr(self.transport, "_ssl_protocol", None), "_transport", None)  # transport below TLS
            return (inner or self.transport).get_write_buffer_size()

        def _time_out(self) -> None:
            """Close the connection, unless the client has read some of a response since the timer started."""
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
