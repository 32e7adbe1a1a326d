"""Test cancelled work in threads: everything that it opened is closed, and the first error is raised."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from edge.cluster.failures import failure_reason, is_cause
from edge.errors import Interrupted, WorkerError
from edge.tasks import CancelScope, results
from tests.support.helpers import TIMEOUT_S
from transport.errors import LinkClosed, LinkTimeout, ProtocolError, Refused


def test_the_last_is_undone_first_and_what_comes_late_at_once() -> None:
    undone: list[int] = []

    @contextmanager
    def entered() -> Iterator[str]:
        yield "inside"
        undone.append(2)

    with CancelScope() as closing:
        closing.then(lambda: undone.append(1))
        assert closing.enter(entered()) == "inside"
        closing.check()
        assert undone == []
    assert undone == [2, 1]
    closing.then(lambda: undone.append(3))
    closing.close()
    assert undone == [2, 1, 3]
    with pytest.raises(Interrupted):
        closing.check()


def test_results_are_in_order_and_the_first_error_is_not_waited_for() -> None:
    go = threading.Event()

    def fail() -> int:
        raise ValueError("this one")

    with ThreadPoolExecutor(4) as pool:
        assert results(pool.submit(lambda n=n: n) for n in range(5)) == [0, 1, 2, 3, 4]  # type: ignore[misc]
        waiting = [pool.submit(go.wait, TIMEOUT_S) for _ in range(3)]
        with pytest.raises(ValueError, match="this one"):
            results([waiting[0], pool.submit(fail)])
        with pytest.raises(ValueError, match="this one"):
            results([waiting[1]], also_watched=[pool.submit(fail)])
        assert results([pool.submit(int)], also_watched=[waiting[2]]) == [0]
        assert not any(item.done() for item in waiting)
        go.set()


def test_what_says_most_is_raised() -> None:
    died = WorkerError("one: the engine process was killed")
    room = WorkerError("two: no room", "NotEnoughMemory")
    refused = WorkerError("one: rank 2 (two) at x: Connection refused", "Refused")
    cut = WorkerError("two: the stream ends inside a frame", "ProtocolError")
    closed = WorkerError("two: rank 1 closed the link", "LinkClosed")
    gone = LinkClosed("three went away")  # of a session, so it is about the worker itself
    assert [is_cause(word) for word in (died, room, gone, refused, cut, closed)] == [True] * 3 + [False] * 3
    assert failure_reason([closed, cut, refused, died]) is died
    assert failure_reason([closed, cut, refused]) is refused
    assert failure_reason([cut, room], Refused("rank 2: no room")) is room
    assert failure_reason([cut, closed], LinkClosed("rank 1 closed the link")) is cut
    assert failure_reason([gone], ProtocolError("inside a frame")) is gone
    late = WorkerError("two: rank 0 did not come", "LinkTimeout")
    unreached = Refused("rank 1 cannot be reached: its engine process went away")
    assert failure_reason([late, refused], unreached) is refused
    assert failure_reason([late], unreached) is unreached
    own = LinkTimeout("rank 2 sent nothing for 300 s")
    assert failure_reason([closed, refused], own) is own
    assert failure_reason([], own) is own
