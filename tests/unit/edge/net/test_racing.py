"""Test a rank with several addresses: their order, the cost of a dead one, and that other connections are closed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from edge.net import racing
from edge.net.racing import race
from tests.support import memory_link
from tests.support.helpers import until
from transport.errors import LinkClosed, LinkTimeout, Refused
from transport.link import Link

HOSTS = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


class Network:
    """Hosts that answer, refuse, or stay silent until the test lets them go on. It notes who was dialled."""

    def __init__(self, **hosts: "Link | Exception | None") -> None:
        self.hosts = dict(zip(HOSTS, hosts.values(), strict=True))
        self.dialled: list[tuple[str, float]] = []
        self.wakes = threading.Event()
        self.late: list[Link] = []

    def dial(self, host: str, timeout_s: float) -> Link:
        self.dialled.append((host, timeout_s))
        result = self.hosts[host]
        if result is None:
            assert self.wakes.wait(60)
            self.late.append(memory_link.pair()[0])
            return self.late[-1]
        if isinstance(result, Exception):
            raise result
        return result


@contextmanager
def network(
    first: "Link | Exception | None", two: "Link | Exception | None", three: "Link | Exception | None"
) -> Iterator[Network]:
    built = Network(first=first, two=two, three=three)
    yield built
    built.wakes.set()


def link() -> Link:
    return memory_link.pair()[0]


def test_the_first_address_that_answers_is_the_only_one_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "STAGGER_S", 3600)  # however slowly this machine starts a thread
    with network(link(), link(), link()) as hosts:
        assert race(HOSTS, hosts.dial, 3600) == (HOSTS[0], hosts.hosts[HOSTS[0]])
        assert hosts.dialled == [(HOSTS[0], 3600)]


def test_an_address_that_refuses_lets_the_next_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: without the delay, which takes ten minutes here."""
    monkeypatch.setattr(racing, "STAGGER_S", 3600)
    with network(Refused("it is mallory"), LinkClosed("nothing listens"), link()) as hosts:
        assert race(HOSTS, hosts.dial, 3600) == (HOSTS[2], hosts.hosts[HOSTS[2]])
        assert [host for host, _ in hosts.dialled] == HOSTS


def test_a_silent_address_keeps_nobody_and_its_late_link_is_closed() -> None:
    with network(None, Refused("it is mallory"), link()) as hosts:
        won = hosts.hosts[HOSTS[2]]
        assert race(HOSTS, hosts.dial, 60) == (HOSTS[2], won)
        assert [host for host, _ in hosts.dialled] == HOSTS
        assert isinstance(won, Link)
        assert won.broken is None
        hosts.wakes.set()
        until(lambda: [late.broken is not None for late in hosts.late] == [True], "the late link is closed")
        assert won.broken is None


def test_later_addresses_have_less_time_but_half_of_it_at_least() -> None:
    with network(None, None, link()) as hosts:
        race(HOSTS, hosts.dial, 60)
        times = [timeout_s for _, timeout_s in hosts.dialled]
        assert times == sorted(times, reverse=True)
        assert times[0] == 60
        assert 30 <= times[2] < 60


def test_no_address_that_answers_is_the_error_of_the_first_and_tells_the_others() -> None:
    errors = Refused("it is mallory"), LinkClosed("nothing listens"), LinkTimeout("no connection")
    with network(*errors) as hosts, pytest.raises(Refused) as refused:
        race(HOSTS, hosts.dial, 60)
    assert str(refused.value) == (
        "it is mallory; nor is it reached at its other addresses (at 10.0.0.2: nothing listens; at 10.0.0.3: no"
        " connection)"
    )


def test_addresses_that_are_silent_for_ever_end_with_the_deadline() -> None:
    with network(None, None, None) as hosts:
        with pytest.raises(
            LinkTimeout, match=r"^10\.0\.0\.1 did not answer within 0\.06 s; .*at 10\.0\.0\.3: no answer"
        ):
            race(HOSTS, hosts.dial, 0.02)
        hosts.wakes.set()
        until(lambda: len(hosts.late) == 3 and all(late.broken for late in hosts.late), "late links are closed")


def test_an_error_that_is_not_of_the_network_is_raised_as_it_is() -> None:
    with (
        network(ValueError("a bug"), Refused("no"), Refused("no")) as hosts,
        pytest.raises(ValueError, match=r"^a bug$"),
    ):
        race(HOSTS, hosts.dial, 60)
