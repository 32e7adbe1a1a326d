"""State of the server and its models: health, llama.cpp's /props and /slots, and data for the status page."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from pydantic import Field

from edge.errors import EdgeError
from edge.serve.apis.fields import DEFAULTS, Fields
from edge.serve.http.errors import BadRequest
from edge.serve.served import ServedModel, ServedModels
from edge.units import as_bytes
from edge.version import version


class MemoryRequest(Fields):
    memory: int | str | None = Field(
        description="total of all models, in bytes or as 2GiB; 0: the minimum; null: the initial value"
    )


def health(models: ServedModels) -> dict[str, Any]:
    """Return the health of the server, with a `reason` if some model does not answer.

    Model names are left out, because this endpoint needs no key.
    """
    states = models.health()
    if models.drain.begun:  # proxies send requests elsewhere, and running answers end
        return {"status": "draining", "reason": "the server is ending", "models": states}
    reasons = [state["reason"] for state in states if "reason" in state]
    return (
        {"status": "error", "reason": reasons[0], "models": states} if reasons else {"status": "ok", "models": states}
    )


async def props(models: ServedModels, name: str | None = None) -> dict[str, Any]:
    """Return the properties of a model. name: None for the default model. Raises UnknownModel."""
    served = await models.model(name)
    model = await served.about()
    longest = min(model["context"], model["trained_context"] or model["context"])  # maximum tokens of one request
    settings = {"n_ctx": longest, "params": dict(DEFAULTS)}
    return {
        "default_generation_settings": settings,
        "total_slots": model["sequences"],
        "model_alias": served.name,
        "model_path": model["path"],
        "chat_template": model["chat_template"],
        "build_info": f"edge {version('edge-runtime')}",
    }


async def slots(models: ServedModels) -> list[dict[str, Any]]:
    return [
        {"model": status["model"]["name"], **slot}
        for status in await statuses(models)
        for slot in status.get("slots", ())
    ]


async def statuses(models: ServedModels) -> list[dict[str, Any]]:
    """Return the status of each loaded model, with its name in requests, or the error of its engine process."""
    return list(await asyncio.gather(*(_status(model, models) for model in await models.loaded())))


async def _status(model: ServedModel, models: ServedModels) -> dict[str, Any]:
    try:
        status = await model.status()
        share = models.memory.shares().get(model.name)
        memory = None if share is None else asdict(share)
        return {**status, "memory": memory, "model": {**status["model"], "name": model.name}}
    except EdgeError as error:
        return {"model": {"name": model.name}, "slots": [], "devices": [], "error": str(error)}


async def memory(models: ServedModels) -> dict[str, Any]:
    """Return the total memory for models, and the share of each loaded model."""
    shares = {name: asdict(share) for name, share in models.memory.shares().items()}
    return {"memory_bytes": models.memory.n_bytes, "target_bytes": models.memory.target, "models": shares}


async def ask_memory(request: MemoryRequest, models: ServedModels) -> dict[str, Any]:
    """Change the total memory for models. Raises BadRequest and NotAllowed."""
    try:
        n_bytes = as_bytes(request.memory)
    except ValueError as error:
        raise BadRequest(f"memory {error}", "memory") from None
    if n_bytes is not None and n_bytes < 0:
        raise BadRequest(f"memory is {n_bytes}; it must be bytes from 0 on, or a size such as 2GiB", "memory")
    await models.memory.ask(n_bytes)
    return await memory(models)
