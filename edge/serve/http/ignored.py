"""Request fields without effect. A response header names them, and each client's fields are logged once."""

from __future__ import annotations

import re
from collections import OrderedDict
from itertools import islice

from starlette.requests import Request
from starlette.responses import Response

from edge import log
from edge.serve.apis.fields import Fields

HEADER = "X-Edge-Ignored"
MAX_NAMES = 20  # names in a header
MAX_NAME = 80  # characters of a name
MAX_READ = 10_000  # ignored fields of a request that are examined
MAX_CLIENTS = 1024  # clients that the log remembers
MAX_LOGGED = 100  # fields logged for a client
_OTHER = re.compile(r"[^A-Za-z0-9_.-]")  # characters that are replaced in header values


class IgnoredFields:
    """Reports ignored request fields to clients and to the log."""

    def __init__(self) -> None:
        self._logged: OrderedDict[str, set[str]] = OrderedDict()  # by client address

    def tell(self, http: Request, request: Fields, response: Response) -> None:
        """Name the ignored fields of a request in its response. Log fields that are new for this client."""
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
    """Return the names of a request's ignored fields, safe for a header."""
    names = dict.fromkeys(
        _OTHER.sub("?", name[: MAX_NAME + 1])[:MAX_NAME] for name in islice(request.ignored_names(), MAX_READ)
    )
    return list(names)[:MAX_NAMES]
