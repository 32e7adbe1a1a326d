"""/v1/models, with the keys of OpenAI's, Anthropic's and llama.cpp's servers; and models that come and go."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

from edge.errors import Overloaded
from edge.serve.apis.fields import Fields
from edge.serve.caller import check_administrator
from edge.serve.http.errors import NotThere
from edge.serve.served import ServedModels

_MODALITIES = {"vision": "image", "audio": "audio"}  # by the encoder of a projector


class ModelRequest(Fields):
    model: str


def model_of(name: str | None, models: ServedModels) -> str:
    """Return the model that a name stands for. name: a model, or one of its adapters. Raises UnknownModel."""
    served = models.resolve(name)
    return next(model for model in models.names if served in (model, *models.adapters(model).names))


async def load(request: ModelRequest, models: ServedModels) -> dict[str, Any]:
    """Load a model, unless it is loaded. Raises the errors of loading."""
    model = await models.model(request.model)
    return {"success": True, "model": model.name}


async def unload(request: ModelRequest, models: ServedModels) -> dict[str, Any]:
    """Unload a model, unless it is not loaded. Raises Overloaded if it must stay."""
    name = model_of(request.model, models)
    if not await models.unload(name) and models.state(name) in ("loaded", "loading"):
        raise Overloaded(
            f"{name} stays loaded, because it answers a request, loads on a device, is pinned, or is kept for another"
            " key; try again when that has ended"
        )
    return {"success": True, "model": name}


async def fetches(models: ServedModels) -> dict[str, Any]:
    """Return the running fetches, and whether the server's options allow them."""
    running = models.fetches.running
    data = [{"model": name, "completed": done, "total": total} for name, (done, total) in running.items()]
    return {"object": "list", "allowed": models.fetches.allowed, "data": data}


async def cancel_fetch(name: str, models: ServedModels) -> dict[str, Any]:
    """End a fetch. Raises NotThere, and NotAllowed if the caller is no administrator."""
    check_administrator("cancel the download of a model")
    if not models.fetches.cancel(name):
        raise NotThere(f"no model {name[:100]!r} is being downloaded")
    return {"model": name, "cancelled": True}


async def model_list(models: ServedModels) -> dict[str, Any]:
    data = [entry for name in models.names for entry in await _entries(models, name)]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, "has_more": False, **ends}


async def model_json(models: ServedModels, name: str) -> dict[str, Any]:
    """Return the description of a model or adapter. Raises UnknownModel."""
    served, model = models.resolve(name), model_of(name, models)
    return next(entry for entry in await _entries(models, model) if entry["id"] == served)


async def _entries(models: ServedModels, name: str) -> list[dict[str, Any]]:
    """Return a model and its adapters. Adapters have vLLM's additional keys `parent` and `root`."""
    model, adapters = await _model(models, name), models.adapters(name)
    rows = zip(adapters.names, adapters.to_json(), strict=True)
    return [
        model,
        *({**model, "id": own, "display_name": own, "parent": name, "root": row["path"]} for own, row in rows),
    ]


async def _model(models: ServedModels, name: str) -> dict[str, Any]:
    """Return a model with the keys that clients expect.

    `context_length` is the maximum tokens of a prompt with its answer: the trained context, or less if the model is
    loaded with a smaller context.
    """
    file = await asyncio.to_thread(models.file, name)
    running = await models.running(name)
    trained, context = file.trained_context, running.get("context")
    longest = min(context, trained or context) if context else trained
    created = datetime.datetime.fromtimestamp(file.created, datetime.timezone.utc)
    return {
        "id": name,
        "object": "model",
        "created": file.created,
        "owned_by": "edge",
        "context_length": longest,
        "max_model_len": longest,  # name of the key in vLLM
        "input_modalities": ["text", *(_MODALITIES[encoder] for encoder in file.encoders)],  # as OpenRouter names it
        "type": "model",
        "display_name": name,
        "status": {"value": models.state(name)},
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "meta": {
            "n_ctx": longest,
            "n_ctx_train": trained,
            "n_embd": file.embedding,
            "n_params": file.parameters,
            "n_vocab": file.vocabulary,
            "size": file.size_bytes,
            "quantization": file.quantization,
        },
    }
