"""An engine process reads what the server sends while it loads."""

from typing import Any

import pytest

from edge.elastic.share import MemoryShare
from edge.errors import NotEnoughMemory
from edge.serve.engine import memory

CANCEL = {"do": "cancel", "id": 3}


def share_of(**values: Any) -> dict[str, Any]:
    return {"do": "memory", "with": values}


def test_a_cancel_and_another_limit_before_the_model_is_loaded_are_no_first_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    share, sent = MemoryShare(), list[Any]()
    monkeypatch.setattr(memory, "SHARE", share)
    messages = iter([CANCEL, share_of(bytes=90), share_of(bytes=70, first=True), share_of(bytes=60)])
    others = memory.follow_share({"memory": 100, "least_memory": 10}, sent.append, messages)
    assert list(others) == [CANCEL]  # all are read, though nothing asks yet
    assert share.limit == 60
    assert share.request(10, 100) == 70
    assert share.limit == 60


def test_a_share_that_is_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SHARE", MemoryShare())
    messages = iter([CANCEL, share_of(refused="no room", first=True)])
    with pytest.raises(NotEnoughMemory, match="no room"):
        memory.follow_share({"memory": 100}, lambda message: None, messages)
