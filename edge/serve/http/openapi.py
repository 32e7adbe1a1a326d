"""OpenAPI 3.1 description of the server."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from edge.serve.apis.fields import Fields
from edge.serve.http.bodies import Json, read
from edge.serve.http.ignored import IgnoredFields
from edge.version import version

_ignored = IgnoredFields()


@dataclass(frozen=True)
class Endpoint:
    """A path that the server answers.

    `answer` gets the HTTP request, and the parsed body if `request` is set. It returns a response or JSON values.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    answer: Callable[..., Awaitable[Any]]
    request: type[BaseModel] | None = None

    async def handle(self, http: Request) -> Response:
        """Answer a request. Raises the errors of `read` and `answer`."""
        body = () if self.request is None else (await read(http, self.request),)
        value = await self.answer(http, *body)
        response = value if isinstance(value, Response) else Json(value)
        for request in body:
            if isinstance(request, Fields):
                _ignored.tell(http, request, response)
        return response


def openapi(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI description of these endpoints."""
    requests = [(endpoint.request, "validation") for endpoint in endpoints if endpoint.request is not None]
    template = "#/components/schemas/{model}"
    named, schemas = models_json_schema(requests, ref_template=template)  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        body = named[(endpoint.request, "validation")] if endpoint.request is not None else None
        methods = paths.setdefault(endpoint.path.replace(":path", ""), {})
        methods[endpoint.method.lower()] = _operation(endpoint, body)
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "edge serve", "version": version("edge-runtime")},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {}), "securitySchemes": keys},
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(endpoint: Endpoint, body: dict[str, Any] | None) -> dict[str, Any]:
    ok: dict[str, Any] = {"description": "The result.", "content": {"application/json": {}}}
    if endpoint.path == "/metrics":
        ok["content"] = {"text/plain": {}}
    if endpoint.request is not None and "stream" in endpoint.request.model_fields:
        ok["content"]["application/x-ndjson" if endpoint.path.startswith("/api/") else "text/event-stream"] = {}
    error = {"description": "The error, and how to correct the request.", "content": {"application/json": {}}}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": {"200": ok, "default": error}}
    if names := re.findall(r"{(\w+)", endpoint.path):
        schema = {"type": "string"}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
