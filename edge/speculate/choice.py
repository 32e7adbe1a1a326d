"""Choose the draft length from the cost of passes, which depends on machine and model, and from the acceptance rate,
which depends on the text. Draft nothing unless drafting is clearly faster.

A pass of `rows` rows gives 1 to `rows` tokens, on average `tokens_a_pass`. Its cost, including drafting, is counted in
passes of one row. Each time is divided by recent times of one row, so that a slower machine changes no cost. Once costs
are known, only acceptance decides, and each draft updates it.

Trials measure unknown values: costs that were not measured yet, and drafts after a phase of low acceptance. A trial is
made if it could pay and if the exploration budget covers its price. The budget pays for everything that drafts lose,
including the time in which a draft model prefills text. Each generated token refills the budget a little.

A size that paid is not dropped for a slow moment. If it seems to cost too much, its cost and the time of one row are
measured anew.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection

from partition.predict.drafts import MODEL_ACCEPTANCE, ROWS, tokens_a_pass
from partition.predict.hysteresis import DRAFT, DRAFT_STAYS, clearly_faster, clearly_off

SIZES = ROWS  # numbers of rows in a pass
MOST_ROWS = SIZES[-1]

_KEPT = 8  # number of recent samples: times of one row, and costs of each size
_LOW_PART = 3  # the upper end of the lowest such part of the samples counts, because disturbances only add to a time
_DEARER = 1.25  # a sudden cost increase by this factor is more likely a slow moment than a property of the machine
_LEAST_PLAIN = 2  # passes of one row before anything else; the faster one counts
_MEMORY = 0.95  # weight of a draft, relative to the next one
_PRIOR_DRAFTS = 2.0  # weight of a source's expected acceptance, in drafts
_HOPED = 0.9  # acceptance rate that drafts may reach in another text
_BUDGET = 0.75  # initial exploration budget, in passes of one row
_FLOOR = -1.5  # lower bound of the budget after a pass: drafts may pay again before the budget is refilled
_FILLS = 0.01  # refill per token, in passes of one row: in the long run drafts lose at most this part of the time
_LEAST_LOSS = 0.25  # minimum charge for a draft that gained nothing, so that even cheap trials are rare
_STAKE = 1.5  # passes of one row that prefilling the whole text may take before drafts have won anything
_AGAIN = 4  # passes until a size that was measured once is tried again, because that sample may be bad
_OLD = 512  # passes until the cost of a size counts as unknown
_PLAIN_OLD = 8  # passes, for each known time of one row, until one row is measured again while more rows are best


class RowChoice:
    """Chooses the number of rows of each pass and learns from the results."""

    def __init__(self, acceptance: float = MODEL_ACCEPTANCE, *, is_watched: bool = False) -> None:
        """acceptance: expected acceptance rate before any draft was verified.
        is_watched: `watched` reports acceptance without trials.
        """
        self.behind_s = 0.0  # seconds of text that the drafter would have to prefill before the next draft
        self._expected, self._is_watched = acceptance, is_watched
        self._plain: deque[float] = deque(maxlen=_KEPT)  # seconds of passes of one row
        # by larger size: costs as in `cost`
        self._costs: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        # weighted recent counts of accepted and of all drafts
        self._right, self._drafts = acceptance * _PRIOR_DRAFTS, _PRIOR_DRAFTS
        self._passes = 0
        self._last: dict[int, int] = {}  # by size: number of its last pass
        self._budget = _BUDGET
        self._is_on = False  # True: more rows than one are best, and stay so while they are not slower
        self._won = 0.0  # passes of one row that drafts saved, minus their cost

    @property
    def accepted(self) -> float:
        """Recent acceptance rate: mean of a Beta distribution whose prior and samples fade with time."""
        return self._right / self._drafts

    @property
    def hoped(self) -> float:
        """Acceptance rate that trials may find."""
        return self.accepted if self._is_watched else max(self.accepted, _HOPED)

    def affords(self, loss: float) -> bool:
        """Return whether a trial may lose `loss` passes of one row."""
        return loss <= self._budget

    @property
    def plain_s(self) -> float:
        """Seconds of a pass of one row, or 0 if none was measured."""
        return _undisturbed(self._plain) if self._plain else 0.0

    @property
    def knows_plain(self) -> bool:
        """Return whether passes of one row were measured."""
        return len(self._plain) >= _LEAST_PLAIN

    def measured_sizes(self, most: int = MOST_ROWS) -> list[int]:
        """Return the draft sizes (rows of a pass) up to `most` with a measured cost."""
        return [size for size in SIZES if size <= most and (self._plain if size == 1 else self._costs[size])]

    def best(self, most: int = MOST_ROWS) -> int:
        """Return the measured size, at most `most`, with the most tokens per second."""
        size = max(self.measured_sizes(most), key=self.speed, default=1)
        return size if clearly_faster(self.speed(size), 1.0, by=DRAFT_STAYS if self._is_on else DRAFT) else 1

    def rows(self, most: int) -> int:
        """Return the size of the next pass, at most `most` rows: the best size, or a possibly better one as a trial."""
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
        """Record the duration of a pass of this size, including drafting.

        If the size paid and now seems not to, or suddenly costs much more, discard the measurements.
        """
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
        """Discard the times of one row, so that they are measured first."""
        self._plain.clear()

    def checked(self, rows: int, used: float, seconds: float, tried: float | None = None) -> None:
        """Learn from a pass of `rows` rows that gave `used` tokens. For several requests, values are means per request.

        tried: number of verified drafts; None: drafts up to the first wrong one.
        """
        self._passes += 1
        size = max(size for size in SIZES if size <= rows)
        before = self.cost(size)
        self.measured(size, seconds)
        if rows > 1:
            self._learn(used - 1, min(used, rows - 1) if tried is None else tried)
        self._charge(used, self.cost(size) if self.plain_s else before, rows > 1)

    def learned(self, right: int, drafts: int, used: int, seconds: float) -> None:
        """Learn from a pass whose duration cannot be attributed to a size.

        right: number of accepted drafts among `drafts`.
        used: number of generated tokens.
        """
        self._passes += 1
        self._learn(right, drafts)
        self._charge(used, seconds / self.plain_s if self.plain_s else used, drafts > 0)

    def paid(self, seconds: float) -> None:
        """Charge the seconds in which the drafter prefilled text. Trials wait until the budget has recovered."""
        if self.plain_s:
            self._budget -= seconds / self.plain_s
            self._won = max(0.0, self._won - seconds / self.plain_s)

    def pays(self, seconds: float) -> bool:
        """Return whether drafts have won enough to prefill text for `seconds`.

        A small stake is allowed without winnings, if drafts with the expected acceptance would be faster.
        """
        speeds = [tokens_a_pass(self._expected, size) / self.cost(size) for size in self.measured_sizes()]
        stake = _STAKE if clearly_faster(max(speeds, default=0.0), 1.0, by=DRAFT) else 0.0
        return 0 < seconds <= max(self._won, stake) * self.plain_s

    def watched(self, right: bool) -> None:
        """Learn from a pass of one row whether a draft for it would have been accepted."""
        self._learn(float(right), 1.0)

    def speed(self, size: int) -> float:
        """Return the tokens per duration of a one-row pass."""
        return tokens_a_pass(self.accepted, size) / self.cost(size)

    def cost(self, size: int) -> float:
        """Return the cost of a pass of this size in passes of one row, at least 1.

        With fewer than two samples, the cost is at most two passes of half as many rows. A higher sample is probably a
        slow moment.
        """
        if size == 1:
            return 1.0
        costs, most = self._costs[size], 2 * self.cost(size // 2)
        if not costs:
            return most
        cost = max(1.0, _undisturbed(costs))
        return cost if len(costs) > 1 else min(cost, most)

    def _least_cost(self, size: int) -> float:
        """Return the cost, or the lowest possible cost if the size must be measured again."""
        n = len(self._costs[size])
        is_known = n > 0 and self._age(size) < (_AGAIN if n == 1 else _OLD)
        return self.cost(size) if is_known else self.cost(size // 2)

    def _age(self, size: int) -> int:
        """Return the number of passes since the last one of this size."""
        return self._passes - self._last.get(size, 0)

    def _price(self, size: int, best: int) -> float:
        """Return the possible loss of a trial in passes of one row.

        Unless drafts are watched, their acceptance is assumed one standard deviation lower. If drafting is off, the
        price includes the text to prefill.
        """
        accepted = self.accepted
        deviation = 0.0 if self._is_watched else (accepted * (1 - accepted) / (1 + self._drafts)) ** 0.5
        behind = self.behind_s / self.plain_s if best == 1 and self.plain_s else 0.0
        return self.cost(size) - tokens_a_pass(max(0.0, accepted - deviation), size) + behind

    def _learn(self, right: float, drafts: float) -> None:
        fading = _MEMORY**drafts
        self._right, self._drafts = fading * self._right + right, fading * self._drafts + drafts

    def _charge(self, used: float, cost: float, drafted: bool) -> None:
        """Charge a pass that gave `used` tokens at this cost. The budget is limited to its initial value or a
        trial's price."""
        gained = used - cost
        self._won = max(0.0, self._won + gained)
        gained = min(gained, -_LEAST_LOSS) if drafted and used <= 1 and gained < _LEAST_LOSS else gained
        most = max(_BUDGET, self._price(SIZES[1], 1))
        self._budget = min(most, max(min(self._budget, _FLOOR), self._budget + gained) + _FILLS * used)


def _undisturbed(times: Collection[float]) -> float:
    """Return the sample at _LOW_PART. The minimum may be luck, and the mean includes other programs."""
    return sorted(times)[len(times) // _LOW_PART]
