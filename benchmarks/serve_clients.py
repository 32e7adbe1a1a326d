"""Clients of servers under test: they send requests over plain sockets, and note the time of each piece of an answer.

One client for all servers, as light as can be: it shares the processor with them. Lines are looked at when a stream
has ended, not while it comes.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quant.gguf.file import GgufFile

LIMIT_S = 600.0  # of an answer, unless another is named
_EVENT = b"data: "
_DONE = b"[DONE]"
_READ_BYTES = 1 << 16


@dataclass
class Heard:
    """Outcome of a request. Times are of time.perf_counter()."""

    began: float
    status: int = 0  # of HTTP; 0: the connection broke before one came
    at: list[float] = field(default_factory=list)  # when each piece of text came
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""  # what was wrong, empty where nothing was
    ended: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the answer; where the server does not count them, the pieces."""
        return int(self.usage.get("completion_tokens", len(self.at)))

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the server says it did not compute."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    @property
    def first_s(self) -> float:
        """Seconds to the first piece of text."""
        return self.at[0] - self.began

    def check(self) -> Heard:
        """Itself, where it is a whole answer. SystemExit says what it is else."""
        if not self.at or self.finish_reason is None or self.error:
            raise SystemExit(f"no whole answer: HTTP {self.status}, {len(self.at)} pieces, {self.error or 'no reason'}")
        return self


async def ask(
    address: tuple[str, int],
    path: str,
    body: dict[str, Any] | bytes,
    limit_s: float = LIMIT_S,
    pieces: int | None = None,
    heard: Heard | None = None,
    key: str = "",
) -> Heard:
    """POST, and what came until the end. Nothing is raised for what the server or the connection does.

    pieces: break the connection after so many events. heard: is filled as the answer comes. key: API key.
    """
    heard = heard or Heard(time.perf_counter())
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    events: list[tuple[float, bytes]] = []
    try:
        await asyncio.wait_for(_exchange(address, path, data, heard, events, pieces, key), limit_s)
    except (OSError, EOFError, ValueError, asyncio.TimeoutError) as error:
        heard.error = heard.error or f"{type(error).__name__}: {error}"
    heard.ended = time.perf_counter()
    _read(events, heard)
    return heard


async def get(address: tuple[str, int], path: str, limit_s: float = 10.0) -> tuple[int, bytes]:
    """(status, body) of a GET. OSError, EOFError or TimeoutError where nothing answers."""

    async def fetch() -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(_head("GET", path, address))
            status, headers = await _status(reader)
            return status, b"".join([part async for part in _parts(reader, headers)])
        finally:
            writer.close()

    return await asyncio.wait_for(fetch(), limit_s)


async def _exchange(
    address: tuple[str, int],
    path: str,
    data: bytes,
    heard: Heard,
    events: list[tuple[float, bytes]],
    pieces: int | None,
    key: str,
) -> None:
    reader, writer = await asyncio.open_connection(*address, limit=_READ_BYTES)
    try:
        writer.write(_head("POST", path, address, len(data), key) + data)
        await writer.drain()
        heard.status, headers = await _status(reader)
        rest = b""
        async for part in _parts(reader, headers):
            now = time.perf_counter()
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(_EVENT):
                    events.append((now, line))
                    heard.at.append(now)  # of events, until _read sees which have text
            if pieces is not None and len(events) >= pieces:
                return
        if b"text/event-stream" not in headers.get(b"content-type", b""):
            events.append((time.perf_counter(), _EVENT + rest))
    finally:
        writer.close()


def _read(events: list[tuple[float, bytes]], heard: Heard) -> None:
    """Read the events."""
    heard.at, texts = [], []
    for at, line in events:
        data = line[len(_EVENT) :].strip()
        if data == _DONE:
            continue
        try:
            said = json.loads(data)
        except ValueError:
            heard.error = heard.error or f"this is no JSON: {data[:200]!r}"
            continue
        if said.get("error"):
            heard.error = json.dumps(said["error"])
        heard.usage = said.get("usage") or heard.usage
        for choice in said.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            if text:
                heard.at.append(at)
                texts.append(text)
            heard.finish_reason = choice.get("finish_reason") or heard.finish_reason
    heard.text = "".join(texts)
    if heard.status >= 400 and not heard.error:
        heard.error = f"HTTP {heard.status}"


def _head(method: str, path: str, address: tuple[str, int], length: int = 0, key: str = "") -> bytes:
    host = f"{address[0]}:{address[1]}"
    lines = (f"{method} {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", "Connection: close")
    own = [f"Authorization: Bearer {key}"] if key else []
    return "\r\n".join([*lines, *own, f"Content-Length: {length}", "", ""]).encode()


async def _status(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    """The status, and headers by their names in small letters."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    pairs = (line.partition(b":") for line in lines if line)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _parts(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
    """The body as it comes. EOFError where it ends before its end."""
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif b"content-length" in headers:
        yield await reader.readexactly(int(headers[b"content-length"]))
    else:
        while part := await reader.read(_READ_BYTES):
            yield part


class Words:
    """Texts of so many tokens in a model's vocabulary, other ones each time."""

    def __init__(self, model: Path, seed: int = 0) -> None:
        tokens = GgufFile.open(model).metadata["tokenizer.ggml.tokens"]
        # A space and small letters are one token of their own between others of the kind.
        self._words = [word[1:] for word in map(str, tokens) if re.fullmatch("[\u2581\u0120][a-z]+", word)]
        self._random = random.Random(seed)

    def text(self, n: int) -> str:
        """So many tokens, a beginning of text not counted."""
        return "".join(f" {self._random.choice(self._words)}" for _ in range(n)).lstrip()


async def until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Wait for something, looking again and again. SystemExit where it does not happen."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {limit_s:g} s")
        await asyncio.sleep(0.02)
