"""Choose the draft length: by what passes cost, which is a property of machine and model, and by the acceptance rate,
which is a property of the text. Draft nothing unless it is clearly faster.

A pass of `rows` rows gives 1 to `rows` tokens, in the mean as many as `tokens_a_pass` says. Its cost is counted in
passes of one row, with the drafting: each time in those of just before, so that what slows all passes down, or those of
one row alone for a while, changes no cost. Once costs are known, acceptance alone decides, and each draft tells of it.
What is not known is tried: costs not measured yet, and drafts where few were accepted. A trial is made where it could
pay, and where its price is in the exploration budget. Everything that drafts lose is paid from there, the text that a
draft model has to take in, too; a part of each token fills it.

A size that paid is not left for a slow moment: when it seems to cost too much, all is measured anew, it and one row.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection

from partition.predict.drafts import MODEL_ACCEPTANCE, ROWS, tokens_a_pass
from partition.predict.hysteresis import DRAFT, DRAFT_STAYS, clearly_faster, clearly_off

SIZES = ROWS  # of a pass
MOST_ROWS = SIZES[-1]

_KEPT = 8  # times of one row, and costs of each size
_LOW_PART = 3  # of them the last one in the lowest such part counts: what else the machine does only adds to a pass
_DEARER = 1.25  # times as dear at once: rather a bad moment than a property of the machine
_LEAST_PLAIN = 2  # passes of one row before anything else; the faster one counts
_MEMORY = 0.95  # a draft counts so much less with every later one
_PRIOR_DRAFTS = 2.0  # that the acceptance expected of a source counts as much as
_HOPED = 0.9  # acceptance that drafts may reach in another text
_BUDGET = 0.75  # passes of one row that drafts may lose at once
_FLOOR = -1.5  # below which no pass takes it: drafts that were in use may pay again before more has come in
_FILLS = 0.01  # of a pass of one row that a token brings: in the long run drafts lose no more of the time
_LEAST_LOSS = 0.25  # of a draft that gained nothing: trials that cost next to nothing are rare, too
_STAKE = 1.5  # passes of one row that the whole text may take where drafts have won nothing yet
_AGAIN = 4  # passes until a size that was measured once is tried again: that may have been a bad moment
_OLD = 512  # passes until what a size costs is taken for unknown
_PLAIN_OLD = 8  # passes, for each time of one row that is known, until one is made while more rows are best


class RowChoice:
    """Chooses the rows of each pass, and learns from what came of it."""

    def __init__(self, acceptance: float = MODEL_ACCEPTANCE, *, is_watched: bool = False) -> None:
        """acceptance: as expected of drafts before any were verified. is_watched: `watched` tells it without trials."""
        self.behind_s = 0.0  # seconds that the drafts would need before the next draft, as they were asked last
        self._expected, self._is_watched = acceptance, is_watched
        self._plain: deque[float] = deque(maxlen=_KEPT)  # seconds of passes of one row
        self._costs: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))  # of larger sizes, as `cost`
        self._right, self._drafts = acceptance * _PRIOR_DRAFTS, _PRIOR_DRAFTS  # of late
        self._passes = 0
        self._last: dict[int, int] = {}  # by size: the last pass that had it
        self._budget = _BUDGET
        self._is_on = False  # more rows than one are best: they stay while they are no slower
        self._won = 0.0  # passes of one row that drafts saved, less what they took

    @property
    def accepted(self) -> float:
        """The acceptance rate of late: the mean of a Beta distribution, whose prior fades as all that is seen does."""
        return self._right / self._drafts

    @property
    def hoped(self) -> float:
        """The acceptance rate that trials may find."""
        return self.accepted if self._is_watched else max(self.accepted, _HOPED)

    def affords(self, loss: float) -> bool:
        """Return whether a trial may lose so many passes of one row."""
        return loss <= self._budget

    @property
    def plain_s(self) -> float:
        """Seconds of a pass of one row; 0 where there was none yet."""
        return _undisturbed(self._plain) if self._plain else 0.0

    @property
    def knows_plain(self) -> bool:
        """True once passes of one row were measured."""
        return len(self._plain) >= _LEAST_PLAIN

    def measured_sizes(self, most: int = MOST_ROWS) -> list[int]:
        """Return the draft sizes (rows of a pass) up to `most` whose cost was measured."""
        return [size for size in SIZES if size <= most and (self._plain if size == 1 else self._costs[size])]

    def best(self, most: int = MOST_ROWS) -> int:
        """The size that gives the most tokens a second, of those that were measured and are no larger than `most`."""
        size = max(self.measured_sizes(most), key=self.speed, default=1)
        return size if clearly_faster(self.speed(size), 1.0, by=DRAFT_STAYS if self._is_on else DRAFT) else 1

    def rows(self, most: int) -> int:
        """The size of the next pass, at most `most` rows: the best one, or one that may be better and can be tried."""
        best = self.best(most)
        self._is_on = best > 1
        is_old = self._age(1) >= _PLAIN_OLD * len(self._plain)
        if not self.knows_plain or (best > 1 and is_old):
            return 1
        hoped = self.accepted if best > 1 else self.hoped
        trials = [
            size
            for size in SIZES[1:]
            if size <= most
            and clearly_faster(tokens_a_pass(hoped, size) / self._least_cost(size), self.speed(best), by=DRAFT)
            and self.affords(self._price(size, best))
        ]
        return min(trials, key=lambda size: self._price(size, best), default=best)

    def measured(self, size: int, seconds: float) -> None:
        """A pass of that size took so long, with the drafting. Where it paid, and seems to do so no more, or is much
        dearer, all begins anew."""
        self._last[size] = self._passes
        if size == 1:
            self._plain.append(seconds)
            return
        costs, before, paid = self._costs[size], self.cost(size), self.best() == size
        if self.plain_s:
            costs.append(seconds / self.plain_s)
        if paid and len(costs) == _KEPT and (self.best() == 1 or clearly_off(self.cost(size), before, by=_DEARER)):
            costs.clear()
            self.forget_plain()
            self._budget = max(self._budget, _BUDGET)

    def forget_plain(self) -> None:
        """Let passes of one row be measured anew, before anything else."""
        self._plain.clear()

    def checked(self, rows: int, used: float, seconds: float, tried: float | None = None) -> None:
        """A pass of so many rows gave `used` tokens in so long. tried: drafts that were looked at; None: up to the
        first that was wrong. Of several requests: each in the mean."""
        self._passes += 1
        size = max(size for size in SIZES if size <= rows)
        before = self.cost(size)
        self.measured(size, seconds)
        if rows > 1:
            self._learn(used - 1, min(used, rows - 1) if tried is None else tried)
        self._charge(used, self.cost(size) if self.plain_s else before, rows > 1)

    def learned(self, right: int, drafts: int, used: int, seconds: float) -> None:
        """Learn from a pass among others, whose time says nothing of a size: so many of its drafts were accepted, and
        it gave `used` tokens in so long."""
        self._passes += 1
        self._learn(right, drafts)
        self._charge(used, seconds / self.plain_s if self.plain_s else used, drafts > 0)

    def paid(self, seconds: float) -> None:
        """The drafts took so long to take in text. All of it counts: trials wait until it has come in again."""
        if self.plain_s:
            self._budget -= seconds / self.plain_s
            self._won = max(0.0, self._won - seconds / self.plain_s)

    def pays(self, seconds: float) -> bool:
        """Return whether drafts have won as much as so long for taking in text. A small stake does without, where
        drafts that are right as often as expected would be faster."""
        speeds = [tokens_a_pass(self._expected, size) / self.cost(size) for size in self.measured_sizes()]
        stake = _STAKE if clearly_faster(max(speeds, default=0.0), 1.0, by=DRAFT) else 0.0
        return 0 < seconds <= max(self._won, stake) * self.plain_s

    def watched(self, right: bool) -> None:
        """Learn from a pass of one row: whether a draft beside it would have been accepted."""
        self._learn(float(right), 1.0)

    def speed(self, size: int) -> float:
        """Tokens in the time of a pass of one row."""
        return tokens_a_pass(self.accepted, size) / self.cost(size)

    def cost(self, size: int) -> float:
        """Cost of a pass of this size, in passes of one row: no less than one. Where it was not measured twice, no more
        than two passes of half as many rows: what was measured otherwise was a bad moment."""
        if size == 1:
            return 1.0
        costs, most = self._costs[size], 2 * self.cost(size // 2)
        if not costs:
            return most
        cost = max(1.0, _undisturbed(costs))
        return cost if len(costs) > 1 else min(cost, most)

    def _least_cost(self, size: int) -> float:
        """The same, or where it has to be measured again, the least that it can be."""
        n = len(self._costs[size])
        is_known = n > 0 and self._age(size) < (_AGAIN if n == 1 else _OLD)
        return self.cost(size) if is_known else self.cost(size // 2)

    def _age(self, size: int) -> int:
        """Passes since the last one of this size."""
        return self._passes - self._last.get(size, 0)

    def _price(self, size: int, best: int) -> float:
        """Loss that a trial may have, in passes of one row: where drafts that nobody watched are right a standard
        deviation less often than they seem to be. Where nothing is drafted, with the text to be taken in before."""
        accepted = self.accepted
        deviation = 0.0 if self._is_watched else (accepted * (1 - accepted) / (1 + self._drafts)) ** 0.5
        behind = self.behind_s / self.plain_s if best == 1 and self.plain_s else 0.0
        return self.cost(size) - tokens_a_pass(max(0.0, accepted - deviation), size) + behind

    def _learn(self, right: float, drafts: float) -> None:
        fading = _MEMORY**drafts
        self._right, self._drafts = fading * self._right + right, fading * self._drafts + drafts

    def _charge(self, used: float, cost: float, drafted: bool) -> None:
        """A pass gave `used` tokens at this cost. The budget has room for what it began with, or for the price of a
        trial."""
        gained = used - cost
        self._won = max(0.0, self._won + gained)
        gained = min(gained, -_LEAST_LOSS) if drafted and used <= 1 and gained < _LEAST_LOSS else gained
        most = max(_BUDGET, self._price(SIZES[1], 1))
        self._budget = min(most, max(min(self._budget, _FLOOR), self._budget + gained) + _FILLS * used)


def _undisturbed(times: Collection[float]) -> float:
    """Return the time that counts: the lowest of many may be luck, and the mean has other programs in it."""
    return sorted(times)[len(times) // _LOW_PART]
