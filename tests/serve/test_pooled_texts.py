"""Test that requests for embeddings and scores wait for each other, and that no other request waits for them."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edge.api.config import EngineConfig
from edge.errors import EngineError
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.serve.engine.child import ReplicaPlans, _read
from edge.serve.engine.loop import ServingLoop
from tests.support.ranking import decoder


class Loop:
    """Answers what is asked, but scores no document before it may."""

    def __init__(self) -> None:
        self.may_score, self.answered = threading.Event(), threading.Semaphore(0)

    def expect(self, number: int) -> None:
        """It may be cancelled."""

    def pool(self, number: int, what: str, arguments: Mapping[str, Any]) -> str:
        assert self.may_score.wait(60)
        return what

    def ask(self, what: str, arguments: Mapping[str, Any]) -> str:
        self.answered.release()
        return what

    def end(self) -> None:
        """Nothing runs."""


def test_others_are_answered_beside_many_rankings() -> None:
    loop: Any = Loop()
    replies: list[Any] = []
    control: Any = type("Control", (), {"send": staticmethod(replies.append)})

    def messages() -> Any:
        for number in range(8):
            yield {"id": number, "do": "rerank", "with": {}, "is_large": False}
        yield {"id": 8, "do": "tokenize", "with": {}, "is_large": False}
        try:
            assert loop.answered.acquire(timeout=10)
        finally:
            loop.may_score.set()

    _read(messages(), loop, control, None, ReplicaPlans(replies.append))
    assert sorted(reply["id"] for reply in replies) == list(range(9))


def test_a_cancelled_ranking_ends_between_two_documents(tmp_path: Path) -> None:
    with Engine(decoder(tmp_path / "tiny.gguf"), EngineOptions(threads=1)) as engine:
        loop = ServingLoop(EngineConfig(str(engine.path)), engine, None, lambda *messages: None)
        loop.expect(1)
        loop.cancel(1)
        with pytest.raises(EngineError, match="cancelled before all of its texts"):
            loop.pool(1, "rerank", {"query": "q", "documents": ["a", "b"]})
        loop.end()
        loop.run()
