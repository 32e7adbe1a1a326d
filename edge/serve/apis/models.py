"""/v1/models, as OpenAI and Anthropic have it."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edge.errors import UnknownModel
from edge.serve.http.bodies import Json
from edge.serve.served import ServedModels

_CREATED = "1970-01-01T00:00:00Z"  # nobody knows when


def model_json(name: str) -> dict[str, Any]:
    """What is told of a model: the keys of both APIs."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "edge"}
    return {**openai, "type": "model", "display_name": name, "created_at": _CREATED}


class ModelList:
    """Endpoints that tell which models there are."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def list(self, _request: Request) -> Response:
        """All."""
        names = list(self._models.names)
        told = {"object": "list", "data": [model_json(name) for name in names]}
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return Json({**told, "has_more": False, **ends})

    async def one(self, request: Request) -> Response:
        """One, by its name. UnknownModel."""
        name, names = request.path_params["name"], self._models.names
        if name not in names:
            raise UnknownModel(f"there is no model {name!r:.200}; there is {', '.join(names)}")
        return Json(model_json(name))
