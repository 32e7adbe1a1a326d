"""Fields of requests that have no effect: a header of the answer names them, and the log does once for each client."""

from __future__ import annotations

import re
from collections import OrderedDict
from itertools import islice

from starlette.requests import Request
from starlette.responses import Response

from edge import log
from edge.serve.apis.fields import Fields

HEADER = "X-Edge-Ignored"
MAX_NAMES = 20  # in a header
MAX_NAME = 80  # characters
MAX_READ = 10_000  # ignored fields of a request that are looked at
MAX_CLIENTS = 1024  # that the log remembers
MAX_LOGGED = 100  # fields of a client
_OTHER = re.compile(r"[^A-Za-z0-9_.-]")  # characters that no name has in a header


class IgnoredFields:
    """Tells which fields of requests were ignored."""

    def __init__(self) -> None:
        self._logged: OrderedDict[str, set[str]] = OrderedDict()  # by the address of the client

    def tell(self, http: Request, request: Fields, response: Response) -> None:
        """Name the ignored fields of a request in its response, and log those that this client had not sent yet."""
        names = names_of(request)
        if not names:
            return
        response.headers[HEADER] = ", ".join(names)
        client = http.client.host if http.client else "unknown"
        logged = self._logged.setdefault(client, set())
        self._logged.move_to_end(client)
        if len(self._logged) > MAX_CLIENTS:
            self._logged.popitem(last=False)
        new = [name for name in names if name not in logged][: MAX_LOGGED - len(logged)]
        if new:
            logged.update(new)
            log.warning("fields ignored", client=client, path=http.url.path, fields=",".join(new))


def names_of(request: Fields) -> list[str]:
    """Return the names of the ignored fields of a request, as a header may have them."""
    names = dict.fromkeys(
        _OTHER.sub("?", name[: MAX_NAME + 1])[:MAX_NAME] for name in islice(request.ignored_names(), MAX_READ)
    )
    return list(names)[:MAX_NAMES]
