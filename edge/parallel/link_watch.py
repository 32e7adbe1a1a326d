"""Watch over the links in use: by what tokens take, do they do what was measured, and what is to be done otherwise?

A token takes the computing of the slowest rank of each stage, and communication. What communication should take follows
from latency and bandwidth.

- Links that go another way than the usual one, as idle devices preferred it, give one answer. The next one goes the
  usual way, and the links return only where tokens then take clearly longer.
- Links that go the usual way are compared again where communication takes much more than it should: they may have been
  chosen in a bad moment. A way that is then preferred stays only where tokens prove it.

So no more than one answer is given on the slower way. Times are of the fast end, as a busy processor makes them longer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

from edge.net.prefer import fast_end
from edge.net.relink import LinkState, Order, Relink, Report
from edge.parallel.leader import Leader
from edge.parallel.steps import Op, Step
from partition.plan.plan import Plan
from partition.predict.hysteresis import LINK, clearly_better
from quant.text import number_text
from transport.choice import ALGORITHMS, choose
from transport.collective import Group, Wire

_LEAST_TOKENS = 8  # to judge by
_MOST_TOKENS = 2048
_FITS = 2.0  # times what is expected: a measurement on idle devices is that much better than use
_MESSAGE_S = 100e-6  # beside the wire, in use: Python, and a wake-up on a busy core
_WORSE = 1.5  # than when links were compared last: compare again
_MOST_CHANGES = 100  # that are remembered


def expected_s(plan: Plan, n_embd: int, group: Group, algorithm: str, wire: Wire | None) -> float:
    """Seconds of communication of one token, by the figures that the ranks of `group` agreed on.

    Two sums in each layer of a stage that several ranks share, and a message from each stage to the next, or back.
    """
    n_bytes = 4 * n_embd
    wire_bytes = wire.n_bytes(n_embd) if wire else n_bytes
    total = len(plan.stages) * (group.latency_s + wire_bytes / group.bandwidth + _MESSAGE_S)
    for stage in plan.stages:
        width = len(stage.shards)
        if width > 1:
            costs = choose(n_bytes, wire_bytes, width, group.latency_s, group.bandwidth).seconds
            sum_s = next((costs[name] for name in ALGORITHMS if name == algorithm), min(costs.values()))
            total += 2 * len(stage.layers) * (sum_s + _MESSAGE_S)
    return total


class LinkWatch:
    """Links in use, as rank 0 knows them."""

    def __init__(self, expected_s: float, widths: Sequence[int]) -> None:
        """expected_s: of communication for a token. widths: the ranks of each stage."""
        self.changes: list[str] = []  # what was done and why, one line for people each
        self._widths = tuple(widths)
        self._expected_s = expected_s
        self._limit_s = _FITS * expected_s
        self._seen_s: dict[bool, float] = {}  # communication, by whether all links went the usual way
        self._answers = 0
        self._begin()

    def _begin(self) -> None:
        self._tokens_s: deque[float] = deque(maxlen=_MOST_TOKENS)
        self._own_s: deque[float] = deque(maxlen=_MOST_TOKENS)

    def token(self, seconds: float, compute_s: float) -> None:
        """One token of one request, alone in the pipeline; compute_s: rank 0's part of it."""
        self._tokens_s.append(seconds)
        self._own_s.append(compute_s)

    @property
    def due(self) -> bool:
        """True if an answer since the last check of the links was long enough to judge them by."""
        return len(self._tokens_s) >= _LEAST_TOKENS

    def fits(self, links: Sequence[LinkState]) -> bool:
        """Return whether this rank's own waits show that all is well; nobody needs to be asked then. Begins the next
        answer.

        Others may compute for longer than this rank, so what it waits is the most that communication took.
        """
        wait_s = fast_end(sorted(self._tokens_s)) - fast_end(sorted(self._own_s))
        if self._seen_s or wait_s > self._limit_s or not all(link.usual for link in links):
            return False
        self._answers += 1
        self._begin()
        return True

    def order(self, compute_s: Sequence[float], links: Sequence[LinkState]) -> Order:
        """Return the next order, and begin the next answer. compute_s: of a token on each rank, at the fast end."""
        self._answers += 1
        ranks = iter(compute_s)
        computed_s = sum(max(next(ranks) for _ in range(width)) for width in self._widths)
        seen_s = max(0.0, fast_end(sorted(self._tokens_s)) - computed_s)
        self._begin()
        usual = all(link.usual for link in links)
        self._seen_s[usual] = seen_s
        order = self._order(seen_s, usual)
        if order is not Order.REPORT:
            self._say(order, seen_s, self._seen_s.get(not usual))
        return order

    def _order(self, seen_s: float, usual: bool) -> Order:
        other_s = self._seen_s.get(not usual)
        if not usual:
            return Order.REPORT if other_s is not None and clearly_better(seen_s, other_s, by=LINK) else Order.USUAL
        if other_s is not None and clearly_better(other_s, seen_s, by=LINK):
            return Order.COMPARED
        if seen_s <= self._limit_s:
            return Order.REPORT
        self._limit_s = _WORSE * seen_s
        return Order.COMPARE

    def changed(self, before: Sequence[LinkState], after: Sequence[LinkState], expected_s: float) -> None:
        """Note the result of an order. expected_s: communication time of a token, by the current figures."""
        kinds = {link.ranks: link.kind for link in before}
        moved = [
            f"ranks {link.ranks[0]} and {link.ranks[1]} use {link.kind}, no longer {kinds[link.ranks]} ({link.why})"
            for link in after
            if kinds.get(link.ranks, link.kind) != link.kind
        ]
        self._expected_s = expected_s
        self._limit_s = max(self._limit_s, _FITS * expected_s)
        self.changes[-1] += "; ".join(moved) or "all links stay"
        del self.changes[:-_MOST_CHANGES]

    def _say(self, order: Order, seen_s: float, other_s: float | None) -> None:
        compared = f"{_ms(self._expected_s)} expected" if other_s is None else f"{_ms(other_s)} the other way"
        done = {
            Order.COMPARE: "links were compared again",
            Order.USUAL: "links went back to the usual way",
            Order.COMPARED: "links went back to the way that was preferred",
        }[order]
        took = f"a token's communication took {_ms(seen_s)}, {compared}"
        self.changes.append(f"after answer {self._answers}: {took}; {done}: ")


class RankLinks:
    """Links that rank 0 watches, and has all ranks change where they do not do what was measured of them."""

    def __init__(
        self, leader: Leader, plan: Plan, n_embd: int, relink: Relink | None, links: Sequence[LinkState]
    ) -> None:
        """relink: rank 0's links that may change. links: those of all ranks, as they are."""
        self._leader = leader
        self._relink = relink if relink is not None and relink.able else None
        self._expected_s = partial(expected_s, plan, n_embd, leader.group, leader.algorithm, leader.wire)
        self.states = known([links])  # of all ranks, each once
        self.watch = LinkWatch(self._expected_s(), [len(stage.shards) for stage in plan.stages])
        leader.on_token = self.watch.token

    def between_answers(self) -> None:
        """Compare the links with what was measured of them, and change them where they do worse."""
        watch = self.watch
        if self._relink is not None and self._leader.failed is None and watch.due and not watch.fits(self.states):
            self._leader.guarded(self._compare)

    def _compare(self) -> None:
        reports = self.reports(Order.REPORT)
        before = self.states = known(report.links for report in reports)
        order = self.watch.order([report.compute_s for report in reports], before)
        if order is not Order.REPORT:
            self.states = known(report.links for report in self.reports(order))
            self.watch.changed(before, self.states, self._expected_s())

    def reports(self, order: Order) -> list[Report]:
        """Return the ranks' reports on their links, after the order is carried out."""
        assert self._relink is not None
        leader = self._leader
        leader.send(Step(Op.LINKS, numbers=(order, 0, 0, 0)))
        if order is not Order.REPORT:
            self._relink.again(leader.group, order)
            leader.join()
        own = Report(leader.shard.times.computed_s(), self._relink.states())
        return [own, *leader.reports(Report.from_json)]


def known(links: Iterable[Iterable[LinkState]]) -> tuple[LinkState, ...]:
    """Merge the reports of several ranks on their links, in the order of ranks."""
    return tuple(sorted((link for some in links for link in some), key=lambda link: link.ranks))


def _ms(seconds: float) -> str:
    return f"{number_text(seconds * 1e3)} ms" if math.isfinite(seconds) else "unknown"
