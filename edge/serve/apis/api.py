"""Interface of an API that generates answers: a request to generations, their deltas to events, events to a
response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from edge.serve.apis.fields import GeneratingRequest, constrained, repeated
from edge.serve.deltas import Deltas
from edge.serve.http.errors import Failure
from edge.serve.media import NOTHING_ATTACHED, Attached
from edge.serve.served import Generation
from edge.serve.tools.conversation import Conversation
from edge.serve.tools.parser import CallParser

Event = Mapping[str, Any]
R = TypeVar("R", bound=GeneratingRequest)


@dataclass(frozen=True)
class ParsedRequest:
    """Generations of a request, one for each answer."""

    generations: Sequence[Generation]
    conversation: Conversation | None = None  # with the functions that may be called

    @classmethod
    def of_conversation(
        cls,
        conversation: Conversation,
        sampling: Mapping[str, Any],
        max_tokens: int | None,
        logprobs: int | None = None,
        n: int = 1,
        media: Attached = NOTHING_ATTACHED,
    ) -> ParsedRequest:
        """Return a request for n answers to a conversation. BadRequest if they have more than one constraint."""
        generation = Generation(
            messages=conversation.messages,
            tools=conversation.tools,
            variables=conversation.variables,
            marks=conversation.marks,
            ends_thought=conversation.ends_thought,
            answer=conversation.answer,
            think=conversation.think,
            max_tokens=max_tokens,
            sampling=constrained(sampling, conversation.sampling),
            logprobs=logprobs,
            media=media.files,
            stand_ins=media.stand_ins,
        )
        return cls(repeated(generation, n), conversation)

    def parsers(self, *, streams: bool) -> list[CallParser | None]:
        """Return a parser for each answer. streams: calls are given as they come."""
        return [self.conversation.parser(streams) if self.conversation else None for _ in self.generations]


@dataclass(frozen=True)
class Api(Generic[R]):
    """One API. A response that is not streamed is the fold of the stream's events."""

    path: str
    summary: str
    request: type[R]
    parse: Callable[[R, str], ParsedRequest]  # (request, source of the model's template); BadRequest
    events: Callable[[R, str, Deltas], AsyncGenerator[Event, None]]  # (request, model's name, deltas)
    fold: Callable[[Sequence[Event]], Event | Sequence[Event]]
    failed: Callable[[Failure, int], Event]  # last event of a stream that fails after so many events
    last: str | None = None  # text that ends a stream after its events
    lines: bool = False  # a stream is lines of JSON in place of server-sent events; calls of functions come whole


def accumulated(total: Any, more: Any) -> Any:
    """Return what a value of events is with one more of them: texts and lists go on, objects member by member."""
    if total is None or more is None:
        return total if more is None else more
    if isinstance(more, dict):
        return {**total, **{key: accumulated(total.get(key), value) for key, value in more.items()}}
    if isinstance(more, list):
        total += more  # in place: a long answer has many
        return total
    return total + more if isinstance(more, str) else more


def by_index(parts: Iterable[Event]) -> list[dict[str, Any]]:
    """Return what the parts of each `index` add up to, in the order of these."""
    totals: dict[int, dict[str, Any]] = {}
    for part in parts:
        totals[part["index"]] = accumulated(totals.get(part["index"]), part)
    return [totals[index] for index in sorted(totals)]
