"""Test that an engine process reads the server's messages while it loads a model."""

import asyncio
import queue
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from edge.errors import NotEnoughMemory
from edge.llm.options import EngineOptions
from edge.serve.engine import memory
from edge.serve.engine_child import exit_code, spawn
from edge.weights.elastic.share import MemoryShare

CANCEL = {"do": "cancel", "id": 3}


def share_of(*values: Any) -> dict[str, Any]:
    return {"do": "memory", "with": values}


def test_a_cancel_before_the_model_is_loaded_is_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    share, sent = MemoryShare(), list[Any]()
    monkeypatch.setattr(memory, "SHARE", share)
    messages = iter([CANCEL, share_of(90, 90, 1, False), share_of(60, 60, 2, False)])
    others = memory.follow_share(EngineOptions(memory=100, least_memory=10), sent.append, messages)
    assert list(others) == [CANCEL]  # all are read, though nothing asks yet
    assert (share.limit, share.seen, sent) == (60, 2, [])


@pytest.mark.parametrize(
    ("last", "words"), [(share_of(0, 0, 1, True, "no room"), "^no room$"), (CANCEL, "^the server has gone$")]
)
def test_who_cannot_change_asks_at_once_and_hears_why_not(
    monkeypatch: pytest.MonkeyPatch, last: dict[str, Any], words: str
) -> None:
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    monkeypatch.setattr(memory, "SHARE", MemoryShare())

    def messages() -> Iterator[dict[str, Any]]:
        assert sent.get(timeout=30) == {"claim": (100, 100)}
        yield last

    with pytest.raises(NotEnoughMemory, match=words):
        memory.follow_share(EngineOptions(memory=100), sent.put, messages())


def test_a_process_that_has_just_been_started_lives_on_at_a_signal() -> None:
    """Service managers send it to all processes of a service."""

    async def test() -> int:
        process, _, writer = await spawn("edge.serve.engine.child")
        process.send_signal(signal.SIGUSR1)
        writer.close()
        return await exit_code(process)

    assert asyncio.run(test()) >= 0
