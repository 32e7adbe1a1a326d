"""HTTP application of the bridge: the page's files, joining, and the streams of each page."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge import browser
from edge.bridge.page import Page
from edge.browser.browsers import Browsers
from edge.browser.frames import MAX_FRAME
from edge.browser.onnx_runtime import runtime_folder
from transport.errors import ProtocolError, Refused

STATIC = Path(browser.__file__).parent / "static"
_MAX_JOIN = 4096  # bytes
# Shared memory needs an isolated page. The page may load only its own files and compile its own WebAssembly.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self' blob:;"
    " connect-src 'self'; style-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none';"
    " form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def create_app(browsers: Browsers, page_of: Callable[[str], Page], *, secure: bool) -> Starlette:
    """Return the application.

    page_of: returns the page of a browser's name.
    secure: the server uses TLS.
    """

    process = secrets.token_hex(8)  # a page forgets the operations of another process

    async def join(request: Request) -> Response:
        try:
            values = json.loads(await _body(request, _MAX_JOIN))
            token = values["token"]
            if not isinstance(token, str):
                raise ValueError("the token is not a text")
        except (ValueError, KeyError, TypeError, RecursionError):
            return JSONResponse({"error": "This link is incomplete. Copy all of it."}, 400)
        try:
            name, key = browsers.join(token)
        except Refused as error:
            return JSONResponse({"error": str(error)}, 403)
        return JSONResponse({"name": name, "key": key})

    def named(request: Request) -> Page:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        name = browsers.name_of(key) if scheme.lower() == "bearer" and key else None
        if name is None:
            raise Refused("This browser is not known here any more. Ask for a new link.")
        return page_of(name)

    async def down(request: Request) -> Response:
        try:
            frames = await named(request).attach()
        except Refused as error:
            return JSONResponse({"error": str(error)}, 403)
        headers = {"Edge-Bridge": process}
        return StreamingResponse(frames, media_type="application/octet-stream", headers=headers)

    async def up(request: Request) -> Response:
        try:
            await named(request).receive(await _body(request, MAX_FRAME))
        except Refused as error:
            return JSONResponse({"error": str(error)}, 403)
        except ProtocolError as error:
            return JSONResponse({"error": str(error)}, 400)
        return Response(status_code=204)

    async def onnx_runtime(request: Request) -> Response:
        if not (folder := runtime_folder()).is_dir():  # a page asks for it only after it was fetched
            return Response(status_code=404)
        return await StaticFiles(directory=folder).get_response(request.path_params["name"], request.scope)

    routes = [
        Route("/api/join", join, methods=["POST"]),
        Route("/api/down", down),
        Route("/api/up", up, methods=["POST"]),
        Route("/ort/{name}", onnx_runtime),
        Mount("/", StaticFiles(directory=STATIC, html=True)),
    ]
    app = Starlette(routes=routes)
    app.add_middleware(_OwnPages, secure=secure)
    return app


async def _body(request: Request, most: int) -> bytes:
    """Return the body of a request. Raises ProtocolError if it has more than `most` bytes."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise ProtocolError(f"a request of more than {most} bytes")
    return bytes(body)


class _OwnPages:
    """Refuses requests of pages from elsewhere, and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, secure: bool) -> None:
        self._app, self._scheme = app, "https" if secure else "http"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        is_own = origin in (None, f"{self._scheme}://{headers.get('host', '')}")
        if not is_own or (site in ("cross-site", "same-site") and scope["path"].startswith("/api/")):
            await JSONResponse({"error": "this request comes from another page"}, 403)(scope, receive, answer)
            return
        await self._app(scope, receive, answer)
