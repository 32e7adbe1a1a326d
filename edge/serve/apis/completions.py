"""/v1/completions of OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from edge.serve.apis.api import Api, Event, ParsedRequest
from edge.serve.apis.fields import (
    MAX_ANSWERS,
    MAX_LOGPROBS,
    Items,
    SamplingRequest,
    constrained,
    repeated,
)
from edge.serve.apis.openai_fields import (
    ResponseFormat,
    chunks,
    error_event,
    finite,
    folded,
    text_schema,
    token_text,
)
from edge.serve.apis.other_fields import COMPLETIONS_IGNORED, COMPLETIONS_REFUSED, Refused
from edge.serve.deltas import Delta, Deltas, End, Text
from edge.serve.http.errors import BadRequest
from edge.serve.served import Generation, Infill, Piece
from edge.serve.tools.functions import json_text

DEFAULT_TOKENS = 16  # OpenAI's default
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[Items[TokenId], Field(min_length=1)]


class CompletionRequest(SamplingRequest):
    prompt: str | Tokens | Items[str] | Items[Tokens] = Field(description="a text, its tokens, or several of either")
    suffix: str | None = Field(None, description="text after a gap that the answer fills")
    max_tokens: int | None = Field(
        None, description=f"default {DEFAULT_TOKENS}; 0: only compute the prompt; below 0: unlimited"
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _map_logprobs(cls, values: Any) -> Any:
        """Accept `true` in `logprobs`, as in the chat API."""
        is_flag = isinstance(values, dict) and values.get("logprobs") is True
        return {**values, "logprobs": values.get("top_logprobs") or 0} if is_flag else values

    refused: ClassVar[Refused] = {**SamplingRequest.refused, **COMPLETIONS_REFUSED}
    ignored = SamplingRequest.ignored | COMPLETIONS_IGNORED
    other_names: ClassVar[Mapping[str, str]] = {**SamplingRequest.other_names, "n_probs": "logprobs"}


def prompts_of(
    value: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]], param: str
) -> list[str | Sequence[int]]:
    """Return the prompts as a list. Raises BadRequest if the field has none."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise BadRequest(f"{param} has no text", param)
    if all(isinstance(item, int) for item in value):
        return [value]  # type: ignore[list-item]
    return list(value)  # type: ignore[arg-type]


def parse(request: CompletionRequest, _template: str) -> ParsedRequest:
    """Parse a request to n generations for each prompt. Raises BadRequest."""
    schema = text_schema(request.response_format, request.json_schema)
    constraints = {} if schema is None else {"json_schema": json_text(schema, "response_format")}
    sampling = constrained(request.sampling(), constraints)
    default = max(DEFAULT_TOKENS, request.min_tokens or 0)
    max_tokens = default if request.max_tokens is None else request.limit
    generation = Generation(max_tokens=max_tokens, sampling=sampling, logprobs=request.logprobs)
    return of_prompts(generation, request, request.n or 1)


def of_prompts(generation: Generation, request: CompletionRequest, n: int) -> ParsedRequest:
    """Return n generations for each prompt of a request. Raises BadRequest for too many."""
    prompts, suffix = prompts_of(request.prompt, "prompt"), request.suffix
    if len(prompts) * n > MAX_ANSWERS:
        raise BadRequest(f"{len(prompts)} prompts with {n} answers each: at most {MAX_ANSWERS} are allowed", "prompt")
    by_prompt = [
        replace(generation, infill=Infill(prompt, suffix)) if suffix else replace(generation, prompt=prompt)
        for prompt in prompts
    ]
    return ParsedRequest([copy for own in by_prompt for copy in repeated(own, n)])


def events(request: CompletionRequest, model: str, deltas: Deltas) -> AsyncGenerator[Event, None]:
    offsets = [0] * MAX_ANSWERS

    def part(index: int, delta: Delta) -> dict[str, Any] | None:
        if isinstance(delta, Text):
            logprobs = _logprobs(delta.pieces, offsets[index]) if delta.pieces else None
            offsets[index] += len(delta.text)
            return {"text": delta.text, "logprobs": logprobs}
        return {"text": ""} if isinstance(delta, End) else None

    return chunks(request, model, deltas, ("cmpl-", "text_completion"), part)


def _logprobs(pieces: Iterable[Piece], offset: int) -> dict[str, Any]:
    """Return tokens with their log-probabilities. `text_offset`: position of each token's text in the answer."""
    columns: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for piece in pieces:
        if piece.logprob is not None:
            columns["tokens"].append(token_text(piece.logprob))
            columns["token_logprobs"].append(finite(piece.logprob.logprob))
            columns["top_logprobs"].append({token_text(token): finite(token.logprob) for token in piece.alternatives})
            columns["text_offset"].append(offset)
    return columns


def fold(events_: Sequence[Event]) -> Event:
    return folded(events_, "text_completion")


COMPLETIONS = Api("/v1/completions", "Continue texts.", CompletionRequest, parse, events, fold, error_event, "[DONE]")
