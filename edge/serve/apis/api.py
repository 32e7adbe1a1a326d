"""What an API is that gives answers: a request to generations, their deltas to its events, its events to a response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from edge.serve.apis.fields import GeneratingRequest
from edge.serve.deltas import Deltas
from edge.serve.http.errors import Failure
from edge.serve.served import Generation
from edge.serve.tools.asking import Conversation
from edge.serve.tools.parser import CallParser

Event = Mapping[str, Any]
R = TypeVar("R", bound=GeneratingRequest)


@dataclass(frozen=True)
class ParsedRequest:
    """What a request asks of an engine: one generation for each answer."""

    generations: Sequence[Generation]
    conversation: Conversation | None = None  # in which functions may be called

    def parsers(self) -> list[CallParser | None]:
        """One for each answer."""
        return [self.conversation.parser() if self.conversation else None for _ in self.generations]


@dataclass(frozen=True)
class Api(Generic[R]):
    """One API. A response that is not streamed is the fold of the stream's events."""

    path: str
    summary: str
    request: type[R]
    asked: Callable[[R, str], ParsedRequest]  # with the source of the model's template; BadRequest
    events: Callable[[R, str, Deltas], AsyncGenerator[Event, None]]  # with the model's name
    whole: Callable[[Sequence[Event]], Event | Sequence[Event]]
    failed: Callable[[Failure, int], Event]  # the last event of a stream that fails after so many
    last: str | None = None  # what ends a stream beside its events
