"""Endpoints of Ollama's API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import StreamingResponse

from edge.errors import EdgeError, NotAllowed
from edge.serve.apis.adapters import check_no_adapter
from edge.serve.apis.api import Api
from edge.serve.apis.embeddings import EmbeddingsRequest, embeddings
from edge.serve.http.bodies import to_json, unless_gone
from edge.serve.http.errors import error_body, failure
from edge.serve.http.generating import answer
from edge.serve.http.openapi import Endpoint
from edge.serve.ollama import models as listing
from edge.serve.ollama.answers import CHAT, TEXT, timestamp
from edge.serve.ollama.fields import (
    AnswerRequest,
    EmbedRequest,
    NamedRequest,
    OldEmbedRequest,
    OllamaChatRequest,
    OllamaTextRequest,
    StayingModel,
)
from edge.serve.served import ServedModels

VERSION = "0.12.0"  # version of Ollama that is reported, because clients require a minimum version
_PROGRESS_S = 0.5  # interval of progress lines during a fetch
_FILES = "models are files: `edge serve MODEL...` selects the served models"
_REFUSED: dict[tuple[Literal["POST", "DELETE"], str], str] = {
    ("POST", "/api/create"): f"{_FILES}, and presets in --config hold their settings",
    ("POST", "/api/copy"): f"{_FILES}, and presets in --config define other names",
    ("POST", "/api/push"): "this server publishes no models",
    ("DELETE", "/api/delete"): f"{_FILES}; `edge model rm` deletes those that were fetched",
    ("POST", "/api/blobs/{name:path}"): _FILES,
}


def ollama_endpoints(models: ServedModels) -> list[Endpoint]:
    """Return the endpoints of Ollama's API."""

    def generating(api: Api[Any]) -> Endpoint:
        async def handle(http: Request, request: AnswerRequest) -> Any:
            request.model = models.resolve(request.model)
            models.keep(request.model, request.keep_s)
            if _is_empty(request):
                return await unless_gone(http, _load(request, models))
            return await answer(api, models, http, request)

        return Endpoint("POST", api.path, api.summary, handle, api.request)

    async def embed(http: Request, request: EmbedRequest) -> dict[str, Any]:
        return await unless_gone(http, _embed(request, models, request.input, request.dimensions))

    async def old_embed(http: Request, request: OldEmbedRequest) -> dict[str, Any]:
        vectors = (await unless_gone(http, _embed(request, models, request.prompt)))["embeddings"]
        return {"embedding": next(iter(vectors), [])}

    async def show(_http: Request, request: NamedRequest) -> dict[str, Any]:
        return await listing.show(models, request.named)

    async def pull(http: Request, request: NamedRequest) -> Any:
        if request.stream:
            return StreamingResponse(_fetched(request.named, models), media_type="application/x-ndjson")
        await unless_gone(http, models.fetch(request.named, lambda done, total: None))
        return {"status": "success"}

    async def version(_http: Request) -> dict[str, str]:
        return {"version": VERSION}

    def refused(method: Literal["POST", "DELETE"], path: str, why: str) -> Endpoint:
        async def handle(_http: Request) -> Any:
            raise NotAllowed(why)

        return Endpoint(method, path, "Refused.", handle)

    own = [
        Endpoint("POST", "/api/embed", "Embed texts", embed, EmbedRequest),
        Endpoint("POST", "/api/embeddings", "Embed a text", old_embed, OldEmbedRequest),
        Endpoint("POST", "/api/show", "Describe a model", show, NamedRequest),
        Endpoint("POST", "/api/pull", "Fetch a model if that is allowed", pull, NamedRequest),
        Endpoint("GET", "/api/tags", "List the models", lambda _http: listing.tags(models)),
        Endpoint("GET", "/api/ps", "List the loaded models", lambda _http: listing.running(models)),
        Endpoint("GET", "/api/version", "Get the version of the API", version),
    ]
    return [
        generating(CHAT),
        generating(TEXT),
        *(replace(endpoint, summary=f"{endpoint.summary} (Ollama's API).") for endpoint in own),
        *(refused(method, path, why) for (method, path), why in _REFUSED.items()),
    ]


def _is_empty(request: AnswerRequest) -> bool:
    """Return True if a request has no prompt, and only loads or unloads the model."""
    if isinstance(request, OllamaChatRequest):
        return not request.messages
    return isinstance(request, OllamaTextRequest) and not (request.prompt or request.suffix)


async def _load(request: AnswerRequest, models: ServedModels) -> dict[str, Any]:
    """Load a model, or unload it if its keep-alive time is 0."""
    unloads = request.keep_s == 0
    if unloads:
        await models.unload(request.model)
    else:
        await models.model(request.model)
    is_chat = isinstance(request, OllamaChatRequest)
    return {
        "model": request.model,
        "created_at": timestamp(),
        **({"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}),
        "done": True,
        "done_reason": "unload" if unloads else "load",
    }


async def _embed(
    request: StayingModel, models: ServedModels, texts: str | list[str], dimensions: int | None = None
) -> dict[str, Any]:
    """Return the embedding of each text. Raises the errors of `embeddings`."""
    began = time.monotonic_ns()
    request.model = models.resolve(request.model)
    check_no_adapter(request.model, models)
    models.keep(request.model, request.keep_s)
    model = await models.model(request.model)
    loaded = time.monotonic_ns()
    vectors: list[Any] = []
    tokens = 0
    if texts:
        fields = {"input": texts, "dimensions": dimensions}
        result = await embeddings(EmbeddingsRequest.model_validate(fields), model)
        vectors, tokens = [item["embedding"] for item in result["data"]], result["usage"]["prompt_tokens"]
    return {
        "model": model.name,
        "embeddings": vectors,
        "total_duration": time.monotonic_ns() - began,
        "load_duration": loaded - began,
        "prompt_eval_count": tokens,
    }


async def _fetched(name: str, models: ServedModels) -> AsyncGenerator[str, None]:
    """Yield lines about the progress of a fetch."""
    status = {"status": f"pulling {name}"}
    yield _line({"status": "pulling manifest"})
    fetching = asyncio.ensure_future(models.fetch(name, lambda done, total: None))
    try:
        while not (await asyncio.wait({fetching}, timeout=_PROGRESS_S))[0]:
            completed, total = models.fetches.running.get(name, (0, 0))
            yield _line({**status, "digest": name, "total": total, "completed": completed})
        await fetching
        yield _line({"status": "success"})
    except (EdgeError, OSError) as error:
        yield _line(error_body(failure(error), "/api/pull"))
    finally:
        fetching.cancel()


def _line(value: Any) -> str:
    return f"{to_json(value)}\n"
