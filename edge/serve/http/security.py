"""Access control: refuses requests by host name, origin, key, and size."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.serve.http.bodies import BodyRoom, IncomingBody
from edge.serve.http.errors import error_body, failure, is_anthropic
from edge.serve.options import ServeOptions

# The page may load only its own files, not be shown in other pages, and send nothing elsewhere.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
ALLOWED_METHODS = "GET, POST, DELETE"
_ELSEWHERE = ("cross-site", "same-site")  # a browser's marks of requests from other pages than the server's own
_NAMESPACE = "edge.namespace"  # key in the scope of a request
PREFLIGHT_S = 600  # that a browser remembers the answer to a preflight request


class Security:
    """Refuses requests that must not be answered, before anything reads them. Every answer has HEADERS."""

    def __init__(self, app: ASGIApp, options: ServeOptions, open_paths: Collection[str]) -> None:
        """open_paths: paths that need no key."""
        self.app = app
        self._namespaces = {key.encode(): _namespace(key, options) for key in options.api_keys}
        self._hosts = {name.lower() for name in ("localhost", options.host, socket.gethostname(), *options.allow_hosts)}
        self._origins = frozenset(options.allow_origins)
        self._max_body = options.max_body_bytes
        self._room = BodyRoom(max(options.max_bodies_bytes, options.max_body_bytes))
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        body = IncomingBody(receive, headers, self._max_body, self._room)
        begun = drains = False

        async def answer(message: Message) -> None:
            nonlocal begun, drains
            if message["type"] == "http.response.start":
                begun = True
                # A client that was too slow (408) is not waited for any longer.
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
            scope[_NAMESPACE] = self._checked(scope["path"], headers, scope["method"])
            body.check()
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _preflight(headers)(scope, receive, answer)
                return
            await self.app(scope, body.receive, answer)
        except HTTPException as error:
            if begun:
                raise
            failed = failure(error)
            content = error_body(failed, anthropic=is_anthropic(scope["path"]))
            await JSONResponse(content, failed.status, dict(failed.headers))(scope, receive, answer)
        finally:
            body.close()

    def _checked(self, path: str, headers: Headers, method: str) -> str:
        """Return the namespace of the client. HTTPException if it must not be answered."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own_name(hosts[0]):
            raise HTTPException(
                403, f"this server is not known as {', '.join(hosts) or 'nothing'!r:.200}; --allow-host adds a name"
            )
        origins = headers.getlist("origin")
        if len(origins) > 1 or any(not self._may_ask(origin, hosts[0]) for origin in origins):
            raise HTTPException(
                403, f"pages of {', '.join(origins)!r:.200} may not ask this server; --allow-origin allows one"
            )
        if not origins and headers.get("sec-fetch-site") in _ELSEWHERE and not self._is_link(path, headers, method):
            raise HTTPException(403, "pages of other origins may not ask this server; --allow-origin allows one")
        if method == "OPTIONS" and origins and "access-control-request-method" in headers:
            return ""  # a browser asks without the key whether it may ask
        namespace = self._namespace_of(headers)
        if path not in self._open_paths and namespace is None:
            raise HTTPException(
                401,
                "a key of this server is needed: `Authorization: Bearer KEY` or `x-api-key: KEY`",
                {"WWW-Authenticate": "Bearer"},
            )
        return namespace or ""

    def _is_own_name(self, host: str) -> bool:
        """Return whether a Host header names this server. A foreign DNS name that leads here does not."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._hosts
        return True

    def _may_ask(self, origin: str, host: str) -> bool:
        try:
            return urlsplit(origin).netloc == host or self._is_allowed(origin)
        except ValueError:
            return False

    def _is_link(self, path: str, headers: Headers, method: str) -> bool:
        """Return whether somebody follows a link to the page of this server."""
        followed = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        return method == "GET" and path in self._open_paths and followed

    def _is_allowed(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins

    def _namespace_of(self, headers: Headers) -> str | None:
        """Return the namespace of the given key; None if no key matches. All keys are compared, each in constant
        time."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given_keys = [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
        equal = [
            namespace
            for key, namespace in self._namespaces.items()
            for given_key in given_keys
            if hmac.compare_digest(given_key.encode(), key)
        ]
        return equal[0] if equal else None if self._namespaces else ""


def _namespace(key: str, options: ServeOptions) -> str:
    """Return the namespace of this key's prompts: a digest that does not reveal the key."""
    return "" if options.shared_prefixes else hashlib.sha256(f"edge prefixes of {key}".encode()).hexdigest()


def namespace_of(scope: Scope) -> str:
    """Return the namespace of a request that was admitted."""
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
