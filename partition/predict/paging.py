"""Choose the weights that stay in memory and the weights that are streamed through a window, within a budget.

Each pass over the weights (one per decoded token) reads every streamed matrix once. So as few bytes as possible are
streamed. Streamed matrices are spread evenly, so that each has equal time to arrive. Small matrices stay in memory if
possible, because waiting for them costs as much as for a large matrix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from partition.errors import PlanError

_MIB = 1 << 20
_SMALL = 8  # matrices smaller than the largest one / _SMALL are streamed only if large ones do not suffice
_WINDOWS = (2, 3, 4, 6, 8)  # candidate windows, in sizes of the largest streamed matrix
_CAPS = 8  # number of size limits of streamed matrices to try, largest first
_STOP_S = 1e-4  # seconds to synchronize with a streamed matrix that has already arrived; the graph is interrupted


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix that may be streamed."""

    name: str
    n_bytes: int  # bytes in memory, in whole pages if pages count


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured speeds, in bytes per second."""

    read: float  # reading weights from disk in the CPU's layout
    compute: float  # weights computed in a decode step of one row


@dataclass(frozen=True, slots=True)
class Pages:
    """Split of the matrices into resident and streamed ones, with the bytes of each."""

    streamed: tuple[str, ...]  # names in the order of use
    resident_bytes: int
    streamed_bytes: int  # bytes read in every pass
    window_bytes: int  # 0 if nothing is streamed


def least_room(matrices: Sequence[Matrix]) -> int:
    """Return the minimum bytes to run at all: a window for the largest matrix."""
    return max((matrix.n_bytes for matrix in matrices), default=0)


def plan_pages(matrices: Sequence[Matrix], room: int, speed: Speed, window: int | None = None) -> Pages:
    """Choose the matrices to stream if `room` bytes are left for resident matrices and the window.

    matrices: in the order of use.
    window: bytes of the window; None: the window with the shortest pass by `pass_seconds`.

    Raises PlanError with needed and available bytes if the largest matrix does not fit.
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
    """Return the seconds of one pass among many, from a simulation of two passes.

    The disk reads matrices in turn while the window has room. Each matrix is computed when it has arrived.
    """
    streamed = set(plan.streamed)
    disk_s = now_s = before_s = 0.0
    waiting = deque(matrix for _ in range(2) for matrix in matrices if matrix.name in streamed)  # matrices to read
    arrivals: deque[tuple[float, int]] = deque()  # (time, bytes) of the matrices in the window
    free = plan.window_bytes
    for _ in range(2):
        before_s = now_s
        for matrix in matrices:
            if matrix.name in streamed:
                free, disk_s = _read_ahead(waiting, arrivals, free, disk_s, speed.read)
                arrived_s, n_bytes = arrivals.popleft()
                now_s = max(now_s, arrived_s) + matrix.n_bytes / speed.compute + _STOP_S
                if waiting and waiting[0].n_bytes > free:  # the disk waited for room in the window
                    disk_s = max(disk_s, now_s)
                free += n_bytes
            else:
                now_s += matrix.n_bytes / speed.compute
    return now_s - before_s


def _read_ahead(
    waiting: deque[Matrix], arrivals: deque[tuple[float, int]], free: int, disk_s: float, read: float
) -> tuple[int, float]:
    """Read ahead while the window has room. Return (free bytes, time when the disk is done)."""
    while waiting and waiting[0].n_bytes <= free:
        matrix = waiting.popleft()
        free -= matrix.n_bytes
        disk_s += matrix.n_bytes / read
        arrivals.append((disk_s, matrix.n_bytes))
    return free, disk_s


def _spread(matrices: Sequence[Matrix], room: int, window: int, most: int) -> Pages | None:
    """Return a split that streams as few bytes as possible, spread evenly, or None if that is not enough.

    room: bytes for resident matrices.
    most: size limit of streamed matrices.
    """
    small = [matrix for matrix in matrices if matrix.n_bytes * _SMALL < most]
    if sum(matrix.n_bytes for matrix in small) > room:
        small = []  # the small matrices have to be streamed, too
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
