"""Shares of one budget: nothing is promised twice, nobody gets less than it needs, and use counts."""

import threading
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.elastic.share import MemoryShare, MemoryUse
from edge.elastic.shares import IDLE, SETTLED_S, WHOLE, Claim, MemoryShares, divide
from edge.errors import NotEnoughMemory
from tests.support.thorough import some

GIB = 1 << 30


@st.composite
def claims(draw: st.DrawFn) -> dict[str, Claim]:
    found = {}
    for name in "abcdef"[: draw(st.integers(1, 6))]:
        least = draw(st.integers(0, 500))
        found[name] = Claim(least, least + draw(st.integers(0, 1500)), draw(st.integers(IDLE, WHOLE)))
    return found


def least_of(found: Mapping[str, Claim]) -> int:
    return sum(claim.least for claim in found.values())


@given(st.integers(0, 5000), claims())
def test_shares_are_within_the_budget_and_each_within_its_claim(budget: int, found: dict[str, Claim]) -> None:
    shares = divide(budget, found)
    assert shares.keys() == found.keys()
    assert sum(shares.values()) <= max(budget, least_of(found))
    for name, claim in found.items():
        assert claim.least <= shares[name] <= claim.most


@given(st.integers(0, 5000), claims())
def test_nothing_is_left_over_that_somebody_could_use(budget: int, found: dict[str, Claim]) -> None:
    shares = divide(budget, found)
    if any(shares[name] < claim.most for name, claim in found.items()):
        assert sum(shares.values()) > max(budget, least_of(found)) - len(found)  # less than a byte each


@given(st.integers(0, 5000), claims(), st.integers(0, WHOLE))
def test_who_is_used_more_gets_no_less_and_others_get_no_more(budget: int, found: dict[str, Claim], more: int) -> None:
    name = next(iter(found))
    claim = found[name]
    used = {**found, name: Claim(claim.least, claim.most, min(WHOLE, claim.weight + more))}
    before, after = divide(budget, found), divide(budget, used)
    assert after[name] >= before[name]
    assert all(after[other] <= before[other] for other in found if other != name)


def test_the_rest_is_shared_in_proportion_to_use() -> None:
    assert divide(1000, {"a": Claim(100, 900, 1000), "b": Claim(100, 900, 1000)}) == {"a": 500, "b": 500}
    assert divide(1000, {"a": Claim(100, 900, 300), "b": Claim(100, 900, 100)}) == {"a": 700, "b": 300}
    assert divide(1000, {"a": Claim(100, 250, 300), "b": Claim(100, 900, 100)}) == {"a": 250, "b": 750}
    assert divide(10, {"a": Claim(100, 250, 300)}) == {"a": 100}


class Processes:
    """Processes that share a budget, by a clock of the test. Each does as it is told when the test lets it."""

    def __init__(self, budget: int) -> None:
        self.budget, self.now_s = budget, 0.0
        self.limits: dict[str, int] = {}
        self.held: dict[str, int] = {}
        self.computed_s: dict[str, float] = {}
        self.claims: dict[str, tuple[int, int]] = {}
        self.told = self.shrunk = 0  # words, and those of them that took memory away
        self.shares = MemoryShares(lambda: self.budget, self._tell, lambda: self.now_s)

    def _tell(self, name: str, n_bytes: int) -> None:
        self.shrunk += n_bytes < self.limits.get(name, 0)
        self.limits[name] = n_bytes
        self.told += 1

    def come(self, name: str, least: int, most: int) -> int:
        """Join, while all others do as they are told at once."""
        self.shares.join(name, least, most, name)
        for other in self.limits:
            self.follow(other)
        granted = self.shares.grant(name)
        self.limits[name] = self.held[name] = granted
        self.claims[name], self.computed_s[name] = (least, most), 0.0
        self.report(name)
        return granted

    def report(self, name: str, limit: int | None = None) -> None:
        use = MemoryUse(
            *self.claims[name], self.held[name], self.limits[name] if limit is None else limit, self.computed_s[name]
        )
        self.shares.report(name, use)

    def follow(self, name: str) -> None:
        """Hold what it may, and say so."""
        self.held[name] = min(self.limits[name], self.claims[name][1])
        self.report(name)

    def computes(self, seconds: float, *names: str) -> None:
        """Pass time in which these compute, and all do as they are told."""
        for _ in range(round(seconds)):
            self.now_s += 1
            for name in list(self.limits):
                self.computed_s[name] += name in names
                self.follow(name)
                assert sum(self.held.values()) <= self.budget


def test_who_comes_later_gets_what_an_idle_one_gives_back() -> None:
    processes = Processes(1000)
    assert processes.come("a", 100, 900) == 900
    processes.computes(900)
    assert processes.come("b", 100, 900) == 1000 - 100 - 800 * IDLE // (WHOLE + IDLE) - 1
    assert processes.limits["a"] == 100 + 800 * IDLE // (WHOLE + IDLE)
    processes.shares.leave("b")
    assert processes.limits["a"] == 900


def test_memory_follows_use_and_stays_where_it_is_while_nobody_computes() -> None:
    processes = Processes(1000)
    for name in ("a", "b"):
        processes.come(name, 100, 900)
    assert processes.limits == {"a": 500, "b": 500}
    processes.computes(600, "a")
    assert processes.limits["a"] > 800
    before, told = dict(processes.limits), processes.told
    processes.computes(3600)
    assert (processes.limits, processes.told) == (before, told)
    processes.computes(600, "b")
    assert processes.limits["b"] > 800


@pytest.mark.parametrize("period", [1, 5, 20])
def test_processes_that_take_turns_do_not_swap_their_memory_each_time(period: int) -> None:
    processes = Processes(1000)
    for name in ("a", "b"):
        processes.come(name, 100, 900)
    began, told = processes.now_s, processes.told
    for turn in range(400 // period):
        processes.computes(period, "ab"[turn % 2])
    changes = (processes.told - told) / 2
    assert changes <= min(4, (processes.now_s - began) / SETTLED_S)


def test_memory_changes_hands_no_more_often_than_it_settles() -> None:
    processes = Processes(1000)
    for name in ("a", "b"):
        processes.come(name, 100, 900)
    processes.computes(900, "a")
    shrunk = processes.shrunk
    processes.computes(SETTLED_S - 1, "b")
    processes.computes(2 * SETTLED_S, "b", "a")
    assert 0 < processes.shrunk - shrunk <= 3


def test_nothing_is_promised_before_it_was_given_back() -> None:
    processes = Processes(1000)
    processes.come("a", 100, 900)
    granted = []
    processes.shares.join("b", 100, 900, "b")
    waiting = threading.Thread(target=lambda: granted.append(processes.shares.grant("b")))
    waiting.start()
    assert processes.limits["a"] == 500
    processes.held["a"] = 300
    processes.report("a", limit=900)  # sent before it knew, while it still grew
    assert processes.shares.figures()["b"].limit == 100
    processes.held["a"] = 700
    processes.report("a")
    assert processes.shares.figures()["b"].limit == 300
    assert not granted
    processes.follow("a")
    waiting.join()
    assert granted == [500]


def test_what_others_need_is_refused_with_need_and_have() -> None:
    processes = Processes(3 * GIB)
    processes.come("a", 2 * GIB, 4 * GIB)
    with pytest.raises(NotEnoughMemory) as refused:
        processes.shares.join("b", 2 * GIB, 3 * GIB, "the model b")
    assert str(refused.value) == (
        "the model b needs at least 2.00 GiB, and of 3.00 GiB that are shared 1.00 GiB can be had: what else is loaded"
        " needs 2.00 GiB"
    )
    assert processes.limits == {"a": 3 * GIB}
    assert processes.come("b", GIB, 3 * GIB) == GIB


def test_others_that_keep_their_memory_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.elastic.shares._WAIT_S", 0.01)
    processes = Processes(3 * GIB)
    processes.come("a", GIB, 4 * GIB)
    processes.shares.join("b", GIB, 3 * GIB, "b")
    with pytest.raises(NotEnoughMemory, match=r"1.00 GiB are needed, 0 B are there: .* did not give back the rest"):
        processes.shares.grant("b")


def test_memory_that_is_asked_for_is_given_back_and_had_again() -> None:
    processes = Processes(1000)
    for name in ("a", "b"):
        processes.come(name, 100, 900)
    processes.shares.ask(0)
    assert processes.limits == {"a": 100, "b": 100}
    processes.computes(120, "a")
    assert processes.limits == {"a": 100, "b": 100}
    processes.shares.ask(600)
    assert sum(processes.limits.values()) in (599, 600)
    processes.shares.ask(None)
    assert sum(processes.limits.values()) in (999, 1000)


def test_what_cannot_change_counts_with_what_it_holds() -> None:
    processes = Processes(1000)
    processes.come("a", 100, 900)
    processes.come("b", 0, 1000)
    processes.claims["b"], processes.held["b"] = (200, 200), 200  # it says what it took in the end
    processes.report("b")
    assert processes.shares.figures()["b"].limit == 200
    processes.computes(SETTLED_S + 1, "a")
    assert processes.limits["a"] == 800
    assert processes.shares.room("c") == 700
    processes.shares.fix("b", 50)
    assert processes.limits["a"] == 900


@settings(max_examples=some(100, 1000), deadline=None)
@given(st.data())
def test_in_any_order_of_events_no_more_is_held_than_there_is(data: st.DataObject) -> None:
    """Processes hold what they were told last that they have seen, and may be slow to give back."""
    processes = Processes(2000)
    seen: dict[str, int] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        processes.now_s += data.draw(st.integers(0, 40))
        names = sorted(processes.limits)
        what = data.draw(st.sampled_from(("come", "see", "give", "take", "leave") if names else ("come",)))
        if what == "come" and len(names) < 4:
            name, least = f"p{processes.told}-{len(names)}", data.draw(st.integers(0, 600))
            try:
                processes.come(name, least, least + data.draw(st.integers(0, 1500)))
            except NotEnoughMemory:
                assert least > processes.shares.room(name)
            seen = dict(processes.limits)  # `come` lets all follow
        elif what != "come":
            name = data.draw(st.sampled_from(names))
            if what == "see":  # a word arrives; memory is given back later
                seen[name] = processes.limits[name]
                processes.report(name, seen[name])
            elif what == "give":
                processes.held[name] = min(processes.held[name], seen[name])
                processes.report(name, seen[name])
            elif what == "take":
                processes.held[name] = min(max(processes.held[name], seen[name]), max(processes.claims[name]))
                processes.report(name, seen[name])
            else:
                processes.shares.leave(name)
                for values in (processes.limits, processes.held, processes.claims, processes.computed_s, seen):
                    values.pop(name, None)
            processes.computed_s |= {other: processes.now_s for other in processes.computed_s if other != name}
        assert sum(processes.held.values()) <= processes.budget
        for name, share in processes.shares.figures().items():
            assert share.limit >= min(share.least, seen.get(name, 0))


def test_a_process_reports_what_changes_at_once_and_the_rest_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    share, told, now = MemoryShare(), [], [0.0]
    monkeypatch.setattr("edge.elastic.share.time.monotonic", lambda: now[0])
    assert share.request(5, 9) == 9  # nobody divides a budget
    share.join(lambda use: use.least + 1, told.append)
    share.limit = 7  # set by who reads the messages, maybe after the first share was sent
    assert (share.request(5, 9), share.limit) == (6, 7)
    for computed_s in (0.0, 0.1):
        share.report(MemoryUse(5, 9, 6, 6, computed_s))
    share.report(MemoryUse(5, 9, 5, 6, 0.2))
    now[0] = 1.5
    share.report(MemoryUse(5, 9, 5, 6, 0.3))
    assert [use.computed_s for use in told] == [0.0, 0.2, 0.3]
    for _ in range(2):  # who divides may have been asked anew in between, so it is said again
        share.fix(4)
    assert told[-2:] == [MemoryUse(4, 4, 4, 7)] * 2


def test_who_has_left_does_not_come_back_and_is_sent_nothing() -> None:
    processes, sent = Processes(1000), list[int]()
    processes.come("a", 100, 900)
    processes.shares.join("b", 100, 900, "b")
    processes.shares.leave("b")
    processes.shares.join("b", 100, 900, "b", again=True)
    assert processes.shares.grant("b", sent.append) == 0
    assert not sent
    assert processes.shares.figures().keys() == {"a"}


@pytest.mark.parametrize("comes_again", [False, True])
def test_a_wait_ends_where_the_one_that_waits_has_left_or_asks_again(comes_again: bool) -> None:
    processes, sent = Processes(1000), list[int]()
    processes.come("a", 100, 1000)
    processes.shares.join("b", 500, 500, "b")
    waiting = threading.Thread(target=processes.shares.grant, args=("b", sent.append))
    waiting.start()
    if comes_again:
        processes.shares.join("b", 400, 400, "b")
    processes.shares.leave("b")
    waiting.join(30)
    assert not waiting.is_alive()
    assert not sent


def test_the_first_share_is_sent_before_any_later_limit() -> None:
    sent: list[tuple[str, int]] = []
    shares = MemoryShares(lambda: 1000, lambda name, n_bytes: sent.append((name, n_bytes)), lambda: 0.0)
    shares.join("a", 100, 900, "a")
    shares.ask(500)
    assert not sent
    shares.grant("a", lambda n_bytes: sent.append(("first", n_bytes)))
    shares.ask(400)
    assert sent == [("first", 500), ("a", 400)]
