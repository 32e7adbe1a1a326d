"""Choose how many windows are in flight over stages, and their rows, from what they take and the acceptance rate. One,
unless more are clearly faster.

A window that follows others comes soon behind them; the first after a wrong draft has all stages before it, and what
was cancelled. A window of r rows is followed with the chance that all r drafts behind its rows are accepted, a^r. So it
takes, in the mean,

    (1 - a^r) first + a^r next        passes of its rows alone, and gives as many tokens as one

`first` and `next` are measured for each shape. Before they are, they are those of half as many rows, or of half as many
windows with `next` halved; of none, `first` is 1, and `next` the best that can be, one by the number of windows: a
trial finds out. More windows are tried only where those that follow come as soon as windows that wait for links do, in
one part of `first` for each: else they wait for a stage, or for drafts. Windows that paid for long and seem to do so no
more are measured anew, as one row is: that may have been a bad moment.
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from statistics import fmean

from edge.llm.interface import VerifyResult
from edge.speculate.choice import SIZES, RowChoice
from partition.predict.drafts import tokens_a_pass
from partition.predict.hysteresis import DRAFT, clearly_faster

Shape = tuple[int, int]
"""Rows of a window, and windows in flight."""

_KEPT = 16  # times of each kind
_LONGEST = 2.0  # passes alone that one of them counts at most: a bad moment is one of many
_WAITS = 1.1  # times such a part of `first` that `next` may take where more windows are tried
_ALONE = 64  # windows until one has the stages to itself again, so that it is known what that takes
_WAIT = 64  # windows until what was measured and left is tried again; doubles
_MOST_WAIT = 1024


class _Times:
    """Times of windows of a shape, in passes of their rows alone."""

    def __init__(self) -> None:
        self.first: deque[float] = deque(maxlen=_KEPT)
        self.next: deque[float] = deque(maxlen=_KEPT)
        self.last = 0  # the number of the last such window
        self.wait = _WAIT

    def forget(self) -> None:
        """Let them be measured anew."""
        self.first.clear()
        self.next.clear()


class WindowChoice:
    """Chooses the shape of the next windows, and learns from what came of them."""

    def __init__(self, rows: RowChoice) -> None:
        """rows: chooses them where one window is in flight."""
        self.rows = rows
        self._times: dict[Shape, _Times] = defaultdict(_Times)
        self._before: VerifyResult | None = None
        self._windows = self._alone = 0  # numbers of the last window, and of the last that was alone
        self._last: Shape = 1, 1  # of windows: as it was chosen last, with the rows that were drafted

    def shape(self, most_rows: int, most_windows: int) -> Shape:
        """Shape of the next windows."""
        self._last = self._shape(most_rows, most_windows)
        return self._last

    def drafted(self, rows: int) -> None:
        """Note that a window has so many rows, which may be fewer than were chosen."""
        self._last = rows, self._last[1]

    def _shape(self, most_rows: int, most_windows: int) -> Shape:
        rows, alone = self.rows.rows(most_rows), self.rows.best(most_rows)
        if self._windows - self._alone >= _ALONE:
            return alone, 1
        if most_windows == 1 or not self.rows.knows_plain or rows not in self.rows.measured_sizes():
            return rows, 1
        accepted = self.rows.accepted
        best = self._faster(alone, most_rows, most_windows, accepted)
        if best is None and rows == alone:  # a trial, of the windows that pay where drafts are right as often as hoped
            best = self._faster(alone, most_rows, most_windows, self.rows.hoped)
            if best is not None and not self.rows.affords(
                tokens_a_pass(accepted, best[0]) / self._speed(best, accepted) - 1
            ):
                best = None
        return best or (rows, 1)

    def _faster(self, alone: int, most_rows: int, most_windows: int, accepted: float) -> Shape | None:
        """The best shape of several windows, if it is clearly faster than one of `alone` rows."""
        best = self.best(most_rows, most_windows, accepted)
        return best if best is not None and self._pays(best, alone, accepted) else None

    def _pays(self, shape: Shape, alone: int, accepted: float) -> bool:
        """Return whether windows of a shape are clearly faster than one of `alone` rows."""
        alone_speed = tokens_a_pass(accepted, alone) / self.rows.cost(alone)
        return clearly_faster(self._speed(shape, accepted), alone_speed, by=DRAFT)

    def verified(self, window: VerifyResult, seconds: float) -> None:
        """A window is over, so long after it was begun, or after the one before it."""
        self._windows += 1
        before, self._before = self._before, window
        if window.is_alone:
            self._alone = self._windows
            self.rows.checked(window.rows, window.used, seconds)
            return
        alone_s = self._alone_s(window.rows)
        self.rows.learned(window.right, window.looked_at, window.used, min(seconds, _LONGEST * (alone_s or seconds)))
        # Beside it another window was drafted, and went through the stages: of the same shape, or it says nothing.
        is_steady = before is not None and (before.rows, before.windows) == (window.rows, window.windows) == self._last
        if window.windows == 1 or not alone_s or before is None or not is_steady:
            return
        shape = window.rows, window.windows
        times = self._times[shape]
        times.last = self._windows
        pays = partial(self._pays, shape, self.rows.best(window.rows), self.rows.accepted)
        paid = len(times.next) == _KEPT and pays()
        if window.is_first and before.cancelled:
            times.first.append(min(seconds / alone_s, _LONGEST))
        elif not window.is_first:
            times.next.append(min(seconds / alone_s, _LONGEST))
        if paid and not pays():
            times.forget()
            self.rows.forget_plain()

    def best(self, most_rows: int, most_windows: int, accepted: float) -> Shape | None:
        """The fastest shape of more windows than one, of rows that were measured, where so many drafts are accepted.
        More windows are tried where fewer were, and were the fastest."""
        best, windows, speed = None, 2, partial(self._speed, accepted=accepted)
        while windows <= most_windows:
            shapes = [(size, windows) for size in self.rows.measured_sizes(most_rows)]
            for shape in shapes:
                self._forget(self._times[shape])
            fastest = max(shapes, key=speed, default=None)
            if fastest is None or (best is not None and speed(fastest) <= speed(best)):
                break
            best, times = fastest, self._times[fastest]
            if not times.next or fmean(times.next) > _WAITS * fmean(times.first or [1.0]) / windows:
                break
            windows *= 2
        return best

    def _forget(self, times: _Times) -> None:
        """Forget times of long ago, so that they are measured again, ever more seldom."""
        if (times.first or times.next) and self._windows - times.last >= times.wait:
            times.forget()
            times.wait = min(2 * times.wait, _MOST_WAIT)

    def _speed(self, shape: Shape, accepted: float) -> float:
        """Return the tokens that come in the time of a pass of one row, at this acceptance rate."""
        size, windows = shape
        first, next_ = self._first(size, windows), self._next(size, windows)
        goes_on = accepted**size
        return tokens_a_pass(accepted, size) / (self.rows.cost(size) * ((1 - goes_on) * first + goes_on * next_))

    def _first(self, size: int, windows: int) -> float:
        """Time of a window behind a wrong draft."""
        if times := self._times[size, windows].first:
            return fmean(times)
        if size > 1:
            return self._first(size // 2, windows)
        return self._first(1, windows // 2) if windows > 2 else 1.0

    def _next(self, size: int, windows: int) -> float:
        """Time of a window behind another one."""
        if times := self._times[size, windows].next:
            return fmean(times)
        if size > 1:
            return self._next(size // 2, windows)
        return 0.5 * self._next(1, windows // 2) if windows > 1 else 1.0

    def _alone_s(self, size: int) -> float:
        """Seconds of a pass of so many rows alone."""
        return self.rows.cost(size) * self.rows.plain_s if size in SIZES else 0.0
