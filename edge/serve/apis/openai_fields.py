"""Parts that OpenAI's APIs share: response formats, log-probabilities, usage, identifiers."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from edge.serve.apis.api import Event, by_index
from edge.serve.apis.fields import Fields, JsonObject, Kind, SamplingRequest
from edge.serve.deltas import Begin, Delta, Deltas, End, Text
from edge.serve.http.errors import BadRequest, Failure, error_body
from edge.serve.served import Piece, TokenLogprob


class ResponseFormat(Fields):
    """Format of an answer: text or JSON.

    The schema is in `json_schema.schema` as in OpenAI's API, or in `schema` or `json_schema` as on other servers.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonObject | None = None
    own_schema: JsonObject | None = Field(None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = Field(None, description="without effect: an answer always follows the schema")

    other_names: ClassVar[Mapping[str, str]] = {"value": "schema"}  # name in TGI
    empty_values: ClassVar[Mapping[str, Kind]] = {"json_schema": dict, "schema": dict}  # {} allows any JSON

    @model_validator(mode="before")
    @classmethod
    def _normalize_type(cls, values: Any) -> Any:
        """Accept a bare type, and `json` as a type, as other servers do."""
        form = {"type": values} if isinstance(values, str) else values
        return {**form, "type": "json_object"} if isinstance(form, dict) and form.get("type") == "json" else form

    @model_validator(mode="after")
    def _is_clear(self) -> Self:
        """Raise an error if the schema is missing or ambiguous."""
        schemas, wrapped = self._schemas, self.json_schema or {}
        wrong = ""
        if not isinstance(wrapped.get("schema"), dict | None):
            wrong = "a schema must be an object"
        elif self.type == "json_schema" and not schemas:
            wrong = "json_schema needs a schema"
        elif any(schema != schemas[0] for schema in schemas):
            wrong = "there are two different schemas; leave one out"
        elif self.type == "text" and any(schemas):
            wrong = "there is a schema, but the type is text; use the type json_schema"
        if wrong:
            raise PydanticCustomError("format", "{wrong}", {"wrong": wrong})
        return self

    @property
    def _schemas(self) -> list[Any]:
        schemas: list[Any] = [] if self.own_schema is None else [self.own_schema]
        if self.json_schema is not None:
            inner = {key: value for key, value in self.json_schema.items() if key not in _BESIDE_SCHEMA}
            schema = inner.pop("schema", None)
            schemas.append(inner if schema is None else schema)
        return schemas

    @property
    def schema_of_text(self) -> Mapping[str, Any] | None:
        """JSON schema of the answer, or None for any text."""
        if self.type == "json_object":
            return next(filter(None, self._schemas), {"type": "object"})
        return None if self.type == "text" else dict(self._schemas[0])


# Keys outside the schema, or keys of a schema that constrain nothing.
_BESIDE_SCHEMA = ("name", "description", "strict")


def text_schema(
    response_format: ResponseFormat | None, json_schema: Mapping[str, Any] | None = None
) -> Mapping[str, Any] | None:
    """Return the JSON schema of an answer, or None for any text.

    json_schema: schema in a separate field. Raises BadRequest if there are two different schemas.
    """
    schema = None if response_format is None else response_format.schema_of_text
    if None not in (schema, json_schema) and schema != json_schema:
        raise BadRequest("json_schema and response_format differ; leave one out", "json_schema")
    return json_schema if schema is None else schema


@dataclass
class Usage:
    """Tokens of a request's answers, summed while they are generated."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    thought_tokens: int = 0  # thought tokens among the generated tokens

    def add(self, delta: Delta, *, counts_prompt: bool = True) -> None:
        """Add a delta. counts_prompt: False if the prompt was already counted for another answer."""
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
    """Yield the chunks of chats or completions.

    The last chunk has the usage, if it was requested or the response is not streamed.

    kind: prefix of the chunks' id, and their object type.
    part: returns the fields that a delta adds to its choice, or None for no chunk.
    """
    head = {"id": new_id(kind[0]), "object": kind[1], "created": now(), "model": model}
    has_usage = request.include_usage or not request.stream
    usage = Usage()
    async for index, delta in deltas:
        usage.add(delta, counts_prompt=index % (request.n or 1) == 0)
        if request.include_stop_str_in_output and isinstance(delta, End) and delta.stop_string:
            own = part(index, Text(delta.stop_string)) or {}
            choice = {"index": index, "logprobs": None, "finish_reason": None, **own}
            yield {**head, "choices": [choice], **({"usage": None} if has_usage else {})}
        if (added := part(index, delta)) is not None:
            ended = {"finish_reason": delta.reason, **delta.extra} if isinstance(delta, End) else {}
            choice = {"index": index, "logprobs": None, "finish_reason": None, **ended, **added}
            yield {**head, "choices": [choice], **({"usage": None} if has_usage else {})}
    if has_usage:
        yield {**head, "choices": [], "usage": usage.to_json()}


def folded(chunks: Sequence[Event], kind: str) -> dict[str, Any]:
    """Return the response of this object type that the chunks add up to."""
    choices = by_index(choice for chunk in chunks for choice in chunk["choices"])
    return {**chunks[-1], "object": kind, "choices": choices}


def token_logprobs(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """Return tokens with log-probabilities and alternatives, in the form of chats and responses."""
    return [
        {**_token(piece.logprob), "top_logprobs": [_token(token) for token in piece.alternatives]}
        for piece in pieces
        if piece.logprob is not None
    ]


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": finite(token.logprob), "bytes": list(token.piece)}


def token_text(token: TokenLogprob) -> str:
    """Return the text of a token. An incomplete character becomes U+FFFD."""
    return token.piece.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    """Return the log-probability. As in OpenAI's API, -9999 replaces -inf, which JSON cannot represent."""
    return max(logprob, -9999.0)


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def now() -> int:
    """Return the current Unix time in seconds."""
    return int(time.time())


def error_event(failed: Failure, _count: int) -> dict[str, Any]:
    return error_body(failed, "/v1")
