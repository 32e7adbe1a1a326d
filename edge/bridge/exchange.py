"""Operations between a bridge and one page: frames to the page, and replies to them, also when connections break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from edge.browser.frames import Frame, pack
from edge.errors import EngineError

_ANSWER_S = 60.0  # time for the page to answer an operation of the bridge itself
_TRIPS = 3  # round trips of each size; the fastest counts
_LEAST_S = 1e-4  # shortest time for the padding that counts
_PADDING = 128 << 10  # bytes there and back that show the network's rate

Reply = Callable[[dict[str, Any], memoryview], Awaitable[None]]


@dataclass(frozen=True)
class _Operation:
    frame: bytes
    reply: Reply
    fail: Callable[[str], None]


def _no_matter(_: str) -> None:
    """Do nothing, because the connection of the process that asked is closed anyway."""


class Exchange:
    """Stream of frames to a page, and the operations that it has not answered."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """on_end: called when the page's connection has ended and no newer one has begun."""
        self._on_end = on_end
        self._stream: asyncio.Queue[bytes | None] | None = None
        self._number = 0
        self._unanswered: dict[int, _Operation] = {}

    @property
    def is_connected(self) -> bool:
        """True while the page has a stream."""
        return self._stream is not None

    def attach(self) -> AsyncIterator[bytes]:
        """Return the frames for the page, until it leaves. A newer stream ends an older one."""
        if self._stream is not None:
            while not self._stream.empty():
                self._stream.get_nowait()
            self._stream.put_nowait(pack({"op": "replaced"}))
            self._stream.put_nowait(None)
        own: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._stream = own
        return self._frames(own)

    async def _frames(self, own: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
        try:
            while (data := await own.get()) is not None:
                yield data
        finally:
            if self._stream is own:
                self._stream = None
                self._on_end()

    def ask(
        self,
        header: dict[str, Any],
        payload: bytes | memoryview,
        reply: Reply,
        fail: Callable[[str], None] = _no_matter,
    ) -> None:
        """Send an operation. It is sent again if the connection breaks before its answer.

        reply: called with the answer.
        fail: called with the reason if the page is lost first.
        """
        self._number += 1
        frame = pack({**header, "id": self._number}, payload)
        self._unanswered[self._number] = _Operation(frame, reply, fail)
        self._put(frame)

    async def network(self) -> tuple[float, float]:
        """Return the seconds of a round trip to the page's worker, and the bytes per second, there and back together.

        Raises the errors of `call`.
        """
        loop, fastest_s = asyncio.get_running_loop(), []
        for size in (0, _PADDING):
            trips_s = []
            for _ in range(_TRIPS):
                began = loop.time()
                await self.call("ping", bytes(size))
                trips_s.append(loop.time() - began)
            fastest_s.append(min(trips_s))
        bare_s, padded_s = fastest_s
        return bare_s, 2 * _PADDING / max(padded_s - bare_s, _LEAST_S)

    async def call(self, op: str, payload: bytes = b"", **fields: Any) -> dict[str, Any]:
        """Carry out an operation. Return the header of its answer.

        Raises EngineError if the page refuses it, is lost, or takes too long.
        """
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

        async def reply(header: dict[str, Any], payload: memoryview) -> None:
            if not answer.done():
                answer.set_result((header, payload))

        def fail(why: str) -> None:
            if not answer.done():
                answer.set_exception(EngineError(why))

        self.ask({"op": op, **fields}, payload, reply, fail)
        try:
            header, _ = await asyncio.wait_for(answer, _ANSWER_S)
        except asyncio.TimeoutError:
            raise EngineError(f"the page did not answer {op} within {_ANSWER_S:g} s") from None
        if (error := header.get("error")) is not None:
            raise EngineError(f"{error!s:.500}")
        return header

    async def on_answer(self, header: dict[str, Any], payload: memoryview) -> None:
        """Pass an answer on. An answer that arrives again after its connection broke is ignored."""
        number = header.get("id")
        operation = self._unanswered.pop(number, None) if isinstance(number, int) else None
        if operation is not None:
            await operation.reply({name: value for name, value in header.items() if name != "id"}, payload)

    def tell(self, header: dict[str, Any]) -> None:
        """Send a frame that has no answer."""
        self._put(pack(header))

    def send_again(self, pending: Any) -> None:
        """Send what was lost with the last connection. pending: numbers of the operations that the page has."""
        received = set(pending) if isinstance(pending, list) and all(isinstance(n, int) for n in pending) else set()
        for number, operation in self._unanswered.items():
            if number not in received:
                self._put(operation.frame)

    def fail(self, why: str) -> None:
        """Forget all operations, because the page was lost."""
        operations = [*self._unanswered.values()]
        self._unanswered.clear()
        for operation in operations:
            operation.fail(why)

    def close(self) -> None:
        """End the page's stream."""
        self._put(None)

    def _put(self, frame: bytes | None) -> None:
        if self._stream is not None:
            self._stream.put_nowait(frame)
