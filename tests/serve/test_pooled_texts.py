"""Requests that embed or score texts wait for each other, and no other request for them."""

import threading
from collections.abc import Mapping
from typing import Any

from edge.serve.engine.child import _read


class Loop:
    """Answers what is asked, but scores no document before it may."""

    def __init__(self) -> None:
        self.may_score, self.answered = threading.Event(), threading.Semaphore(0)

    def ask(self, what: str, arguments: Mapping[str, Any]) -> str:
        if what == "rerank":
            assert self.may_score.wait(60)
        else:
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

    _read(messages(), loop, control)
    assert sorted(reply["id"] for reply in replies) == list(range(9))
