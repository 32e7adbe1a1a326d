"""/lora-adapters in the form of llama.cpp's server, and the adapters selected by a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import RootModel

from edge.serve.adapters import ServedAdapters
from edge.serve.apis.fields import AdapterScale, GeneratingRequest, Items
from edge.serve.http.errors import BadRequest
from edge.serve.served import ServedModels


class AdapterScales(RootModel[Items[AdapterScale]]):
    """Scales of adapters. Adapters that are not listed get scale 0."""


def request_scales(request: GeneratingRequest, models: ServedModels) -> list[float] | None:
    """Return the adapter scales for a request, or None if its model has no adapters.

    Raises BadRequest for an unknown id, or if the request selects adapters in two ways.
    """
    adapters = models.adapters(request.model)
    if request.lora is not None and request.model in adapters.names:
        raise BadRequest(f"lora and the model {request.model!r:.90} both select adapters; leave one out", "lora")
    if request.lora is not None:
        return adapters.scales(by_id=_by_id(request.lora, adapters)) or None
    return adapters.scales(request.model) or None


def check_no_adapter(name: str | None, models: ServedModels) -> None:
    """Raise BadRequest if the model name is an adapter, for endpoints that do not support adapters."""
    if name in models.adapters(name).names:
        raise BadRequest(f"{name!r:.90} is an adapter, which this endpoint does not support; name a model", "model")


async def adapter_list(models: ServedModels) -> list[dict[str, Any]]:
    """Return all adapters with their default scales."""
    return _only(models).to_json()


async def use_adapters(request: AdapterScales, models: ServedModels) -> dict[str, Any]:
    """Change the default scales. Raises BadRequest for an unknown id."""
    adapters = _only(models)
    adapters.use(_by_id(request.root, adapters))
    return {"success": True}


def _only(models: ServedModels) -> ServedAdapters:
    """Return the adapters of the first model that has any."""
    every = [models.adapters(name) for name in models.names]
    return next((adapters for adapters in every if len(adapters)), ServedAdapters())


def _by_id(scales: Sequence[AdapterScale], adapters: ServedAdapters) -> dict[int, float]:
    for scale in scales:
        if scale.id >= len(adapters):
            there = (
                f"ids are from 0 to {len(adapters) - 1}" if len(adapters) else "this model has none: serve with --lora"
            )
            raise BadRequest(f"there is no adapter {scale.id}; {there}", "lora")
    return {scale.id: scale.scale for scale in scales}
