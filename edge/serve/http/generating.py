"""Endpoints that generate answers, streamed or whole, for all APIs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge import log
from edge.errors import EdgeError
from edge.serve.apis.adapters import request_scales
from edge.serve.apis.api import Api, Event, ParsedRequest, R
from edge.serve.caller import CALLER
from edge.serve.deltas import Begin, Delta, End, begin, merged
from edge.serve.http.bodies import Json, to_json, unless_gone
from edge.serve.http.errors import failure, is_anthropic
from edge.serve.http.security import namespace_of
from edge.serve.parsing import parsed as in_thread
from edge.serve.served import Answer, ServedModels
from edge.serve.warming.turns import Chat, noted
from edge.text.templates.template import CONTINUES

SEND_S = 60.0  # time after which a client that reads nothing counts as disconnected
NEVER_S = float(1 << 30)  # ping interval of a stream without pings
STATUS_S = 2.0  # later errors of a stream's request become its last event


@dataclass(frozen=True)
class _Accepted:
    """An accepted request."""

    model: str
    parsed: ParsedRequest
    answers: Sequence[Answer]
    chat: Chat | None  # None if the request is not a chat or has several answers

    def deltas(self, *, streams: bool) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield the deltas of all answers. streams: calls are passed on while they are generated."""
        deltas = merged(self.answers, self.parsed.parsers(streams=streams))
        if self.parsed.generations[0].max_tokens == 0:
            return _without_answers(deltas)
        return deltas if self.chat is None else noted(deltas, self.chat)


async def _without_answers(
    deltas: AsyncGenerator[tuple[int, Delta], None],
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield only the beginnings and ends of answers, for a request that only computes its prompt."""
    async with aclosing(deltas):
        async for index, delta in deltas:
            if isinstance(delta, Begin):
                yield index, delta
            elif isinstance(delta, End):
                yield index, End("length", None, 0)


async def answer(api: Api[R], models: ServedModels, http: Request, request: R, ping_s: float = NEVER_S) -> Response:
    """Answer a parsed request. Raises the errors of `_begun`."""
    beginning = asyncio.ensure_future(_begun(api, models, request, namespace_of(http.scope)))
    try:
        has_pings = bool(request.stream) and not api.lines
        await unless_gone(http, _known(beginning, STATUS_S if has_pings else None))
        if request.stream:  # the stream sends pings while a model is loaded
            return EventStream(api, _sent(api, request, beginning), beginning, ping_s if has_pings else NEVER_S)
        return Json(await unless_gone(http, _whole(api, request, beginning.result())))
    except BaseException:
        _end(beginning)
        raise


async def _whole(api: Api[R], request: R, begun: _Accepted) -> Event | Sequence[Event]:
    deltas = begun.deltas(streams=False)
    async with aclosing(deltas), aclosing(api.events(request, begun.model, deltas)) as events:
        return api.fold([event async for event in events])


async def _begun(api: Api[R], models: ServedModels, request: R, namespace: str) -> _Accepted:
    """Accept a request. Its errors are raised here, before any part of an answer is sent."""
    at = time.time()
    request.model = models.resolve(request.model)
    model = await models.model(request.model)
    about = await model.about()
    request.admitted(about)
    parsed = await in_thread(api.parse, request, str(about["chat_template"] or ""))
    scales = request_scales(request, models)
    if (priority := request.priority or 0) < 0 and not CALLER.get().is_administrator:
        request.ignore("priority")  # no key may push itself in front of others
        priority = 0
    generations = [
        replace(generation, namespace=namespace, adapters=scales, priority=priority)
        for generation in parsed.generations
    ]
    if generations[0].max_tokens == 0:  # an engine generates at least one token
        generations = [replace(generation, max_tokens=1) for generation in generations]
    talk = parsed.conversation
    continues = talk is not None and CONTINUES in talk.messages[-1]
    is_one = len(generations) == 1 and not (generations[0].media or continues)
    chat = Chat(model, talk, generations[0], at) if talk is not None and is_one else None
    return _Accepted(request.model, parsed, await begin(model, generations), chat)


async def _known(beginning: asyncio.Future[_Accepted], limit_s: float | None) -> None:
    """Wait until a request is accepted, at most `limit_s` seconds. Raises the errors of the request."""
    await asyncio.wait({beginning}, timeout=limit_s)
    if beginning.done():
        beginning.result()


def _end(beginning: asyncio.Future[_Accepted]) -> None:
    """Cancel the answers. Answers that begin later are cancelled as well."""
    beginning.cancel()
    beginning.add_done_callback(_cancel_answers)


def _cancel_answers(beginning: asyncio.Future[_Accepted]) -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        for answer in beginning.result().answers:
            answer.cancel()


async def _sent(api: Api[R], request: R, beginning: asyncio.Future[_Accepted]) -> AsyncGenerator[bytes, None]:
    """Yield events in wire format. A failure becomes the last event."""
    count = 0
    try:
        begun = await beginning
        deltas = begun.deltas(streams=not api.lines)
        async with aclosing(deltas), aclosing(api.events(request, begun.model, deltas)) as events:
            async for event in events:
                yield _event(api, event)
                count += 1
    except Exception as error:
        if isinstance(error, EdgeError):
            log.warning("answer failed", error=f"{type(error).__name__}: {error}")
        else:
            logging.getLogger("edge").exception("answer failed")
        yield _event(api, api.failed(failure(error), count))
        return
    if api.last is not None:
        yield f"data: {api.last}\r\n\r\n".encode()


def _event(api: Api[R], event: Event) -> bytes:
    """Return an event in wire format. JSON has no line breaks.

    Events are named by their type, as in Anthropic's API and OpenAI's responses API.
    """
    if api.lines:
        return f"{to_json(event)}\n".encode()
    kind = event.get("type")
    name = "" if kind is None else f"event: {kind}\r\n"
    return f"{name}data: {to_json(event)}\r\n\r\n".encode()


class EventStream(EventSourceResponse):
    """Server-sent events of an API with pings between them. The stream ends if its client reads nothing for SEND_S."""

    def __init__(
        self, api: Api[Any], events: AsyncIterator[bytes], beginning: asyncio.Future[_Accepted], ping_s: float
    ) -> None:
        """beginning: the request; its answers are cancelled when the stream ends."""
        ping = _ping if is_anthropic(api.path) else None
        kind = "application/x-ndjson" if api.lines else "text/event-stream"
        super().__init__(events, media_type=kind, ping=ping_s, send_timeout=SEND_S, ping_message_factory=ping)
        self._beginning = beginning

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.warning("reader gone", took_nothing_for_s=SEND_S)
        finally:
            _end(self._beginning)


def _ping() -> ServerSentEvent:
    return ServerSentEvent(data='{"type":"ping"}', event="ping")
