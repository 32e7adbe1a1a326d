"""Test the shares of one budget: no memory is promised twice, each share gets its minimum, and use matters."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from edge.errors import NotEnoughMemory
from edge.weights.elastic.share import MemoryUse
from edge.weights.elastic.shares import IDLE, SETTLED_S, WHOLE, Claim, Member, MemoryShares, divide
from tests.support.thorough import some

GIB = 1 << 30


@st.composite
def claims(draw: st.DrawFn) -> dict[str, Claim]:
    drawn = {}
    for name in "abcdef"[: draw(st.integers(1, 6))]:
        least = draw(st.integers(0, 500))
        drawn[name] = Claim(least, least + draw(st.integers(0, 1500)), draw(st.integers(IDLE, WHOLE)))
    return drawn


def least_of(drawn: Mapping[str, Claim]) -> int:
    return sum(claim.least for claim in drawn.values())


@given(st.integers(0, 5000), claims())
def test_shares_are_within_the_budget_and_each_within_its_claim(budget: int, drawn: dict[str, Claim]) -> None:
    shares = divide(budget, drawn)
    assert shares.keys() == drawn.keys()
    assert sum(shares.values()) <= max(budget, least_of(drawn))
    for name, claim in drawn.items():
        assert claim.least <= shares[name] <= claim.most


@given(st.integers(0, 5000), claims())
def test_nothing_is_left_over_that_somebody_could_use(budget: int, drawn: dict[str, Claim]) -> None:
    shares = divide(budget, drawn)
    if any(shares[name] < claim.most for name, claim in drawn.items()):
        assert sum(shares.values()) > max(budget, least_of(drawn)) - len(drawn)  # less than a byte each


@given(st.integers(0, 5000), claims(), st.integers(0, WHOLE))
def test_who_is_used_more_gets_no_less_and_others_get_no_more(budget: int, drawn: dict[str, Claim], more: int) -> None:
    name = next(iter(drawn))
    claim = drawn[name]
    used = {**drawn, name: Claim(claim.least, claim.most, min(WHOLE, claim.weight + more))}
    before, after = divide(budget, drawn), divide(budget, used)
    assert after[name] >= before[name]
    assert all(after[other] <= before[other] for other in drawn if other != name)


def test_the_rest_is_shared_in_proportion_to_use() -> None:
    assert divide(1000, {"a": Claim(100, 900, 1000), "b": Claim(100, 900, 1000)}) == {"a": 500, "b": 500}
    assert divide(1000, {"a": Claim(100, 900, 300), "b": Claim(100, 900, 100)}) == {"a": 700, "b": 300}
    assert divide(1000, {"a": Claim(100, 250, 300), "b": Claim(100, 900, 100)}) == {"a": 250, "b": 750}
    assert divide(10, {"a": Claim(100, 250, 300)}) == {"a": 100}


class Processes:
    """Processes that share a budget, by a clock of the test. Each does at once as it is words."""

    def __init__(self, budget: int) -> None:
        self.budget, self.now_s = budget, 0.0
        self.limits: dict[str, int] = {}
        self.members: dict[str, Member] = {}
        self.computed_s: dict[str, float] = {}
        self.words = self.shrunk = 0  # changes, and those of them that took memory away
        self.shares = MemoryShares(lambda: self.budget, lambda: self.now_s)

    def come(self, name: str, least: int, most: int) -> int:
        """Join, while all others do as they are told at once."""

        def tell(n_bytes: int, coming: int, number: int, answers: bool) -> None:
            self.shrunk += n_bytes < self.limits.get(name, 0)
            self.words += n_bytes != self.limits.get(name)
            self.limits[name] = n_bytes

        self.members[name], self.computed_s[name] = self.shares.join(name, tell), 0.0
        self.shares.claim(self.members[name], least, most, name)
        self.computes(0)
        return self.limits[name]

    def leave(self, name: str) -> None:
        self.shares.leave(self.members.pop(name))
        del self.limits[name]

    def computes(self, seconds: float, *names: str) -> None:
        """Pass time in which these compute, and all do as they are words."""
        for second in range(round(seconds) + 1):
            self.now_s += second > 0
            for name, member in self.members.items():
                self.computed_s[name] += second > 0 and name in names
                resident = min(self.limits[name], member.most)
                self.shares.report(member, MemoryUse(resident, member.number, self.computed_s[name]))


def test_who_comes_later_gets_what_an_idle_one_gives_back() -> None:
    processes = Processes(1000)
    assert processes.come("a", 100, 900) == 900
    processes.computes(900)
    assert processes.come("b", 100, 900) == 1000 - 100 - 800 * IDLE // (WHOLE + IDLE) - 1
    assert processes.limits["a"] == 100 + 800 * IDLE // (WHOLE + IDLE)
    processes.leave("b")
    assert processes.limits["a"] == 900


def test_memory_follows_use_and_stays_where_it_is_while_nobody_computes() -> None:
    processes = Processes(1000)
    for name in ("a", "b"):
        processes.come(name, 100, 900)
    assert processes.limits == {"a": 500, "b": 500}
    processes.computes(600, "a")
    assert processes.limits["a"] > 800
    before, words = dict(processes.limits), processes.words
    processes.computes(3600)
    assert (processes.limits, processes.words) == (before, words)
    processes.computes(600, "b")
    assert processes.limits["b"] > 800


def test_time_between_a_report_and_the_next_claim_is_no_rest() -> None:
    """A process that loads reports nothing meanwhile."""
    processes = Processes(1000)
    for name in ("a", "b"):
        processes.come(name, 100, 900)
    processes.computes(600, "a")
    before, use = dict(processes.limits), processes.shares.figures()["a"].use
    processes.now_s += 600
    processes.shares.claim(processes.members["a"], 100, 900, "a")
    processes.computes(0)
    assert processes.shares.figures()["a"].use == use
    assert processes.limits["a"] >= before["a"]


@pytest.mark.parametrize("period", [1, 5, 20])
def test_processes_that_take_turns_do_not_swap_their_memory_each_time(period: int) -> None:
    processes = Processes(1000)
    for name in ("a", "b"):
        processes.come(name, 100, 900)
    began, words = processes.now_s, processes.words
    for turn in range(400 // period):
        processes.computes(period, "ab"[turn % 2])
    changes = (processes.words - words) / 2
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
    words: dict[str, list[tuple[int, int, int, bool]]] = {"a": [], "b": []}
    shares = MemoryShares(lambda: 1000, lambda: 0.0)
    a, b = (shares.join(name, lambda *limit, name=name: words[name].append(limit)) for name in "ab")
    shares.claim(a, 100, 900, "a")
    shares.claim(b, 100, 900, "b")
    assert words == {"a": [(900, 900, 1, True), (500, 500, 2, False)], "b": [(100, 500, 1, True)]}
    shares.report(a, MemoryUse(300, 1))  # sent before it knew, while it still grew
    assert words["b"][1:] == []
    shares.report(a, MemoryUse(700, 2))
    assert words["b"][1:] == [(300, 500, 2, False)]
    shares.report(a, MemoryUse(500, 2))
    assert words["b"][2:] == [(500, 500, 3, False)]


def test_a_claim_is_answered_where_nothing_changes() -> None:
    words: list[tuple[int, int, int, bool]] = []
    shares = MemoryShares(lambda: 1000, lambda: 0.0)
    member = shares.join("a", lambda *limit: words.append(limit))
    for _ in range(2):
        shares.claim(member, 100, 100, "a")
    assert words == [(100, 100, 1, True), (100, 100, 2, True)]


def test_a_limit_that_a_process_has_not_seen_yet_counts() -> None:
    """It may be told more and then less, and see the first of these when its report is on the way."""
    shares = MemoryShares(lambda: 1000, lambda: 0.0)
    a, b = (shares.join(name, lambda *limit: None) for name in "ab")
    shares.claim(a, 100, 1000, "a")  # number 1
    shares.report(a, MemoryUse(1000, 1))
    shares.ask(500)  # number 2
    shares.report(a, MemoryUse(500, 2))
    shares.ask(None)  # number 3, of 1000
    shares.ask(700)  # number 4
    shares.claim(b, 300, 300, "b")
    shares.report(a, MemoryUse(500, 2))
    assert b.limit == 0
    shares.report(a, MemoryUse(600, a.number))
    assert b.limit == 300


def test_what_others_need_is_refused_with_need_and_have() -> None:
    processes = Processes(3 * GIB)
    processes.come("a", 2 * GIB, 4 * GIB)
    late = processes.shares.join("b", lambda *limit: None)
    with pytest.raises(NotEnoughMemory) as refused:
        processes.shares.claim(late, 2 * GIB, 3 * GIB, "the model b")
    assert str(refused.value) == (
        "the model b needs at least 2.00 GiB, and of 3.00 GiB that are shared 1.00 GiB are available: other loaded"
        " parts need 2.00 GiB"
    )
    assert processes.limits == {"a": 3 * GIB}
    processes.shares.leave(late)
    assert processes.come("b", GIB, 3 * GIB) == GIB


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
    processes.computes(0)
    assert sum(processes.limits.values()) in (999, 1000)


def test_what_cannot_change_counts_with_what_it_holds() -> None:
    processes = Processes(1000)
    processes.come("a", 100, 900)
    assert processes.come("b", 400, 400) == 400
    processes.shares.claim(processes.members["b"], 200, 200, "b")  # it says what it took in the end
    processes.computes(SETTLED_S + 1, "a")
    assert (processes.limits["a"], processes.limits["b"]) == (800, 200)
    processes.shares.fix(processes.members["b"], 50)
    assert processes.limits["a"] == 900
    fixed = MemoryShares(lambda: 1000, lambda: 0.0)
    fixed.claim(fixed.join("c", lambda *limit: None), 10, 10, "c")
    assert fixed.figures()["c"].use == 0  # it never says how much it computes
    assert processes.shares.figures()["b"].resident == 50


def test_a_budget_that_shrinks_is_seen() -> None:
    processes = Processes(1000)
    for name in ("a", "b"):
        processes.come(name, 100, 900)
    processes.budget = 600
    processes.computes(SETTLED_S + 1)
    assert sum(processes.limits.values()) in (599, 600)


def test_who_has_left_gets_nothing() -> None:
    processes = Processes(1000)
    processes.come("a", 100, 900)
    processes.come("b", 100, 900)
    gone = processes.members["b"]
    processes.leave("b")
    words = processes.words
    processes.shares.claim(gone, 100, 900, "b")
    processes.shares.report(gone, MemoryUse(900, gone.number))
    processes.shares.fix(gone, 900)
    processes.shares.leave(gone)
    assert (processes.words, processes.limits) == (words, {"a": 900})
    assert processes.shares.figures().keys() == {"a"}


@dataclass
class Process:
    """A process that reads what it is told, gives memory back, takes some and reports, each when the test lets it."""

    member: Member
    words: deque[tuple[int, int, int, bool]]
    limit: int = 0  # that it has read
    seen: int = 0
    most: int = 0
    has: int = 0
    reports: deque[MemoryUse] = field(default_factory=deque)  # on their way


NUMBERS = st.integers(0, 4)  # of processes


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: no more is held than there is, and who waits gets what it needs."""

    budget = 2000

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.shares = MemoryShares(lambda: self.budget, lambda: self.now_s)
        self.processes: list[Process] = []

    @rule()
    def join(self) -> None:
        if len(self.processes) < 5:
            words: deque[tuple[int, int, int, bool]] = deque()
            self.processes.append(Process(self.shares.join("p", lambda *limit: words.append(limit)), words))

    @precondition(lambda self: self.processes)
    @rule(number=NUMBERS, least=st.integers(0, 900), more=st.integers(0, 1500))
    def claim(self, number: int, least: int, more: int) -> None:
        process = self.processes[number % len(self.processes)]
        others = sum(other.member.least for other in self.processes if other is not process)
        while process.reports:  # they come in the order in which they were sent
            self.shares.report(process.member, process.reports.popleft())
        process.has = process.limit = min(process.has, least + more)  # until the answer comes
        process.words.clear()
        try:
            self.shares.claim(process.member, least, least + more, "p")
            process.most = least + more
        except NotEnoughMemory:
            assert least + others > self.budget
            process.words.append((*process.member.sent, process.member.number, True))

    @precondition(lambda self: self.processes)
    @rule(number=NUMBERS, what=st.sampled_from(("read", "give", "take", "report", "report arrives", "leave")))
    def act(self, number: int, what: str) -> None:
        process = self.processes[number % len(self.processes)]
        if what == "read" and process.words:
            process.limit, _, process.seen, _ = process.words.popleft()
        elif what == "give":
            process.has = min(process.has, process.limit)
        elif what == "take":
            process.has = max(process.has, min(process.limit, process.most))
        elif what == "report":
            process.reports.append(
                MemoryUse(max(process.has, min(process.limit, process.most)), process.seen, self.now_s)
            )
        elif what == "report arrives" and process.reports:
            self.shares.report(process.member, process.reports.popleft())
        elif what == "leave":
            self.processes.remove(process)
            self.shares.leave(process.member)

    @rule(n_bytes=st.none() | st.integers(0, 2500))
    def ask(self, n_bytes: int | None) -> None:
        self.shares.ask(n_bytes)

    @rule(seconds=st.floats(0, 60))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def no_more_is_held_or_promised_than_there_is(self) -> None:
        assert sum(max(process.has, min(process.limit, process.most)) for process in self.processes) <= self.budget
        assert sum(process.member.reserved for process in self.processes) <= self.budget
        assert set(self.shares._members) == {process.member for process in self.processes}

    def teardown(self) -> None:
        """Let all do as they are told: nobody waits for ever."""
        for _ in range(3):
            for process in self.processes:
                while process.words:
                    process.limit, _, process.seen, _ = process.words.popleft()
                process.has = min(process.limit, process.most)
                process.reports.clear()
                self.shares.report(process.member, MemoryUse(process.has, process.seen))
        for process in self.processes:
            assert process.limit == process.member.share >= process.member.least


def test_in_any_order_nothing_is_promised_twice_and_nobody_waits_for_ever() -> None:
    bounds = settings(max_examples=some(200, 3000), stateful_step_count=30, deadline=None)
    run_state_machine_as_test(AnyOrder, settings=bounds)


def test_processes_with_one_name_count_together() -> None:
    """Replicas of a model have its name."""
    shares = MemoryShares(lambda: 1000, lambda: 0.0)
    members = [shares.join(name, lambda *_: None) for name in ("a", "a", "b")]
    for member, n_bytes in zip(members, (100, 200, 50), strict=True):
        shares.claim(member, n_bytes, n_bytes, member.name)
    assert {name: (own.least, own.resident) for name, own in shares.figures().items()} == {
        "a": (300, 300),
        "b": (50, 50),
    }
    shares.leave(members[0])
    assert shares.figures()["a"].least == 200
