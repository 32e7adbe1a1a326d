"""Share of an engine process in the memory of its server: it asks before it loads, reports, and does as it is told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from edge.elastic.share import SHARE, MemoryUse
from edge.errors import NotEnoughMemory


def follow_share(
    options: Mapping[str, Any], send: Callable[..., None], messages: Iterator[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Ask the server for memory from now on. options: of the engine; one whose memory cannot change asks at once.

    Return the messages of other things: a thread reads all, also while the model is loaded."""
    first: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
    others: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for message in messages:
            if message["do"] != "memory":
                others.put(message)
                continue
            share = message["with"]
            if "bytes" in share:
                SHARE.limit = share["bytes"]
            if share.get("first"):
                first.put(share)
        first.put({"refused": "the server has gone"})
        others.put(None)

    def report(use: MemoryUse) -> None:
        send({"memory": asdict(use)})

    def ask(use: MemoryUse) -> int:
        report(use)
        answer = first.get()
        if "refused" in answer:
            raise NotEnoughMemory(answer["refused"])
        return int(answer["bytes"])

    threading.Thread(target=read, name="share", daemon=True).start()
    SHARE.join(ask, report)
    if options.get("least_memory") is None:
        SHARE.fix(SHARE.request(options["memory"], options["memory"]))
    return iter(others.get, None)
