"""Bodies of requests, with limits for each and for all together; responses in JSON; cancellation on disconnect."""

from __future__ import annotations

import asyncio
import contextvars
import json
import zlib
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import anyio
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive

from devices.processes.limits import give_back_memory
from edge.serve.http.errors import BadRequest

BODY_S = 60.0  # maximum time for a whole request to arrive
R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")


class Json(Response):
    """JSON in ASCII, so that no reader mistakes a character for the end of a line."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content).encode()


_ENCODER = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":"))


def to_json(value: Any) -> str:
    """Return compact JSON in ASCII."""
    return _ENCODER.encode(value)


async def read_body(request: Request) -> bytes:
    """Return the whole body, decompressed. Raises HTTPException if it does not arrive or is invalid."""
    try:
        with anyio.fail_after(BODY_S):
            body = await request.body()
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {BODY_S:.0f} s", {"Connection": "close"}) from None
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in ("gzip", "x-gzip", "deflate"):
        message = f"the body is compressed as {coding[:80]!r}; send it without compression, or as gzip or deflate"
        raise HTTPException(415, message, {"Accept-Encoding": "gzip, deflate"})
    incoming: IncomingBody = request.scope[INCOMING]
    loop = asyncio.get_running_loop()
    try:
        decompressor = _decompressor(body)
        short = decompressor.decompress(body[:SHORT_BYTES], min(SHORT_BYTES, incoming.most))
        if decompressor.eof:
            return short
        n_bytes = await loop.run_in_executor(_LARGE, _decompressed_size, body, incoming.most)
        await incoming.expand(n_bytes)
        return await loop.run_in_executor(_LARGE, _decompressor(body).decompress, body)
    except zlib.error as error:
        raise BadRequest(f"the body is not compressed as {coding}: {error}") from None


def _decompressor(body: bytes) -> zlib._Decompress:
    """Return a decompressor for the format of these bytes. Clients send deflate with and without a header."""
    has_header = body[:2] == b"\x1f\x8b" or (len(body) > 1 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0)
    return zlib.decompressobj(zlib.MAX_WBITS | 32 if has_header else -zlib.MAX_WBITS)


def _decompressed_size(body: bytes, most: int) -> int:
    """Return the size of a body after decompression, or some number above `most` if it is larger than that.

    The memory needed does not grow with the size.
    """
    decompressor = _decompressor(body)
    n_bytes = 0
    while n_bytes <= most and (part := decompressor.decompress(body, DECOMPRESSED_AT_ONCE)):
        n_bytes += len(part)
        body = decompressor.unconsumed_tail
    if n_bytes <= most and not decompressor.eof:
        raise zlib.error("it is incomplete")
    return n_bytes


def utf8(body: bytes) -> bytes:
    """Return JSON as UTF-8 without a byte order mark, from any Unicode encoding. Raises BadRequest for other bytes."""
    encoding = json.detect_encoding(body)
    try:
        return body if encoding == "utf-8" else body.decode(encoding).encode()
    except UnicodeError:
        raise BadRequest(f"the body is not valid text in {encoding}; send JSON in UTF-8") from None


async def read(request: Request, model: type[R]) -> R:
    """Return the validated body.

    Large bodies are validated in a thread, one at a time, so that other requests are not delayed. Raises
    ValidationError for invalid values, BadRequest for too many values, and HTTPException if the body does not arrive.
    """
    body = utf8(await read_body(request))

    def validated() -> R:
        if len(body) > SHORT_BYTES:
            check_values(body)
        return model.model_validate_json(body)

    return await in_thread_if_large(len(body), validated)


async def in_thread_if_large(n_bytes: int, work: Callable[[], T]) -> T:
    """Return the result of work on a body of this size. Large bodies are handled in a thread, one at a time."""
    if n_bytes <= SHORT_BYTES:
        return work()
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_LARGE, context.run, work)


_LARGE = ThreadPoolExecutor(1, thread_name_prefix="large bodies")
MOST_STRINGS = 50_000  # strings in one body, including field names; each message has four or more
MOST_ITEMS = 1_100_000  # comma-separated items, such as token ids
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'",'))


def check_values(body: bytes) -> None:
    """Raise BadRequest for JSON with more values than any request needs, before they become objects.

    For example, 32 MiB of empty messages would take seconds to parse. The contents of strings do not count.
    """
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = unescaped.translate(None, _NOT_STRUCTURE)
    n_strings = structure.count(b'"') // 2
    if n_strings > MOST_STRINGS:
        raise BadRequest(f"the request has {n_strings} strings, at most {MOST_STRINGS} are allowed; send fewer")
    outside = b"".join(structure.split(b'"')[::2])
    if len(outside) > MOST_ITEMS:
        raise BadRequest(f"the request has {len(outside)} items, at most {MOST_ITEMS} are allowed; send fewer")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work. Cancel it and raise ClientDisconnect if the client disconnects.

    The request body must have been read before.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# The first bytes of each body need no reservation, so that a short request never waits for long ones.
SHORT_BYTES = 64 << 10
ROOM_S = 10.0  # maximum wait of a request for a reservation
RETRY_S = 10  # suggested time until a retry: large requests have ended by then
GIVE_BACK_S = 1.0  # delay after the last large body until its memory is returned to the system
# Bytes of a refused body that are read and dropped, so that the client reads the answer.
DRAIN_BYTES = 64 << 20
DRAIN_S = 10.0  # maximum time to read and drop them
DECOMPRESSED_AT_ONCE = 1 << 20  # chunk in bytes while the size of a body is determined
INCOMING = "edge.body"  # key of the body in the scope of a request


class BodyRoom:
    """Memory budget of all request bodies together, granted first come, first served. Use it in one event loop."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = self._free = n_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._gives_back = False  # whether memory will be returned to the system soon

    async def take(self, n_bytes: int) -> None:
        """Reserve bytes once they are free. Raises HTTPException (503) if they are not free within ROOM_S."""
        if not self._waiting and n_bytes <= self._free:
            self._free -= n_bytes
            return
        turn = asyncio.get_running_loop().create_future()
        waits = (n_bytes, turn)
        self._waiting.append(waits)
        try:
            await asyncio.wait_for(asyncio.shield(turn), ROOM_S)
        except asyncio.TimeoutError:
            if not turn.done():
                raise HTTPException(
                    503,
                    f"large requests fill the {self.n_bytes} bytes that this server has for them; try again later,"
                    f" or send less: requests of up to {SHORT_BYTES} bytes need not wait",
                    {"Retry-After": str(RETRY_S)},
                ) from None
        except BaseException:
            if turn.done():
                self.give(n_bytes)
            raise
        finally:
            if not turn.done():
                self._waiting.remove(waits)
                self._serve()  # serve smaller requests that waited behind this one

    def give(self, n_bytes: int) -> None:
        """Release reserved bytes. Once all are free, return the memory to the system."""
        self._free += n_bytes
        self._serve()
        if self._free == self.n_bytes and not self._gives_back:  # not after each of many quick requests
            self._gives_back = True
            asyncio.get_running_loop().call_later(GIVE_BACK_S, self._give_back)

    def _give_back(self) -> None:
        self._gives_back = False
        give_back_memory()

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            n_bytes, turn = self._waiting.popleft()
            self._free -= n_bytes
            turn.set_result(None)


class IncomingBody:
    """The body of one request, of at most `most` bytes, with its reservation."""

    def __init__(self, receive: Receive, headers: Headers, most: int, room: BodyRoom) -> None:
        length = headers.get("content-length", "0")
        self._receive, self.most, self._room = receive, most, room
        self._declared = int(length[:20]) if length.isdecimal() else 0
        self._received = self._reserved = 0
        self.is_complete = self._declared == 0 and "transfer-encoding" not in headers  # whether all of it was received

    def check(self) -> None:
        """Raise HTTPException (413) if the declared length is too large."""
        if self._declared > self.most:
            raise self._too_large()

    async def receive(self) -> Message:
        """Return the next part.

        A known length is reserved at the start, because requests that hold a part while waiting for more could
        deadlock. Raises HTTPException if the body is too large or gets no reservation.
        """
        await self._take(self._declared)
        message = await self._next()
        if self._received > self.most:
            raise self._too_large()
        await self._take(self._received)
        return message

    async def expand(self, n_bytes: int) -> None:
        """Reserve bytes for the decompressed body in addition.

        Raises HTTPException if it is too large or gets no reservation.
        """
        if n_bytes > self.most:
            raise self._too_large()
        await self._take(self._received + n_bytes)

    async def drain(self) -> None:
        """Read and drop the rest, within limits.

        Closing a connection with unread bytes resets it, and the client would never see the answer.
        """
        with anyio.move_on_after(DRAIN_S):
            last = self._received + DRAIN_BYTES
            while not self.is_complete and self._received < last:
                await self._next()

    def close(self) -> None:
        """Release the reservation."""
        n_reserved, self._reserved = self._reserved, 0
        if n_reserved:
            self._room.give(n_reserved)

    async def _next(self) -> Message:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        self.is_complete = not message.get("more_body", False)  # also if the client has disconnected
        return message

    async def _take(self, n_bytes: int) -> None:
        needed = n_bytes - self._reserved
        if n_bytes > SHORT_BYTES and needed > 0:
            await self._room.take(needed)
            self._reserved += needed

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the request has more than {self.most} bytes; send less")
