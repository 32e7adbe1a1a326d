"""Requests keep their order in the queues of the scheduler, and none stays in a queue that it has left."""

from collections.abc import Iterator

import pytest

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.queues import Queues
from edge.llm.requests import RequestState, prepare
from edge.models.demo import MODEL_PATH


@pytest.fixture
def requests() -> Iterator[list[RequestState]]:
    """Five requests, of which the last two run in the background."""
    with Engine(MODEL_PATH, EngineOptions(threads=1, context=64)) as engine:
        yield [prepare(n, Request([1, 2], 4, background=n >= 3), engine, lambda: False) for n in range(5)]


def full_queues(requests: list[RequestState]) -> Queues:
    """Two waiting requests; of three running ones, one is ready and one has its prompt computed elsewhere."""
    queues = Queues()
    for request in (*requests[2:], *requests[:2]):
        queues.waiting.append(request)
    for request in requests[2:]:
        queues.admit(request)
    queues.ready.append(requests[2])
    queues.remote.append(requests[3])
    return queues


def test_preempting_all_requests_keeps_their_order_before_the_waiting_ones(requests: list[RequestState]) -> None:
    queues = full_queues(requests)
    queues.preempt_all()
    assert list(queues.waiting) == [*requests[2:], *requests[:2]]
    assert queues.all == list(queues.waiting)
    assert not [*queues.running, *queues.without_logits]
    assert not any(queues.preemptions.values())  # a lost engine is not a preemption for lack of room


def test_a_preempted_request_waits_first_and_is_counted_by_its_kind(requests: list[RequestState]) -> None:
    queues = full_queues(requests)
    for request, counted in ((requests[2], "foreground"), (requests[3], "background")):
        before = dict(queues.preemptions)
        queues.preempt(request)
        assert queues.waiting[0] is request
        assert request not in (*queues.running, *queues.without_logits)
        assert queues.preemptions == {**before, counted: before[counted] + 1}


def test_a_removed_request_is_in_no_queue(requests: list[RequestState]) -> None:
    queues = full_queues(requests)
    for request in requests:
        queues.remove(request)
        assert request not in (*queues.all, *queues.without_logits)
    assert queues.is_background  # without requests, background work may run


def test_requests_are_background_only_if_waiting_and_running_ones_are(requests: list[RequestState]) -> None:
    queues = full_queues(requests)
    assert not queues.is_background
    queues.remove(requests[2])
    assert not queues.is_background  # two others still wait
    for request in requests[:2]:
        queues.remove(request)
    assert queues.is_background
