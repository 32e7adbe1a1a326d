"""/completion and /embedding in the form of llama.cpp's server, for its clients."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr

from edge.serve.apis.api import Api, Event, ParsedRequest, by_index
from edge.serve.apis.completions import CompletionRequest, Tokens, of_prompts
from edge.serve.apis.embeddings import EmbeddingsRequest, embeddings
from edge.serve.apis.fields import (
    MAX_ANSWERS,
    MAX_LOGPROBS,
    Fields,
    Items,
    constrained,
    limit,
)
from edge.serve.apis.openai_fields import error_event, finite, text_schema, token_text
from edge.serve.apis.other_fields import Refused
from edge.serve.deltas import Begin, Deltas, End, Text
from edge.serve.http.errors import BadRequest
from edge.serve.served import Generation, Piece, ServedModel, TokenLogprob
from edge.serve.tools.functions import json_text

# Default sampling parameters of llama.cpp's server.
DEFAULTS = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05}
_STOPS = {"stop": "eos", "length": "limit"}
_ANY_SEED = 2**32 - 1  # random seed, as is -1
_clock = time.monotonic


class NativeRequest(CompletionRequest):
    max_tokens: int | None = Field(None, description="as n_predict")
    n_predict: int | None = Field(
        None, description="below 0 (default): until the context is full; 0: only compute the prompt"
    )
    n_probs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="number of likeliest tokens to return")
    n_cmpl: int | None = Field(None, ge=0, le=MAX_ANSWERS, description="as n")
    return_tokens: bool | None = Field(None, description="return the token ids of the answer")

    other_names: ClassVar[Mapping[str, str]] = {
        old: new for old, new in CompletionRequest.other_names.items() if old not in ("n_predict", "n_cmpl", "n_probs")
    }
    _arrived: float = PrivateAttr(default_factory=lambda: _clock())

    @property
    def limit(self) -> int | None:
        """Maximum tokens of an answer, or None for as many as fit."""
        return limit(self.n_predict if self.n_predict is not None else self.max_tokens)

    @property
    def wants_tokens(self) -> bool:
        """True if the response includes token ids."""
        return bool(self.return_tokens) or bool(self.n_probs)


class NativeEmbeddingsRequest(Fields):
    model: str | None = None
    content: str | Tokens | Items[str] | Items[Tokens] | None = Field(None, description="a text, or several")
    input: str | Tokens | Items[str] | Items[Tokens] | None = Field(None, description="as content")

    refused: ClassVar[Refused] = {**EmbeddingsRequest.refused, "encoding_format": ("float",)}


# Fields that each answer repeats. Long fields are left out.
_SETTINGS = set(NativeRequest.model_fields) - {
    "prompt", "suffix", "grammar", "regex", "lark", "json_schema", "response_format", "logit_bias", "stop",
    "dry_sequence_breakers",
}  # fmt: skip


def parse(request: NativeRequest, _template: str) -> ParsedRequest:
    """Parse a request to n generations for each prompt. Raises BadRequest."""
    return of_prompts(generation_of(request), request, request.n_cmpl or request.n or 1)


def generation_of(request: NativeRequest) -> Generation:
    """Return the generation of a request without its prompt. Raises BadRequest."""
    schema = text_schema(request.response_format, request.json_schema)
    constraints = {} if schema is None else {"json_schema": json_text(schema, "json_schema")}
    logprobs = request.n_probs if request.n_probs else request.logprobs
    return Generation(
        max_tokens=request.limit,
        sampling=constrained(_sampling(request), constraints),
        logprobs=logprobs if logprobs is not None or not request.wants_tokens else 0,
    )


def _sampling(request: NativeRequest) -> dict[str, Any]:
    sampling = request.sampling()
    fields_of_request = {name: value for name in DEFAULTS if (value := getattr(request, name)) is not None}
    if request.seed == _ANY_SEED:
        del sampling["seed"]
    return {
        **DEFAULTS,
        **{name: value for name, value in sampling.items() if name in fields_of_request or name not in DEFAULTS},
    }


async def events(request: NativeRequest, model: str, deltas: Deltas) -> AsyncGenerator[Event, None]:
    """Yield texts while they are generated. The last event of each answer has the fields of the whole response."""
    begun: dict[int, tuple[Begin, float]] = {}
    async for index, delta in deltas:
        if isinstance(delta, Begin):
            begun[index] = delta, _clock()
        elif isinstance(delta, Text):
            yield {**_content(request, index, delta.text, delta.pieces), "stop": False}
        elif isinstance(delta, End):
            begin, at = begun[index]
            yield {
                **_content(request, index, "", ()),
                "stop": True,
                "id_slot": -1,
                "model": model,
                "tokens_predicted": delta.generated_tokens,
                "tokens_evaluated": begin.prompt_tokens,
                "tokens_cached": begin.cached_tokens,
                "truncated": False,
                "stop_type": "word" if delta.stop_string is not None else _STOPS.get(delta.reason, "eos"),
                "stopping_word": delta.stop_string or "",
                **delta.extra,
                "generation_settings": request.model_dump(mode="json", include=_SETTINGS, exclude_none=True),
                "timings": _timings(
                    begin, delta.generated_tokens, (at - request._arrived) * 1e3, (_clock() - at) * 1e3
                ),
            }


def _content(request: NativeRequest, index: int, text: str, pieces: Sequence[Piece]) -> dict[str, Any]:
    token_ids = (
        [piece.logprob.token_id for piece in pieces if piece.logprob is not None] if request.wants_tokens else []
    )
    content: dict[str, Any] = {"index": index, "content": text, "tokens": token_ids}
    if request.n_probs:
        content["completion_probabilities"] = [
            {**_token(piece.logprob), "top_logprobs": [_token(token) for token in piece.alternatives]}
            for piece in pieces
            if piece.logprob is not None
        ]
    return content


def _token(token: TokenLogprob) -> dict[str, Any]:
    values = {"id": token.token_id, "token": token_text(token), "bytes": list(token.piece)}
    return {**values, "logprob": finite(token.logprob)}


def _timings(begin: Begin, predicted: int, prompt_ms: float, predicted_ms: float) -> dict[str, float]:
    """Return timings in milliseconds.

    prompt_ms: from the request to its first token, including the wait in the queue.
    predicted_ms: from the first token to the end.
    """
    computed = begin.prompt_tokens - begin.cached_tokens
    return {
        "cache_n": begin.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(computed, 1),
        "prompt_per_second": computed / max(prompt_ms, 1e-3) * 1e3,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(predicted, 1),
        "predicted_per_second": predicted / max(predicted_ms, 1e-3) * 1e3,
    }


def fold(events_: Sequence[Event]) -> Event | Sequence[Event]:
    """Return the response that the events add up to, or a list for several answers."""
    answers = by_index(events_)
    return answers[0] if len(answers) == 1 else answers


async def native_embeddings(request: NativeEmbeddingsRequest, model: ServedModel) -> list[Mapping[str, Any]]:
    texts = request.content if request.content is not None else request.input
    if texts is None:
        raise BadRequest("content is missing: a text, its tokens, or several of either", "content")
    response = await embeddings(EmbeddingsRequest.model_validate({"input": texts}), model)
    return [{"index": item["index"], "embedding": [item["embedding"]]} for item in response["data"]]


NATIVE = Api(
    "/completion", "Continue texts, as llama.cpp's server has it.", NativeRequest, parse, events, fold, error_event
)
