"""Choose the draft length from measured pass times and the acceptance rate. Draft nothing unless it is clearly faster.

A pass of `rows` rows gives 1 to `rows` tokens, in the mean as many as `tokens_a_pass` says. What it costs is measured
in passes of one row, and so is what trials lose: they are paid from an exploration budget, which a part of the tokens
fills. A draft model has to take in text before it can draft. That is no part of the pass: it is paid from there, too.
"""

from __future__ import annotations

from collections import defaultdict, deque

from partition.predict.drafts import ROWS, tokens_a_pass
from partition.predict.hysteresis import DRAFT, clearly_faster

SIZES = ROWS  # of a pass
MOST_ROWS = SIZES[-1]

_KEPT = 8  # times of each size
_BEST_PART = 4  # one in so many of these was the least disturbed: what else the machine does only adds to a pass
_LEAST_PLAIN = 2  # passes of one row before anything else; the faster one counts
_MEMORY = 0.95  # a draft counts so much less with every later one
_PRIOR = 0.5, 1.0  # before there are any: that part of so many drafts was accepted
_EXPLORATION_BUDGET = 0.5  # passes of one row that trials may lose at once
_DEEPEST = -1.0  # what one trial can take, however long it lasted
_FILLS = 0.01  # part of a pass of one row that a token brings: in the long run, trials take no more of the time
_WAIT = 16  # passes between trials while one row is best; doubles
_MOST_WAIT = 256
_WAIT_ONCE = 4  # where a size was tried once: that may have been a bad moment
_HOPED = 0.7  # acceptance that a draft model is expected to reach once it has seen the whole text
_STAKE = 1.5  # passes of one row that the whole text may take where drafts have won nothing yet
_WAIT_ON = 128  # passes until a size is tried again, one row among others, while more rows are best


class RowChoice:
    """Chooses the rows of each pass, and learns from what came of it."""

    def __init__(self, dearest: float = 1.0) -> None:
        """dearest: passes of one row that each row of a pass costs at most; more than 1 where drafting takes time."""
        self.behind_s = 0.0  # seconds that the drafts would need before the next draft, as they were asked last
        self._dearest = dearest
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._right = self._drafts = 0.0  # of late
        self._passes = 0
        self._had: dict[int, int] = {}  # by size: the last pass that had it
        self._budget = _EXPLORATION_BUDGET
        self._won = 0.0  # passes of one row that drafts saved, less what they took
        self._wait = _WAIT

    @property
    def accepted(self) -> float:
        """The acceptance rate of late: the fraction of drafts that were accepted."""
        share, weight = _PRIOR
        return (share * weight + self._right) / (weight + self._drafts)

    @property
    def plain_s(self) -> float:
        """Seconds of a pass of one row; 0 where there was none yet."""
        return self.seconds(1) or 0.0

    def seconds(self, size: int) -> float | None:
        """Seconds of a pass of that size; None where there was none yet."""
        times = sorted(self._seconds[size])
        return times[(len(times) - 1) // _BEST_PART] if times else None

    def best(self, most: int = MOST_ROWS) -> int:
        """The size that gives the most tokens a second, of those that were measured and are no larger than `most`."""
        speeds = {size: self.tokens(size) / self.cost(size) for size in SIZES if size <= most and self.seconds(size)}
        size = max(speeds, key=speeds.__getitem__, default=1)
        return size if size > 1 and clearly_faster(speeds[size], 1.0, by=DRAFT) else 1

    def rows(self, most: int) -> int:
        """The size of the next pass, at most `most` rows: the best one, or now and then another, to see."""
        if len(self._seconds[1]) < _LEAST_PLAIN:
            return 1
        best = self.best(most)
        budget = max(0.0, self._budget - (self._behind if best == 1 else 0.0))
        affordable = [size for size in SIZES if size <= most and size != best and self._loss(size) <= budget]
        if 2 * best in affordable and not self._seconds[2 * best]:
            return 2 * best
        oldest = min(affordable, key=self._last, default=best)
        if best == 1:
            once = any(len(self._seconds[size]) == 1 for size in SIZES[1:])
            due = self._passes - max(map(self._last, SIZES[1:])) >= (_WAIT_ONCE if once else self._wait)
        else:
            due = self._passes - self._last(oldest) >= _WAIT_ON
        return oldest if due else best

    def checked(self, rows: int, used: float, seconds: float, tried: float | None = None) -> None:
        """A pass of so many rows gave `used` tokens in so long. tried: drafts that were looked at; None: up to the
        first that was wrong. Of several requests: each in the mean."""
        self._passes += 1
        size = max(size for size in SIZES if size <= rows)
        self._seconds[size].append(seconds)
        self._had[size] = self._passes
        if rows > 1:
            self._learn(used - 1, min(used, rows - 1) if tried is None else tried)
        plain_s = self.plain_s
        gained = used - min(self._dearest * rows, seconds / plain_s) if rows > 1 and plain_s else 0.0
        if rows > 1:
            self._wait = _WAIT if self.best() > 1 or gained > 0 else min(2 * self._wait, _MOST_WAIT)
        self._won = max(0.0, self._won + gained)
        self._fill(max(min(self._budget, _DEEPEST), self._budget + gained), used)

    def paid(self, seconds: float) -> None:
        """The drafts took so long to take in text. All of it counts: trials wait until it has come in again."""
        if self.plain_s:
            self._budget -= seconds / self.plain_s
            self._won = max(0.0, self._won - seconds / self.plain_s)

    def pays(self, seconds: float) -> bool:
        """Return whether drafts have won as much as so long for taking in text. A small stake does without, where
        drafts that are right as often as hoped would be faster."""
        speeds = [tokens_a_pass(_HOPED, size) / self.cost(size) for size in SIZES[1:] if self.seconds(size)]
        stake = _STAKE if clearly_faster(max(speeds, default=0.0), 1.0, by=DRAFT) else 0.0
        return 0 < seconds <= max(self._won, stake) * self.plain_s

    def learned(self, right: int, drafts: int, used: int) -> None:
        """Learn from a pass among others, whose time says nothing of it alone: so many of its drafts were accepted, and
        it gave `used` tokens."""
        self._passes += 1
        self._learn(right, drafts)
        self._fill(self._budget, used)

    def watched(self, right: bool) -> None:
        """Learn from a pass of one row: whether a draft beside it would have been accepted."""
        self._learn(float(right), 1.0)

    def tokens(self, size: int) -> float:
        """That a pass of this size gives in the mean."""
        return tokens_a_pass(self.accepted, size)

    def cost(self, size: int) -> float:
        """Cost of a pass of this size, in passes of one row: no less than one, and no more than its rows can cost.
        What was measured otherwise was a bad moment. Where none was measured, a smaller one says the most it can be."""
        seconds = self.seconds(size)
        if size == 1 or not self.plain_s:
            return 1.0
        most = self._dearest * size
        return min(most, 2 * self.cost(size // 2) if seconds is None else max(1.0, seconds / self.plain_s))

    @property
    def _behind(self) -> float:
        """`behind_s` in passes of one row."""
        return self.behind_s / self.plain_s if self.plain_s else 0.0

    def _fill(self, budget: float, used: int | float) -> None:
        """Add to the budget for `used` tokens. It holds the price of one trial, or the usual budget."""
        most = max(_EXPLORATION_BUDGET, self._loss(SIZES[1]) + self._behind)
        self._budget = min(most, budget + _FILLS * used)

    def _learn(self, right: float, drafts: float) -> None:
        fading = _MEMORY**drafts
        self._right, self._drafts = fading * self._right + right, fading * self._drafts + drafts

    def _last(self, size: int) -> int:
        """The last pass of this size; 0 if none."""
        return self._had.get(size, 0)

    def _loss(self, size: int) -> float:
        """Expected loss of a pass of this size, in passes of one row. One that was never measured may cost next
        to nothing: it has its chance however few drafts are accepted."""
        accepted = self.accepted if self.seconds(size) else max(self.accepted, _PRIOR[0])
        return self.cost(size) - tokens_a_pass(accepted, size)
