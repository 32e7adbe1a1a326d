"""What the server and its models do now: /props and /slots as llama.cpp's server has them, and for the page."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from pydantic import Field

from edge.errors import EdgeError
from edge.serve.apis.fields import DEFAULTS, Fields, JsonObject
from edge.serve.http.errors import NotThere
from edge.serve.served import ServedModel, ServedModels
from edge.version import version

MAX_FRONT = 64 << 20  # bytes of the file


class PlanRequest(Fields):
    model: str | None = None
    plan: JsonObject = Field(description="as `edge pareto --json` and `edge plan --json` write it")


def health(models: ServedModels) -> dict[str, Any]:
    """Whether the models answer; `reason` where one does not. No names: it is told without a key."""
    told = models.health()
    reasons = [one["reason"] for one in told if "reason" in one]
    return {"status": "error", "reason": reasons[0], "models": told} if reasons else {"status": "ok", "models": told}


async def props(models: ServedModels) -> dict[str, Any]:
    """Of the default model."""
    served = await models.model(None)
    model = await served.about()
    longest = min(model["context"], model["trained_context"] or model["context"])  # tokens of one request
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
    """Of all models that are loaded."""
    told = await statuses(models)
    return [{"model": one["model"]["name"], **slot} for one in told for slot in one.get("slots", ())]


async def cluster(models: ServedModels) -> dict[str, Any]:
    """All that is known of the loaded models; of one whose engine has gone, why."""
    return {"names": list(models.names), "models": await statuses(models)}


async def statuses(models: ServedModels) -> list[dict[str, Any]]:
    """The status of each loaded model, under the name that requests give."""
    return list(await asyncio.gather(*(_status(model) for model in await models.loaded())))


async def _status(model: ServedModel) -> dict[str, Any]:
    try:
        status = await model.status()
        return {**status, "model": {**status["model"], "name": model.name}}
    except EdgeError as error:
        return {"model": {"name": model.name}, "slots": [], "devices": [], "error": str(error)}


async def front(path: Path | None) -> Any:
    """What `edge pareto --json` wrote; without a file, no points. NotThere where it cannot be read."""
    if path is None:
        return {"points": []}
    return await asyncio.to_thread(_read, path)


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FRONT + 1)
        if len(text) > MAX_FRONT:
            raise NotThere(f"{path.name} has more than {MAX_FRONT} bytes; it is no front")
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise NotThere(f"{path.name} cannot be read: {error}") from error


async def use_plan(request: PlanRequest, models: ServedModels) -> dict[str, Any]:
    """Run a model as a plan says. PlanError."""
    await models.use_plan(request.model, request.plan)
    return {"status": "ok"}
