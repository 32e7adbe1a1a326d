"""Threads of an engine process that prepare requests, a pool for each purpose: no purpose waits for another."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from edge.closing import Closing

FETCHING = 16  # requests with URLs: a slow one keeps its thread for up to `edge.serve.engine.downloads.TOTAL_S`
FETCHING_FOR_ONE = 12  # of one client
READING = 2  # requests to tokenize or render, which nobody's answer waits for
_POOLS = {
    "prepare": 4,
    "constrain": 2,  # compiling may take a second of a processor
    "pool": 1,  # one text at a time: each waits for the engine
    "encode": 4,  # one file is encoded at a time, but those that are held wait for no other
    "fetch": FETCHING,
    "read": READING,
    "tell": 1,  # what a list of all models waits for
}
POOLED = ("embed", "rerank")
_READ = ("tokenize", "pieces", "render", "announce")
_CONSTRAINTS = ("grammar", "json_schema", "regex", "lark")


def purpose_of(message: Mapping[str, Any]) -> str:
    """Return the pool of a request to the engine process."""
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
    """Return whether a picture or sound of a request is fetched."""
    return source.startswith(("http://", "https://"))


class Threads(Closing):
    """The pools."""

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
