"""Client of a server such as `edge serve`: its address, its key, and errors in words."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from transport.errors import TransportError

_MOST_BYTES = 16 << 20  # bytes of an answer that is read whole


class ServerClient:
    """A server's address, and requests to it. The key is sent only to this server."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """url: address of the server, with or without /v1

        Raises ValueError if `url` is not a URL, or contains a name or password.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if "@" in parts.netloc:  # it would appear in every error, and would not be sent
            raise ValueError("the address has a name or password before its @; leave it out, and use a key instead")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url[:200]!r} is not an address of a server, such as http://127.0.0.1:8080")
        self.where, self._key = parts.netloc, key
        self._base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        # No proxy: a server in the home network is not behind the proxy in the shell's environment.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)

    @contextmanager
    def response(
        self, path: str, timeout_s: float, body: Any = None, accept: str = "application/json"
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield the server's response to a GET, or with a body to a POST. The body is sent as JSON.

        timeout_s: time without a byte from the server.
        Raises TransportError with the server's message, also for errors while the response is read in the block. An end
        in the middle of the response is http.client.IncompleteRead.
        """
        headers = {"Content-Type": "application/json", "Accept": accept}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, headers)
        try:
            with closing(self._opener.open(request, timeout=timeout_s)) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise TransportError(f"{self.where} answers {error.code}: {_reason(error)}") from None
        except urllib.error.URLError as error:
            why = getattr(error.reason, "strerror", None) or error.reason
            raise TransportError(f"{self.where} cannot be reached: {why}; is edge serve running there?") from error
        except http.client.IncompleteRead:
            raise
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise TransportError(f"{self.where} cannot be used: {error}") from error

    def get(self, path: str, timeout_s: float) -> Any:
        """Return the JSON of a path. Raises TransportError."""
        try:
            with self.response(path, timeout_s) as response:
                content = response.read(_MOST_BYTES + 1)
                if len(content) > _MOST_BYTES:
                    raise ValueError(f"its answer to {path} has more than {_MOST_BYTES >> 20} MiB")
                return json.loads(content)
        except http.client.IncompleteRead as error:
            raise TransportError(f"{self.where} ended before its answer was complete") from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirects, which would receive the key and the conversation."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request, which makes the redirect an HTTPError."""


def _reason(error: urllib.error.HTTPError) -> str:
    with error:
        if elsewhere := error.headers.get("Location"):
            return f"it is at {elsewhere[:200]}; give that address, as a key goes to no other server than the one named"
        try:
            return error_message(json.loads(error.read(1 << 16)))
        except (OSError, ValueError, RecursionError, http.client.HTTPException):
            return error.reason


def error_message(values: Any) -> str:
    """Return the message of an API's error."""
    error = values.get("error", values) if isinstance(values, dict) else values
    return str(error.get("message", error) if isinstance(error, dict) else error)[:1000]
