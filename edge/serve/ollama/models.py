"""/api/tags, /api/show and /api/ps of Ollama's API: all models, one model, and the loaded models."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import math
from collections.abc import Iterator
from typing import Any

from edge.serve.model_files import ModelFacts
from edge.serve.served import ServedModels
from edge.text.thinking_format import thinking_format

NEVER = "9999-12-31T23:59:59Z"  # expiry time of a model that is never unloaded
_TEMPLATE = "tokenizer.chat_template"
_GAPS = ("tokenizer.ggml.fim_suf_token_id", "tokenizer.ggml.suffix_token_id")


async def tags(models: ServedModels) -> dict[str, Any]:
    """Return all models. Adapters are listed as models, too."""
    return {"models": [await _entry(models, own, name) for name in models.names for own in _names(models, name)]}


async def running(models: ServedModels) -> dict[str, Any]:
    """Return the loaded models, with the time when each is unloaded if it remains idle."""
    listed = []
    for model in await models.loaded():
        left_s = models.expires_s(model.name)
        at = datetime.datetime.now(datetime.timezone.utc)
        expires = NEVER if left_s == math.inf else _time(at + datetime.timedelta(seconds=min(left_s, 1e9)))
        context = (await models.running(model.name)).get("context")
        entry = await _entry(models, model.name, model.name)
        listed.append({**entry, "expires_at": expires, "size_vram": 0, "context_length": context})
    return {"models": listed}


async def show(models: ServedModels, name: str) -> dict[str, Any]:
    """Return the description of a model. Raises UnknownModel."""
    name = models.resolve(name)
    file = await asyncio.to_thread(models.file, name)
    template = str(file.metadata.get(_TEMPLATE, ""))
    # The JSON parsers of some programs do not accept infinity.
    plain = {key: value for key, value in file.metadata.items() if not isinstance(value, float) or math.isfinite(value)}
    return {
        "license": str(file.metadata.get("general.license", "")),
        "modelfile": f"FROM {name}\n",
        "parameters": "",
        "template": template,
        "details": _details(file),
        "model_info": {**plain, "general.parameter_count": file.parameters},
        "capabilities": list(_capabilities(file, template)),
        "modified_at": _modified(file),
    }


def _names(models: ServedModels, name: str) -> list[str]:
    return [name, *models.adapters(name).names]


async def _entry(models: ServedModels, name: str, model: str) -> dict[str, Any]:
    """Return the entry of a model. name: the model's name, or an adapter's. model: the model itself."""
    file = await asyncio.to_thread(models.file, model)
    tagged = name if ":" in name else f"{name}:latest"
    # Hashing a file of gigabytes would take long. This digest distinguishes versions of a file, but not their content.
    digest = hashlib.sha256(f"{name} {file.created} {file.size_bytes}".encode()).hexdigest()
    size = {"modified_at": _modified(file), "size": file.size_bytes, "digest": digest}
    return {"name": tagged, "model": tagged, **size, "details": _details(file)}


def _details(file: ModelFacts) -> dict[str, Any]:
    family = str(file.metadata.get("general.architecture", ""))
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": _count(file.parameters or 0),
        "quantization_level": file.quantization,
    }


def _count(n: int) -> str:
    """Return a number of parameters in short form, such as "7.6B"."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= size:
            return f"{n / size:.1f}{unit}"
    return str(n)


def _capabilities(file: ModelFacts, template: str) -> Iterator[str]:
    if not file.generates:
        yield "embedding"
        return
    yield "completion"
    if "tools" in template:
        yield "tools"
    if any(key in file.metadata for key in _GAPS):
        yield "insert"
    if thinking_format(template) is not None:
        yield "thinking"
    yield from file.encoders


def _modified(file: ModelFacts) -> str:
    return _time(datetime.datetime.fromtimestamp(file.created, datetime.timezone.utc))


def _time(at: datetime.datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
