"""Memory share of an engine process: it claims memory before loading, reports its use, and follows the limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from edge.llm.options import EngineOptions
from edge.weights.elastic.share import SHARE


def follow_share(
    options: EngineOptions, send: Callable[..., None], messages: Iterator[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Follow the server's memory limits from now on. Return an iterator of the other messages.

    A thread reads all messages, even while the model is loaded. An engine whose memory cannot change claims all of its
    memory now.

    options: options of the engine. Raises NotEnoughMemory.
    """
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
    if options.least_memory is None:
        assert options.memory is not None
        SHARE.request(options.memory, options.memory)
    return iter(others.get, None)
