"""Access control: refuses requests by host name, origin, key and size."""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.serve.caller import CALLER, Caller
from edge.serve.http.bodies import INCOMING, BodyRoom, IncomingBody
from edge.serve.http.errors import error_body, failure
from edge.serve.http.own_names import OwnNames, name_of, refusal_page
from edge.serve.keys import NEEDED, Keys
from edge.serve.options import ServeOptions

# The page may load only its own files, cannot be embedded in other pages, and cannot send data elsewhere.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
ALLOWED_METHODS = "GET, POST, DELETE"
# Origins of local programs with an embedded browser. Pages from the internet cannot have these origins.
_OF_APPS = re.compile(
    r"(app|capacitor|file|ionic|tauri|vscode-file|vscode-webview)://[a-z0-9.-]*|https?://tauri.localhost"
)
_ELSEWHERE = ("cross-site", "same-site")  # values by which browsers mark requests from other sites
_NAMESPACE = "edge.namespace"  # key in the scope of a request
PREFLIGHT_S = 600  # seconds that a browser caches the answer to a preflight request


class Security:
    """Refuses forbidden requests before anything reads them. Adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp, options: ServeOptions, open_paths: Collection[str]) -> None:
        """open_paths: paths that need no key."""
        self.app = app
        self._keys = Keys(options)
        self._shares_prefixes = options.shared_prefixes
        self._own_names = OwnNames(options)
        self._origins = frozenset(options.allow_origins)
        self._max_body = options.max_body_bytes
        self._room = BodyRoom(max(options.max_bodies_bytes, options.max_body_bytes))
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["path"] = usual_path(scope["path"])
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        body = scope[INCOMING] = IncomingBody(receive, headers, self._max_body, self._room)
        begun = drains = False
        caller = Caller(is_administrator=False)

        async def answer(message: Message) -> None:
            nonlocal begun, drains
            if message["type"] == "http.response.start":
                begun = True
                # The body of a client that was too slow (408) is not awaited any longer.
                drains = message["status"] >= 400 and message["status"] != 408 and not body.is_complete
                answer_headers = MutableHeaders(scope=message)
                answer_headers.update(HEADERS)
                if drains:
                    answer_headers["Connection"] = "close"
                if origin is not None and self._is_allowed(origin):
                    cors = {"Access-Control-Allow-Origin": origin, "Cross-Origin-Resource-Policy": "cross-origin"}
                    answer_headers.update(cors)
                    answer_headers.add_vary_header("Origin")
            elif drains and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await body.drain()
                message = {"type": "http.response.body"}
            await send(message)

        try:
            owner = self._checked(scope["path"], headers, scope["method"])
            caller = self._keys.caller(owner, (scope.get("client") or ("",))[0])
            caller.begin()
            CALLER.set(caller)
            scope[_NAMESPACE] = "" if self._shares_prefixes else owner
            body.check()
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _preflight(headers)(scope, receive, answer)
                return
            await self.app(scope, body.receive, answer)
        except HTTPException as error:
            if begun:
                raise
            await _refusal(error, scope, headers)(scope, receive, answer)
        finally:
            body.close()
            caller.end()

    def _checked(self, path: str, headers: Headers, method: str) -> str:
        """Return the digest of the client's key. Raises HTTPException if the request is refused."""
        hosts = headers.getlist("host")  # missing only in HTTP/1.0, which load balancer probes use but browsers do not
        if len(hosts) > 1 or any(host not in self._own_names for host in hosts):
            message = f"{', '.join(hosts)!r:.200} is not a name of this server; --allow-host adds a name"
            raise _Refused(message, "--allow-host", name_of(hosts[0]) if len(hosts) == 1 else "")
        origins = headers.getlist("origin")
        if len(origins) > 1 or any(not self._may_ask(origin, hosts) for origin in origins):
            message = f"pages of {', '.join(origins)!r:.200} may not use this server; --allow-origin allows an origin"
            raise _Refused(message, "--allow-origin", origins[0])
        if not origins and headers.get("sec-fetch-site") in _ELSEWHERE and not self._is_link(path, headers, method):
            raise _Refused(
                "pages of other origins may not use this server; --allow-origin allows an origin", "--allow-origin"
            )
        if method == "OPTIONS" and origins and "access-control-request-method" in headers:
            return ""  # browsers send preflight requests without the key
        names = ("authorization", "x-api-key", "api-key")
        owner = self._keys.owner(*(headers.get(name, "") for name in names))
        if path not in self._open_paths and owner is None:
            raise HTTPException(
                401,
                NEEDED,
                {"WWW-Authenticate": "Bearer"},
            )
        return owner or ""

    def _may_ask(self, origin: str, hosts: list[str]) -> bool:
        try:
            return urlsplit(origin).netloc in hosts or self._is_allowed(origin)
        except ValueError:
            return False

    def _is_link(self, path: str, headers: Headers, method: str) -> bool:
        """Return True if a browser follows a link to the page of this server."""
        followed = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        return method == "GET" and path in self._open_paths and followed

    def _is_allowed(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins or bool(_OF_APPS.fullmatch(origin))


class _Refused(HTTPException):
    """A request refused for its host name or origin, which an option of the server would allow."""

    def __init__(self, message: str, option: str, value: str = "") -> None:
        super().__init__(403, message)
        self.option, self.value = option, value


def _refusal(error: HTTPException, scope: Scope, headers: Headers) -> Response:
    """Return the response to a refused request. A browser that opens a page gets a page."""
    if isinstance(error, _Refused) and "text/html" in headers.get("accept", ""):
        return HTMLResponse(refusal_page(error.detail, error.option, error.value), error.status_code)
    failed = failure(error)
    return JSONResponse(error_body(failed, scope["path"]), failed.status, dict(failed.headers))


def usual_path(path: str) -> str:
    """Return a path without common mistakes in the server address that users configure.

    These are the address itself (as in proxy requests), repeated or trailing slashes, and a folder or endpoint before
    the endpoint. Keys are checked for the returned path, which is the one that is answered.
    """
    path = re.sub(r"//+", "/", re.sub(r"^https?://[^/]*", "", path))
    path = _NOT_OPENAI.sub("/v1", _BEFORE_API.sub("", path))
    return path.rstrip("/") or "/"


# Folders of other servers before the paths of OpenAI's API. A client that was configured with the address of an
# endpoint appends another endpoint to it.
_BEFORE_API = re.compile(
    r"^((/v1){1,8}(?=/api/(?!v1))|(/v1|/api|/openai|/engines(/[^/]+)?|/v1/chat/completions|/v1/messages){1,8}(?=/v1(/|$)))"
)
_NOT_OPENAI = re.compile(
    r"^(/api/v0(?=/(chat/completions|completions|embeddings|models)(/|$))"
    r"|/openai/deployments/[^/]+(?=/(chat/completions|completions|embeddings)/?$)"
    r"|(/api|/v1/chat/completions)(?=/(chat/completions|models)/?$))"
)


def namespace_of(scope: Scope) -> str:
    """Return the prefix cache namespace of an admitted request."""
    return str(scope.get(_NAMESPACE, ""))


def _preflight(headers: Headers) -> Response:
    requested = headers.get("access-control-request-headers", "")
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Methods": ALLOWED_METHODS,
            "Access-Control-Allow-Headers": requested,
            "Access-Control-Max-Age": str(PREFLIGHT_S),
        },
    )
