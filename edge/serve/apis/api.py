"""Interface of an API that generates answers: request to generations, deltas to events, events to a response."""

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
    """A request parsed to generations, one for each answer."""

    generations: Sequence[Generation]
    conversation: Conversation | None = None  # conversation and the functions that may be called

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
        """Return a request for n answers to a conversation. Raises BadRequest if it has more than one constraint."""
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
        """Return a parser for each answer. streams: calls are passed on while they are generated."""
        return [self.conversation.parser(streams) if self.conversation else None for _ in self.generations]


@dataclass(frozen=True)
class Api(Generic[R]):
    """One API. A response without streaming is the fold of the stream's events."""

    path: str
    summary: str
    request: type[R]
    parse: Callable[[R, str], ParsedRequest]  # (request, source of the chat template); raises BadRequest
    events: Callable[[R, str, Deltas], AsyncGenerator[Event, None]]  # (request, model name, deltas)
    fold: Callable[[Sequence[Event]], Event | Sequence[Event]]
    # (error, number of events so far); returns the last event of a failed stream.
    failed: Callable[[Failure, int], Event]
    last: str | None = None  # text after the last event of a stream
    lines: bool = False  # the stream is lines of JSON instead of server-sent events, and calls are sent complete


def accumulated(total: Any, more: Any) -> Any:
    """Return a value extended by the next event's value. Texts and lists are concatenated, objects by member."""
    if total is None or more is None:
        return total if more is None else more
    if isinstance(more, dict):
        return {**total, **{key: accumulated(total.get(key), value) for key, value in more.items()}}
    if isinstance(more, list):
        total += more  # in place, because a long answer has many items
        return total
    return total + more if isinstance(more, str) else more


def by_index(parts: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the parts accumulated by `index`, in the order of the indexes."""
    totals: dict[int, dict[str, Any]] = {}
    for part in parts:
        totals[part["index"]] = accumulated(totals.get(part["index"]), part)
    return [totals[index] for index in sorted(totals)]
