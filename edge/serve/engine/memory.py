"""Share of an engine process in the memory of its server: it asks before it loads, reports, and does as it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from edge.elastic.share import SHARE, MemoryUse
from edge.errors import NotEnoughMemory


def follow_share(options: Mapping[str, Any], send: Callable[..., None], messages: Iterator[Mapping[str, Any]]) -> None:
    """Ask the server for memory from now on. options: of the engine; one whose memory cannot change asks at once."""

    def report(use: MemoryUse) -> None:
        send({"memory": asdict(use)})

    def ask(use: MemoryUse) -> int:
        report(use)
        answer = next(messages)["with"]
        if "refused" in answer:
            raise NotEnoughMemory(answer["refused"])
        return int(answer["bytes"])

    SHARE.join(ask, report)
    if options.get("least_memory") is None:
        SHARE.fix(SHARE.request(options["memory"], options["memory"]))
