"""Parts that OpenAI's APIs share: response formats, probabilities, usage, identifiers."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from edge.serve.apis.api import Event, by_index
from edge.serve.apis.fields import Fields, JsonObject, SamplingRequest
from edge.serve.deltas import Begin, Delta, Deltas, End
from edge.serve.http.errors import Failure, error_body
from edge.serve.served import Piece, TokenLogprob


class AnyText(Fields):
    type: Literal["text"]


class AnyJson(Fields):
    type: Literal["json_object"]


class JsonSchema(Fields):
    name: str = "answer"
    json_schema: JsonObject = Field({}, alias="schema")

    ignored = frozenset({"description", "strict"})  # an answer always follows the schema


class JsonOfSchema(Fields):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[AnyText | AnyJson | JsonOfSchema, Field(discriminator="type")]


def text_schema(response_format: AnyText | AnyJson | JsonOfSchema | JsonSchema | None) -> Mapping[str, Any] | None:
    """Return the JSON schema of an answer; None for any text."""
    if isinstance(response_format, JsonOfSchema):
        response_format = response_format.json_schema
    if isinstance(response_format, JsonSchema):
        return response_format.json_schema
    return {"type": "object"} if isinstance(response_format, AnyJson) else None


@dataclass
class Usage:
    """Tokens of a request's answers, summed as they come."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    thought_tokens: int = 0  # of the generated ones

    def add(self, delta: Delta, *, counts_prompt: bool = True) -> None:
        """Add a delta. counts_prompt: False for an answer whose prompt another answer has, too."""
        if isinstance(delta, Begin) and counts_prompt:
            self.prompt_tokens += delta.prompt_tokens
            self.cached_tokens += delta.cached_tokens
        elif isinstance(delta, End):
            self.generated_tokens += delta.generated_tokens
            self.thought_tokens += delta.thought_tokens

    def to_json(self) -> dict[str, Any]:
        """Return the usage in the form of chats and completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.generated_tokens,
            "total_tokens": self.prompt_tokens + self.generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.thought_tokens},
        }


async def chunks(
    request: SamplingRequest,
    model: str,
    deltas: Deltas,
    kind: tuple[str, str],
    part: Callable[[int, Delta], dict[str, Any] | None],
) -> AsyncGenerator[Event, None]:
    """Yield the chunks of chats or completions. The last has the usage, if it is requested or the answer is not
    streamed. kind: how their id begins, and their type. part: returns what a delta of an answer adds to its choice;
    None: nothing."""
    head = {"id": new_id(kind[0]), "object": kind[1], "created": now(), "model": model}
    has_usage = request.include_usage or not request.stream
    usage = Usage()
    async for index, delta in deltas:
        usage.add(delta, counts_prompt=index % (request.n or 1) == 0)
        if (own := part(index, delta)) is not None:
            ended = {"finish_reason": delta.reason, **delta.extra} if isinstance(delta, End) else {}
            choice = {"index": index, "logprobs": None, "finish_reason": None, **own, **ended}
            yield {**head, "choices": [choice], **({"usage": None} if has_usage else {})}
    if has_usage:
        yield {**head, "choices": [], "usage": usage.to_json()}


def folded(chunks: Sequence[Event], kind: str) -> dict[str, Any]:
    """Return the response of this type that chunks add up to."""
    choices = by_index(choice for chunk in chunks for choice in chunk["choices"])
    return {**chunks[-1], "object": kind, "choices": choices}


def token_logprobs(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """Return tokens with their probabilities and alternatives, in the form of chats and responses."""
    return [
        {**_token(piece.logprob), "top_logprobs": [_token(token) for token in piece.alternatives]}
        for piece in pieces
        if piece.logprob is not None
    ]


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": finite(token.logprob), "bytes": list(token.piece)}


def token_text(token: TokenLogprob) -> str:
    """Return the text of a token; a part of a character becomes U+FFFD."""
    return token.piece.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    """Return -9999, as OpenAI does, for an infinity, which JSON does not have: the token cannot come."""
    return max(logprob, -9999.0)


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def now() -> int:
    """Return seconds since 1970."""
    return int(time.time())


def error_event(failed: Failure, _count: int) -> dict[str, Any]:
    return error_body(failed, "/v1")
