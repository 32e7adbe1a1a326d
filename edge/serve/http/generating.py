"""Answers over HTTP, streamed or whole, in any of the APIs."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge import log
from edge.errors import EdgeError
from edge.serve.apis.api import Api, Asked, Event, R
from edge.serve.apis.tokens import template_of
from edge.serve.deltas import begin, merged
from edge.serve.http.bodies import Json, read, to_json, unless_gone
from edge.serve.http.errors import failure, is_anthropic
from edge.serve.served import Answer, ServedModel, ServedModels

SEND_S = 60.0  # a reader that takes nothing for so long has gone


def answers(api: Api[R], models: ServedModels, ping_s: float) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of an API."""

    async def endpoint(http: Request) -> Response:
        request = await read(http, api.request)
        model, asked, begun = await unless_gone(http, _begun(api, models, request))
        deltas = merged(begun, asked.parsers())
        events = api.events(request, model.name, deltas)
        if request.stream:
            return EventStream(_sent(api, events, deltas), begun, ping_s, anthropic=is_anthropic(api.path))
        return Json(api.whole(await unless_gone(http, _all(events, deltas))))

    return endpoint


async def _begun(api: Api[R], models: ServedModels, request: R) -> tuple[ServedModel, Asked, Sequence[Answer]]:
    """What can be wrong with a request is raised here, before anything is sent."""
    model = await models.model(request.model)
    template = ""
    if request.template_matters:
        template = await template_of(model)
    asked = api.asked(request, template)
    return model, asked, await begin(model, asked.generations)


async def _all(events: AsyncGenerator[Event, None], deltas: AsyncGenerator[Any, None]) -> list[Event]:
    async with aclosing(deltas), aclosing(events):
        return [event async for event in events]


async def _sent(
    api: Api[R], events: AsyncGenerator[Event, None], deltas: AsyncGenerator[Any, None]
) -> AsyncGenerator[ServerSentEvent, None]:
    """Events as they are sent. A failure is the last of them."""
    count = 0
    async with aclosing(deltas), aclosing(events):
        try:
            async for event in events:
                yield _event(event)
                count += 1
        except Exception as error:
            if isinstance(error, EdgeError):
                log.warning("answer failed", error=f"{type(error).__name__}: {error}")
            else:
                logging.getLogger("edge").exception("answer failed")
            yield _event(api.failed(failure(error), count))
            return
    if api.last is not None:
        yield ServerSentEvent(data=api.last)


def _event(event: Event) -> ServerSentEvent:
    """Events that have a type are named after it, as Anthropic and OpenAI's responses do."""
    return ServerSentEvent(data=to_json(event), event=event.get("type"))


class EventStream(EventSourceResponse):
    """Server-sent events, with signs of life between them. It ends where its reader takes nothing for SEND_S."""

    def __init__(
        self, events: AsyncIterator[ServerSentEvent], answers: Sequence[Answer], ping_s: float, *, anthropic: bool
    ) -> None:
        """answers: end with the stream, however it ends."""
        super().__init__(events, ping=ping_s, send_timeout=SEND_S, ping_message_factory=_ping if anthropic else None)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.warning("reader gone", took_nothing_for_s=SEND_S)
        finally:
            for answer in self._answers:
                answer.cancel()


def _ping() -> ServerSentEvent:
    return ServerSentEvent(data='{"type":"ping"}', event="ping")
