"""Microbenchmarks: time a step in short samples spread over time and keep the fastest.

Other work only slows a computation down. So the fastest sample is nearest to what the device can do. Where no other
sample comes near it, or other work had the processor even then, the result is marked as measured while busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from devices.busy import LostTimeMeter
from devices.probe import cpu_quota

SAMPLE_S = 0.03  # least length of a sample
_QUOTA_SAMPLE_S = 0.25  # with a CPU quota: many of its periods, because single steps can pass before it applies
_LEAST_SAMPLES = 4  # of each task
_MOST_SAMPLES = 8  # of a task whose fastest sample is not confirmed yet
_MOST_S = 3.0  # of samples of one task with what precedes their steps; it has two at least
_LOST = 0.05  # share of a sample: a sample that lost more of its time to other work was disturbed
_NEAR = 1.1  # times the fastest: another undisturbed sample within that confirms it


@dataclass(frozen=True)
class BestTime:
    """Seconds per step: the mean of the fastest sample."""

    seconds: float
    busy: bool  # other work had the processor, so a step may take less

    def or_better(self, other: BestTime) -> BestTime:
        """Return the faster of two results for one task, measured at different times. It is busy only where both
        are."""
        return BestTime(min(self.seconds, other.seconds), self.busy and other.busy)


@dataclass(frozen=True)
class TimedTask:
    """A step to be timed, and what to do before each sample."""

    step: Callable[[], None]
    prepare: Callable[[], None] = lambda: None  # before each sample, not timed
    before_step: Callable[[], None] | None = None  # before each step, not timed


def is_throttled(threads: int) -> bool:
    """Return whether a CPU quota pauses a process that keeps so many threads busy."""
    quota = cpu_quota()
    return quota is not None and quota < threads


def sample_s(threads: int) -> float:
    """Return the least seconds of a sample that uses this many threads."""
    return _QUOTA_SAMPLE_S if is_throttled(threads) else SAMPLE_S


def best_of(
    tasks: Sequence[TimedTask],
    least_s: float = SAMPLE_S,
    *,
    least_steps: int = 1,
    samples: int = _LEAST_SAMPLES,
    clock: Callable[[], float] | None = None,
    watch: Callable[[], Callable[[], float]] = lambda: LostTimeMeter().lost_s,
) -> list[BestTime]:
    """Return seconds per step for each task, in order: the mean of its fastest sample.

    Each task has one sample before any task has its next, so that a burst of other work touches few samples of one
    task. A sample takes at least `least_s` and `least_steps`; a warm-up step precedes the first sample, and each sample
    of short steps. There are `samples` of each task, and more until the fastest is confirmed; a single sample
    (`samples=1`) cannot be confirmed. watch: called at the start of a sample, returns a function that says how many
    seconds of it went to other work.
    """
    clock = clock or time.perf_counter
    took: list[list[tuple[float, bool]]] = [[] for _ in tasks]
    spent = [0.0] * len(tasks)
    for number in range(samples if samples == 1 else max(samples, _MOST_SAMPLES)):
        for i, task in enumerate(tasks):
            if number >= 2 and spent[i] >= _MOST_S:
                continue
            if number >= samples and not _fastest(took[i]).busy:
                continue
            task.prepare()
            if not took[i] or took[i][-1][0] < least_s:  # a long step needs no warm-up: it is a small part of the step
                task.step()
            lost = watch()
            began, steps, untimed_s = clock(), 0, 0.0
            while (seconds := clock() - began - untimed_s) < least_s or steps < least_steps:
                if task.before_step is not None:
                    paused = clock()
                    task.before_step()
                    untimed_s += clock() - paused
                task.step()
                steps += 1
            elapsed_s = seconds + untimed_s
            took[i].append((seconds / steps, lost() > _LOST * elapsed_s))
            spent[i] += elapsed_s
    return [_fastest(samples_of_task) for samples_of_task in took]


def _fastest(took: Sequence[tuple[float, bool]]) -> BestTime:
    """Return the fastest sample. took: for each sample, its seconds per step and whether other work had the
    processor."""
    best = min(seconds for seconds, _ in took)
    near = sum(seconds <= _NEAR * best for seconds, busy in took if not busy)
    return BestTime(best, near < min(2, len(took)))
