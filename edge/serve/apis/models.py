"""/v1/models, as OpenAI and Anthropic have it: with the keys of both."""

from __future__ import annotations

from typing import Any

from edge.errors import UnknownModel
from edge.serve.served import ServedModels

_CREATED = "1970-01-01T00:00:00Z"  # nobody knows when


async def model_list(models: ServedModels) -> dict[str, Any]:
    """All models."""
    names = list(models.names)
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return {"object": "list", "data": [_model(name) for name in names], "has_more": False, **ends}


def model_json(models: ServedModels, name: str) -> dict[str, Any]:
    """One of them. UnknownModel."""
    if name not in models.names:
        raise UnknownModel(f"there is no model {name!r:.200}; there is {', '.join(models.names)}")
    return _model(name)


def _model(name: str) -> dict[str, Any]:
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "edge"}
    return {**openai, "type": "model", "display_name": name, "created_at": _CREATED}
