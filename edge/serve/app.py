"""The server as an ASGI application."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from edge.errors import EdgeError
from edge.pictures.page import AXES
from edge.serve.devices.devices import ServedDevices
from edge.serve.endpoints import HEALTH, endpoints
from edge.serve.http.bodies import Json
from edge.serve.http.errors import error_body, failure
from edge.serve.http.security import Security
from edge.serve.oip.endpoints import LIVE, READY
from edge.serve.oip.networks import Networks
from edge.serve.options import ServeOptions, check
from edge.serve.served import ServedModels

PAGE = Path(__file__).with_name("page")
_GONE = 499  # status in the log if the client has disconnected


def create_app(models: ServedModels, options: ServeOptions, networks: Networks | None = None) -> Starlette:
    """Return the app with all APIs and the page. Its `state.devices` is to be closed at the end.

    networks: the ONNX networks of the server, if it has any.

    Raises TrustError if the server would answer other machines without a key.
    """
    check(options)
    page = _page()
    served_devices = ServedDevices(models, options)
    all_endpoints = endpoints(models, options, served_devices, networks)
    routes = [Route(endpoint.path, endpoint.handle, methods=[endpoint.method]) for endpoint in all_endpoints]
    app = Starlette(
        routes=[*routes, *(Route(path, handle) for path, handle in page.items())],
        middleware=[Middleware(Security, options=options, open_paths={*HEALTH, LIVE, READY, *page})],
        exception_handlers={
            EdgeError: _failed,
            ValidationError: _failed,
            HTTPException: _not_answered([endpoint.path for endpoint in all_endpoints]),
            ClientDisconnect: _gone,
            Exception: _failed,
        },
    )
    app.state.devices = served_devices
    app.router.redirect_slashes = False  # each path has only one form
    return app


def _page() -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """Return handlers of the page's files by path. The index is also at the root."""

    def sender(file: Path) -> Callable[[Request], Awaitable[Response]]:
        async def send(_request: Request) -> Response:
            return FileResponse(file)

        return send

    files = {f"/{file.relative_to(PAGE).as_posix()}": file for file in PAGE.rglob("*") if file.is_file()}
    files[f"/{AXES.name}"] = AXES
    handlers = {path: sender(file) for path, file in files.items()}
    if "/index.html" not in files:
        return handlers
    index = handlers["/index.html"]

    async def root(request: Request) -> Response:
        """Send the index to browsers. Other programs get the text by which they recognize an Ollama server."""
        is_program = request.headers.get("accept") == "*/*"
        return PlainTextResponse("Ollama is running") if is_program else await index(request)

    return {**handlers, "/": root}


async def _failed(request: Request, error: Exception) -> Response:
    failed = failure(error)
    body = error_body(failed, request.url.path)
    return Json(body, failed.status, dict(failed.headers))


def _not_answered(paths: Sequence[str]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return a handler of HTTP errors. For an unknown path, its message names the nearest one."""

    async def respond(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        if error.status_code == 404:
            near = difflib.get_close_matches(path, paths, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            message = f"there is no {path[:200]} here; {hint}GET /openapi.json describes all paths"
            error = HTTPException(404, message)
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            error = HTTPException(405, f"{path} takes {allowed}, not {request.method[:20]}", error.headers)
        return await _failed(request, error)

    return respond


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_GONE)
