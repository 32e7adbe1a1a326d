"""Choose the number of windows in flight over pipeline stages, and their rows, from measured times and the acceptance
rate. Use one window unless more are clearly faster.

A window that follows other windows finishes soon after them. The first window after a wrong draft starts an empty
pipeline, behind cancelled windows. A window of r rows is followed if all r drafts after its rows are accepted, with
probability a^r. So a window takes on average

  (1 - a^r) first + a^r next        passes of its rows alone, and gives as many tokens as a single window

`first` and `next` are measured for each shape. An unmeasured shape uses the values of half as many rows, or of half as
many windows with `next` halved. Without any values, `first` is 1 and `next` is the ideal 1 / windows, so that a trial
finds out.

More windows are tried only if following windows finish at the ideal rate, one part of `first` for each window.
Otherwise they wait for a stage or for drafts. If windows paid for long and seem not to any more, they and one row are
measured anew, because that may have been a slow moment.
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

_KEPT = 16  # number of recent samples of each kind
_LONGEST = 2.0  # limit of a sample, in passes alone: a slow moment counts as one of many
_WAITS = 1.1  # tolerance factor over the ideal `next` for trying more windows
_ALONE = 64  # windows until one runs alone again, to measure the time of a single window
_WAIT = 64  # windows until a measured and dropped shape is tried again; doubles each time
_MOST_WAIT = 1024


class _Times:
    """Times of windows of a shape, in passes of their rows alone."""

    def __init__(self) -> None:
        self.first: deque[float] = deque(maxlen=_KEPT)
        self.next: deque[float] = deque(maxlen=_KEPT)
        self.last = 0  # number of the last such window
        self.wait = _WAIT

    def forget(self) -> None:
        """Discard the samples, so that they are measured anew."""
        self.first.clear()
        self.next.clear()


class WindowChoice:
    """Chooses the shape of the next windows and learns from the results."""

    def __init__(self, rows: RowChoice) -> None:
        """rows: chooses the rows of a single window in flight."""
        self.rows = rows
        self._times: dict[Shape, _Times] = defaultdict(_Times)
        self._before: VerifyResult | None = None
        self._windows = self._alone = 0  # numbers of the last window, and of the last window that ran alone
        self._last: Shape = 1, 1  # last chosen shape, with the rows that were actually drafted

    def shape(self, most_rows: int, most_windows: int) -> Shape:
        """Return the shape of the next windows."""
        self._last = self._shape(most_rows, most_windows)
        return self._last

    def drafted(self, rows: int) -> None:
        """Record the number of rows in a window, which may be lower than chosen."""
        self._last = rows, self._last[1]

    def _shape(self, most_rows: int, most_windows: int) -> Shape:
        rows, alone = self.rows.rows(most_rows), self.rows.best(most_rows)
        if self._windows - self._alone >= _ALONE:
            return alone, 1
        if most_windows == 1 or not self.rows.knows_plain or rows not in self.rows.measured_sizes():
            return rows, 1
        accepted = self.rows.accepted
        best = self._faster(alone, most_rows, most_windows, accepted)
        if best is None and rows == alone:  # a trial of windows that would pay with the hoped acceptance
            best = self._faster(alone, most_rows, most_windows, self.rows.hoped)
            if best is not None and not self.rows.affords(
                tokens_a_pass(accepted, best[0]) / self._speed(best, accepted) - 1
            ):
                best = None
        return best or (rows, 1)

    def _faster(self, alone: int, most_rows: int, most_windows: int, accepted: float) -> Shape | None:
        """Return the best shape of several windows if it is clearly faster than one window of `alone` rows, or else
        None."""
        best = self.best(most_rows, most_windows, accepted)
        return best if best is not None and self._pays(best, alone, accepted) else None

    def _pays(self, shape: Shape, alone: int, accepted: float) -> bool:
        """Return whether windows of a shape are clearly faster than one window of `alone` rows."""
        alone_speed = tokens_a_pass(accepted, alone) / self.rows.cost(alone)
        return clearly_faster(self._speed(shape, accepted), alone_speed, by=DRAFT)

    def verified(self, window: VerifyResult, seconds: float) -> None:
        """Learn from a finished window. seconds: since the window started, or since the previous window finished."""
        self._windows += 1
        before, self._before = self._before, window
        if window.is_alone:
            self._alone = self._windows
            self.rows.checked(window.rows, window.used, seconds)
            return
        alone_s = self._alone_s(window.rows)
        self.rows.learned(window.right, window.looked_at, window.used, min(seconds, _LONGEST * (alone_s or seconds)))
        # A sample counts only if the window that shared the stages had the same shape.
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
        """Return the fastest shape with more than one window and measured rows, at this acceptance rate.

        More windows are tried if fewer windows were measured and were the fastest.
        """
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
        """Discard old samples, so that they are measured again, at growing intervals."""
        if (times.first or times.next) and self._windows - times.last >= times.wait:
            times.forget()
            times.wait = min(2 * times.wait, _MOST_WAIT)

    def _speed(self, shape: Shape, accepted: float) -> float:
        """Return the tokens per duration of a one-row pass, at this acceptance rate."""
        size, windows = shape
        first, next_ = self._first(size, windows), self._next(size, windows)
        goes_on = accepted**size
        return tokens_a_pass(accepted, size) / (self.rows.cost(size) * ((1 - goes_on) * first + goes_on * next_))

    def _first(self, size: int, windows: int) -> float:
        """Return the time of a window after a wrong draft."""
        if times := self._times[size, windows].first:
            return fmean(times)
        if size > 1:
            return self._first(size // 2, windows)
        return self._first(1, windows // 2) if windows > 2 else 1.0

    def _next(self, size: int, windows: int) -> float:
        """Return the time of a window that follows another one."""
        if times := self._times[size, windows].next:
            return fmean(times)
        if size > 1:
            return self._next(size // 2, windows)
        return 0.5 * self._next(1, windows // 2) if windows > 1 else 1.0

    def _alone_s(self, size: int) -> float:
        """Return the seconds of a pass of `size` rows alone."""
        return self.rows.cost(size) * self.rows.plain_s if size in SIZES else 0.0
