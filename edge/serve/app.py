"""The server as an ASGI application."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from edge.errors import EdgeError
from edge.serve.endpoints import endpoints
from edge.serve.http.bodies import Json
from edge.serve.http.errors import error_body, failure, is_anthropic
from edge.serve.http.security import Security
from edge.serve.options import ServeOptions, check
from edge.serve.served import ServedModels

PAGE = Path(__file__).with_name("page")
_GONE = 499  # nobody reads this status; it is for the log


def create_app(models: ServedModels, options: ServeOptions) -> Starlette:
    """All APIs and the page. TrustError where other machines would be answered without a key."""
    check(options)
    open_paths = {"/", "/health", *(f"/{path.name}" for path in PAGE.glob("*"))}
    routes: list[BaseRoute] = [Route(one.path, one.handle, methods=[one.method]) for one in endpoints(models, options)]
    if PAGE.is_dir():
        routes.append(Mount("/", StaticFiles(directory=PAGE, html=True)))
    return Starlette(
        routes=routes,
        middleware=[Middleware(Security, options=options, open_paths=open_paths)],
        exception_handlers={
            EdgeError: _failed,
            ValidationError: _failed,
            HTTPException: _failed,
            ClientDisconnect: _gone,
            Exception: _failed,
        },
    )


async def _failed(request: Request, error: Exception) -> Response:
    failed = failure(error)
    body = error_body(failed, anthropic=is_anthropic(request.url.path))
    return Json(body, failed.status, dict(failed.headers))


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_GONE)
