"""Share of an engine process in the memory of its server: it asks before it loads, reports, and does as it is told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from edge.elastic.share import SHARE


def follow_share(
    options: Mapping[str, Any], send: Callable[..., None], messages: Iterator[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Ask the server for memory from now on. options: of the engine; one whose memory cannot change asks at once.
    NotEnoughMemory.

    Return the messages of other things: a thread reads all, also while the model is loaded."""
    others: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for message in messages:
            if message["do"] == "memory":
                SHARE.follow(*message["with"])
            else:
                others.put(message)
        SHARE.follow(SHARE.limit, 0, SHARE.seen, True, "the server has gone")
        others.put(None)

    SHARE.join(lambda *claim: send({"claim": claim}), lambda use: send({"memory": asdict(use)}))
    threading.Thread(target=read, name="share", daemon=True).start()
    if options.get("least_memory") is None:
        SHARE.request(options["memory"], options["memory"])
    return iter(others.get, None)
