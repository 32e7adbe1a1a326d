"""Test an engine process with a share of a budget: what it requests, waits for, follows and reports."""

import threading

import pytest

from edge.errors import NotEnoughMemory
from edge.weights.elastic.share import MemoryShare, MemoryUse
from edge.weights.elastic.shares import MemoryShares


def test_a_process_reports_what_changes_at_once_and_the_rest_now_and_then() -> None:
    reported, now = list[MemoryUse](), [0.0]
    share = MemoryShare(lambda: now[0])
    share.join(lambda least, most: None, reported.append)
    share.report(6, 1)
    share.begin_pass()
    now[0] = 0.5
    share.report(6, 1)
    share.report(5, 1)
    share.end_pass()
    share.end_pass()
    now[0] = 2.0
    share.report(5, 1)
    assert reported == [MemoryUse(6, 1, 0.0), MemoryUse(5, 1, 0.5), MemoryUse(5, 1, 0.5)]


def test_where_nobody_divides_a_budget_there_is_no_limit() -> None:
    share = MemoryShare()
    assert (share.request(5, 9), share.is_divided) == (9, False)
    assert share.limit > 1 << 60


def test_who_is_asked_for_all_keeps_its_least() -> None:
    """Before it has loaded, too."""
    share = MemoryShare()
    share.ask(0)
    share.request(5, 9)
    assert share.limit == 5
    share.ask(7)
    assert share.limit == 7
    share.ask(0)
    assert share.limit == 5
    share.ask(None)
    assert share.limit > 1 << 60


def test_the_first_share_is_what_comes_and_later_limits_are_followed() -> None:
    """One that is told in parts is waited for; what was said before does not count."""
    share = MemoryShare()

    def claim(least: int, most: int) -> None:
        for number, (n_bytes, coming) in enumerate(((90, 90), (0, 70), (40, 70), (70, 70), (60, 60))):
            share.follow(n_bytes, coming, number, number == 1)

    share.join(claim, lambda use: None)
    assert share.limit == 0
    assert share.request(30, 100) == 60
    assert (share.limit, share.seen) == (60, 4)


def test_a_limit_of_before_is_no_answer() -> None:
    share, claimed, granted = MemoryShare(), threading.Event(), list[int]()
    share.join(lambda least, most: claimed.set(), lambda use: None)
    waiting = threading.Thread(target=lambda: granted.append(share.request(30, 100)))
    waiting.start()
    assert claimed.wait(30)
    share.follow(50, 50, 1, False)
    assert (share.limit, share.seen) == (0, 0)
    share.follow(80, 80, 2, True)
    waiting.join(30)
    assert granted == [80]


def test_a_refusal_says_why_and_the_limit_stays() -> None:
    share = MemoryShare()
    share.join(lambda least, most: share.follow(50, 50, 2, True, "no room"), lambda use: None)
    share.follow(50, 50, 1, False)
    with pytest.raises(NotEnoughMemory, match=r"^no room$"):
        share.request(60, 100)
    assert (share.limit, share.seen) == (50, 2)
    share.join(lambda least, most: share.follow(90, 90, 3, True), lambda use: None)
    assert share.request(60, 100) == 90


def test_refusal_is_told_although_a_limit_follows_before_it_is_read() -> None:
    def answer(least: int, most: int) -> None:
        share.follow(50, 50, 1, True, "no room")
        share.follow(100, 100, 2, False)  # somebody has left meanwhile

    share = MemoryShare()
    share.join(answer, lambda use: None)
    with pytest.raises(NotEnoughMemory, match=r"^no room$"):
        share.request(60, 100)
    share.join(lambda least, most: share.follow(90, 90, 3, True), lambda use: None)
    assert share.request(60, 100) == 90  # the next claim is not refused by it


@pytest.mark.parametrize("there", [0, 40])
def test_others_that_keep_their_memory_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch, there: int) -> None:
    """Memory that is there by then is used, if it is enough."""
    monkeypatch.setattr("edge.weights.elastic.share.WAIT_S", 0.01)
    shares, share = MemoryShares(lambda: 100), MemoryShare()
    silent = shares.join("silent", lambda *limit: None)
    shares.claim(silent, 30, 100 - there, "silent")
    member = shares.join("late", share.follow)
    share.join(lambda least, most: shares.claim(member, least, most, "late"), lambda use: None)
    if there:
        assert share.request(30, 100) == 40
    else:
        with pytest.raises(NotEnoughMemory, match=r"30 B are needed, 0 B are available: .* did not give back the rest"):
            share.request(30, 100)


def test_limit_below_what_is_still_coming_keeps_a_claim_waiting() -> None:
    share, claimed, compared, granted = MemoryShare(), threading.Event(), threading.Event(), list[int]()

    class Coming(int):
        """A number of bytes that notes when the waiting claim compares it."""

        def __gt__(self, other: int) -> bool:
            compared.set()
            return int(self) > other

    share.join(lambda least, most: claimed.set(), lambda use: None)
    waiting = threading.Thread(target=lambda: granted.append(share.request(30, 100)))
    waiting.start()
    assert claimed.wait(30)
    share.follow(40, Coming(70), 1, True)
    assert compared.wait(30), "the claim does not look at what is coming"
    share.follow(69, Coming(70), 2, False)
    assert granted == []
    share.follow(70, 70, 3, False)
    waiting.join(30)
    assert granted == [70]
