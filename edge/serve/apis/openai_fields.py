"""Parts that the APIs of OpenAI share: schemas of answers, probabilities, usage, identifiers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from edge.serve.apis.fields import Fields, JsonObject
from edge.serve.deltas import Begin, Delta, End
from edge.serve.http.errors import Failure, error_body
from edge.serve.served import Piece, TokenLogprob


class AnyText(Fields):
    type: Literal["text"]


class AnyJson(Fields):
    type: Literal["json_object"]


class JsonSchema(Fields):
    name: str = "answer"
    json_schema: JsonObject = Field({}, alias="schema")

    ignored = frozenset({"description", "strict"})  # an answer is always held to it


class JsonOfSchema(Fields):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[AnyText | AnyJson | JsonOfSchema, Field(discriminator="type")]


def text_schema(wanted: AnyText | AnyJson | JsonOfSchema | None) -> Mapping[str, Any] | None:
    """The JSON schema of an answer; None where it is any text."""
    if isinstance(wanted, JsonOfSchema):
        return wanted.json_schema.json_schema
    return {"type": "object"} if isinstance(wanted, AnyJson) else None


@dataclass
class Usage:
    """Tokens of a request's answers, summed while they come."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def add(self, delta: Delta, *, counts_prompt: bool = True) -> None:
        """counts_prompt: this answer's prompt is not one that another has, too."""
        if isinstance(delta, Begin) and counts_prompt:
            self.prompt_tokens += delta.prompt_tokens
            self.cached_tokens += delta.cached_tokens
        elif isinstance(delta, End):
            self.generated_tokens += delta.generated_tokens

    def to_json(self) -> dict[str, Any]:
        """As chats and completions tell it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.generated_tokens,
            "total_tokens": self.prompt_tokens + self.generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def token_logprobs(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """Tokens with their probabilities and alternatives, as chats and responses tell them."""
    return [
        {**_token(piece.logprob), "top_logprobs": [_token(one) for one in piece.alternatives]}
        for piece in pieces
        if piece.logprob is not None
    ]


def _token(one: TokenLogprob) -> dict[str, Any]:
    return {"token": token_text(one), "logprob": finite(one.logprob), "bytes": list(one.piece)}


def token_text(one: TokenLogprob) -> str:
    """The text of a token; a part of a character is shown as U+FFFD."""
    return one.piece.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    """JSON has no infinity: a token that cannot come has -9999, as with OpenAI."""
    return max(logprob, -9999.0)


def new_id(prefix: str) -> str:
    """An identifier that no other answer has."""
    return prefix + secrets.token_hex(12)


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def error_event(failed: Failure, _count: int) -> dict[str, Any]:
    """The last event of a stream that fails."""
    return error_body(failed, anthropic=False)
