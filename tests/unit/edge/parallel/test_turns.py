"""Turns: one thread computes at a time, in the order in which they asked."""

from __future__ import annotations

import threading

from edge.parallel.shard import Turns
from tests.support.helpers import until
from tests.support.links import WAIT_S, start


def test_turns_go_round_in_the_order_of_asking() -> None:
    turns, order, lock = Turns(), list[int](), threading.Lock()
    inside = 0

    def compute(number: int) -> None:
        nonlocal inside
        turns.take()
        with lock:
            inside += 1
            assert inside == 1
        order.append(number)
        with lock:
            inside -= 1
        turns.give()

    turns.take()
    threads = []
    for number in range(5):
        threads.append(start(compute, number))
        until(lambda: len(turns._waiting) == number + 1, "a thread that waits")  # noqa: B023
    turns.give()
    for thread in threads:
        thread.result(WAIT_S)
    assert order == [0, 1, 2, 3, 4]


def test_who_gives_and_takes_again_comes_behind_those_who_wait() -> None:
    """Even at once: sums that have come already must not keep the other group from computing."""
    turns, order = Turns(), list[str]()

    def other() -> None:
        turns.take()
        order.append("other")
        turns.give()

    turns.take()
    waiting = start(other)
    until(lambda: bool(turns._waiting), "a thread that waits")
    turns.give()
    turns.take()
    order.append("first again")
    turns.give()
    waiting.result(WAIT_S)
    assert order == ["other", "first again"]
    turns.take()  # it is free
