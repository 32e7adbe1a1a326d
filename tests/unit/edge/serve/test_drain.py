"""Tests of draining, with a clock of their own."""

import pytest

from edge.errors import EngineGone
from edge.serve.drain import _NOTICE_S, Drain


class Server:
    now, is_used = 100.0, True

    def __init__(self) -> None:
        self.drain = Drain(lambda: self.is_used, lambda: self.now)


def test_nothing_changes_before_it_begins() -> None:
    server = Server()
    server.is_used = False
    assert not server.drain.begun
    assert not server.drain.is_over(0.0)
    server.drain.check_open()


def test_requests_are_accepted_until_proxies_have_noticed() -> None:
    server = Server()
    server.drain.begin()
    server.now += _NOTICE_S * 0.99
    server.drain.check_open()
    server.now = 100.0 + _NOTICE_S
    with pytest.raises(EngineGone, match="send the request to another server"):
        server.drain.check_open()


def test_it_is_over_without_requests_or_after_the_limit() -> None:
    server = Server()
    server.drain.begin()
    assert server.drain.is_over(0.0)
    assert not server.drain.is_over(30.0)
    server.now += 29.9
    assert not server.drain.is_over(30.0)
    server.is_used = False
    assert server.drain.is_over(30.0)
    server.is_used = True
    server.now = 130.0
    assert server.drain.is_over(30.0)
