"""Threads of an engine process that prepare requests. Each purpose has its own pool, so that none waits for another."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from edge.closing import Closing

FETCHING = 16  # requests with URLs; a slow one blocks its thread for up to `edge.serve.engine.downloads.TOTAL_S`
FETCHING_FOR_ONE = 12  # maximum requests with URLs of one client
READING = 2  # requests to tokenize or render
_POOLS = {
    "prepare": 4,
    "constrain": 2,  # compiling may take a second of processor time
    "pool": 1,  # texts are computed one at a time, by the engine thread
    "encode": 4,  # files are encoded one at a time, but cached files need not wait
    "fetch": FETCHING,
    "read": READING,
    "tell": 1,  # status requests, for which a list of all models waits
}
POOLED = ("embed", "rerank")
_READ = ("tokenize", "pieces", "render", "announce")
_CONSTRAINTS = ("grammar", "json_schema", "regex", "lark")


def purpose_of(message: Mapping[str, Any]) -> str:
    """Return the name of the pool for a request to the engine process."""
    what, arguments = message["do"], message.get("with", {})
    if what in POOLED:
        return "pool"
    if what != "generate":
        return "read" if what in _READ else "tell"
    if media := arguments.get("media"):
        return "fetch" if any(map(is_url, media.values())) else "encode"
    sampling = arguments.get("sampling", {})
    return "constrain" if any(sampling.get(name) is not None for name in _CONSTRAINTS) else "prepare"


def is_url(source: str) -> bool:
    """Return True if a picture or sound must be fetched."""
    return source.startswith(("http://", "https://"))


class Threads(Closing):
    """The thread pools."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._pools = {
            name: self._stack.enter_context(ThreadPoolExecutor(n, thread_name_prefix=name))
            for name, n in _POOLS.items()
        }

    def submit(self, message: dict[str, Any], *work: Any) -> None:
        """Run `work`, a function and its arguments, in the pool of a request."""
        self._pools[purpose_of(message)].submit(*work)

    def close(self) -> None:
        """Wait for the threads."""
        self._stack.close()
