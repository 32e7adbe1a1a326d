"""Choice of the weights that stay in memory and those that are streamed through a window, within a budget. Pure
arithmetic.

Every pass over the weights (one a decoded token) reads all streamed matrices once, so what is streamed is as little as
the budget allows, and lies evenly between what stays: then each has the same time to arrive. Small matrices stay, if
that is enough: a wait for them costs as much as for a large one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from partition.errors import PlanError

_MIB = 1 << 20
_SMALL = 8  # matrices of less than so much of the largest are streamed only where the large ones are not enough
_WINDOWS = (2, 3, 4, 6, 8)  # in largest streamed matrices: what the choice is from
_CAPS = 8  # size limits of streamed matrices to try, largest first
_STOP_S = 1e-4  # to wait for a streamed matrix that is there already: the graph is interrupted


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight that may be streamed."""

    name: str
    n_bytes: int  # memory it takes, in whole pages where they count


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured speeds, in bytes a second."""

    read: float  # from the disk, laid out for the CPU
    compute: float  # bytes of weights a second in a decode step of one row


@dataclass(frozen=True, slots=True)
class Pages:
    """Split of the matrices into resident and streamed ones, with its cost."""

    streamed: tuple[str, ...]  # names, in the order of use
    resident_bytes: int
    streamed_bytes: int  # read in every pass
    window_bytes: int  # 0 where nothing is streamed


def least_room(matrices: Sequence[Matrix]) -> int:
    """Bytes without which nothing can run: a window for the largest."""
    return max((matrix.n_bytes for matrix in matrices), default=0)


def plan_pages(matrices: Sequence[Matrix], room: int, speed: Speed, window: int | None = None) -> Pages:
    """Choose which of `matrices`, in the order of use, are streamed if `room` bytes are left for them and the window.

    The window is the one with the shortest pass, by `pass_seconds`, unless it is given. PlanError, with need and have,
    if the largest matrix does not fit.
    """
    total = sum(matrix.n_bytes for matrix in matrices)
    if total <= room:
        return Pages((), total, 0, 0)
    largest = least_room(matrices)
    if window is not None and window < largest:
        raise PlanError(
            f"a window of {window / _MIB:.1f} MiB cannot hold the largest matrix, {largest / _MIB:.1f} MiB; use a"
            " larger --window, or leave it out"
        )
    if (window or largest) > room:
        raise PlanError(
            f"a window of {(window or largest) / _MIB:.1f} MiB is more than the {room / _MIB:.1f} MiB that are left for"
            " it; use a smaller --window, or a larger --memory"
        )
    plans = []
    for cap in sorted({matrix.n_bytes for matrix in matrices}, reverse=True)[:_CAPS]:
        sizes = [window] if window is not None else [k * cap for k in _WINDOWS if k * cap <= room] or [cap]
        plans += [plan for size in sizes if (plan := _spread(matrices, room - size, size, cap)) is not None]
    return min(plans, key=lambda plan: (pass_seconds(matrices, plan, speed), plan.window_bytes))


def pass_seconds(matrices: Sequence[Matrix], plan: Pages, speed: Speed) -> float:
    """Seconds of one pass among many, by playing two of them: the disk reads in turn what the window has room for, and
    each matrix is computed when it is there."""
    streamed = set(plan.streamed)
    disk_s = now_s = before_s = 0.0
    waiting = deque(matrix for _ in range(2) for matrix in matrices if matrix.name in streamed)  # to be read
    arrivals: deque[tuple[float, int]] = deque()  # (time, bytes) of what is in the window
    free = plan.window_bytes
    for _ in range(2):
        before_s = now_s
        for matrix in matrices:
            if matrix.name in streamed:
                free, disk_s = _read_ahead(waiting, arrivals, free, disk_s, speed.read)
                arrived_s, n_bytes = arrivals.popleft()
                now_s = max(now_s, arrived_s) + matrix.n_bytes / speed.compute + _STOP_S
                if waiting and waiting[0].n_bytes > free:  # the disk stood still for want of room
                    disk_s = max(disk_s, now_s)
                free += n_bytes
            else:
                now_s += matrix.n_bytes / speed.compute
    return now_s - before_s


def _read_ahead(
    waiting: deque[Matrix], arrivals: deque[tuple[float, int]], free: int, disk_s: float, read: float
) -> tuple[int, float]:
    """Read as far as there is room; (bytes free, time when the disk is done)."""
    while waiting and waiting[0].n_bytes <= free:
        matrix = waiting.popleft()
        free -= matrix.n_bytes
        disk_s += matrix.n_bytes / read
        arrivals.append((disk_s, matrix.n_bytes))
    return free, disk_s


def _spread(matrices: Sequence[Matrix], room: int, window: int, most: int) -> Pages | None:
    """Stream as few bytes as leave the others `room`, evenly, of matrices of at most `most` bytes; None if they are
    not enough."""
    small = [matrix for matrix in matrices if matrix.n_bytes * _SMALL < most]
    if sum(matrix.n_bytes for matrix in small) > room:
        small = []  # even they must go
    staying = {matrix.name for matrix in small}
    large = [matrix for matrix in matrices if matrix.name not in staying and matrix.n_bytes <= most]
    total = sum(matrix.n_bytes for matrix in matrices)
    goal = total - room
    if sum(matrix.n_bytes for matrix in large) < goal:
        return None
    share = goal / sum(matrix.n_bytes for matrix in large)
    while True:
        due, chosen = 0.0, []
        for matrix in large:
            due += matrix.n_bytes * share
            if due >= matrix.n_bytes / 2:
                chosen.append(matrix)
                due -= matrix.n_bytes
        n_bytes = sum(matrix.n_bytes for matrix in chosen)
        if n_bytes >= goal or len(chosen) == len(large):
            return Pages(tuple(matrix.name for matrix in chosen), total - n_bytes, n_bytes, window)
        share *= 1.002
