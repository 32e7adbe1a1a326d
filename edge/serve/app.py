"""The server as an ASGI application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from edge.errors import EdgeError
from edge.serve.apis.api import Api
from edge.serve.apis.chat import CHAT
from edge.serve.apis.completions import COMPLETIONS
from edge.serve.apis.models import ModelList
from edge.serve.http.bodies import Json
from edge.serve.http.errors import error_body, failure, is_anthropic
from edge.serve.http.generating import answers
from edge.serve.http.security import Security
from edge.serve.options import ServeOptions, check
from edge.serve.served import ServedModels

PAGE = Path(__file__).with_name("page")
ANSWERING: tuple[Api[Any], ...] = (CHAT, COMPLETIONS)
_GONE = 499  # whoever asked reads no status; it is for the log

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(models: ServedModels, options: ServeOptions) -> Starlette:
    """All APIs and the page. TrustError where other machines would be answered without a key."""
    check(options)
    open_paths = {"/", "/health", *(f"/{path.name}" for path in PAGE.glob("*"))}
    return Starlette(
        routes=[*_routes(models, options), *_page()],
        middleware=[Middleware(Security, options=options, open_paths=open_paths)],
        exception_handlers={
            EdgeError: _failed,
            ValidationError: _failed,
            HTTPException: _failed,
            ClientDisconnect: _gone,
            Exception: _failed,
        },
    )


def _routes(models: ServedModels, options: ServeOptions) -> list[BaseRoute]:
    listed = ModelList(models)
    get: dict[str, Endpoint] = {
        "/health": _health,
        "/v1/models": listed.list,
        "/v1/models/{name:path}": listed.one,
    }
    post: dict[str, Endpoint] = {api.path: answers(api, models, options.ping_s) for api in ANSWERING}
    routes: list[BaseRoute] = [Route(path, endpoint, methods=["GET"]) for path, endpoint in get.items()]
    return routes + [Route(path, endpoint, methods=["POST"]) for path, endpoint in post.items()]


def _page() -> list[BaseRoute]:
    return [Mount("/", StaticFiles(directory=PAGE, html=True))] if PAGE.is_dir() else []


async def _health(_request: Request) -> Response:
    return Json({"status": "ok"})


async def _failed(request: Request, error: Exception) -> Response:
    failed = failure(error)
    body = error_body(failed, anthropic=is_anthropic(request.url.path))
    return Json(body, failed.status, dict(failed.headers))


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_GONE)
