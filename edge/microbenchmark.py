"""Microbenchmarks: time a step in short samples spread over time and keep the fastest.

Other load only slows a computation down, so the fastest sample is nearest to the device's real speed. The result is
marked as busy if no second undisturbed sample comes close to the fastest one. Its time is then corrected by the
processor time that the samples lost to other load.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from devices.busy import LostTimeMeter
from devices.probe import cpu_quota

SAMPLE_S = 0.03  # minimum length of a sample, in seconds
# Minimum length of a sample under a CPU quota, in seconds. It covers many quota periods, because single steps can
# finish before the quota takes effect.
_QUOTA_SAMPLE_S = 0.25
_LEAST_SAMPLES = 4  # samples of each task
_MOST_SAMPLES = 8  # maximum samples of a task whose fastest sample is not confirmed yet
MOST_S = 3.0  # maximum seconds for the samples of a task with their preparation (at least two samples)
_LONG = 2  # a task whose first sample takes this multiple of its time gets no second one
_LEAST_PART = 0.2  # part of its time that a sample computed, at least; if it lost more, that cannot be corrected
_LOST = 0.05  # share of its time that an undisturbed sample may lose to other load
_NEAR = 1.1  # an undisturbed sample that takes at most this multiple of the fastest confirms it


@dataclass(frozen=True)
class BestTime:
    """Mean seconds per step of the fastest sample, or of a corrected one."""

    seconds: float
    busy: bool  # other load ran on the processor, so the time is less reliable

    def or_better(self, other: BestTime) -> BestTime:
        """Return the faster of two results for the same task. It is busy only if both results are busy."""
        return BestTime(min(self.seconds, other.seconds), self.busy and other.busy)


@dataclass(frozen=True)
class _Sample:
    """Seconds per step of one sample."""

    seconds: float
    corrected_s: float  # without the time that was lost to other load
    busy: bool


@dataclass(frozen=True)
class TimedTask:
    """A step to be timed, with its preparation."""

    step: Callable[[], None]
    prepare: Callable[[], object] = lambda: None  # called before each sample, not timed
    before_step: Callable[[], None] | None = None  # called before each step, not timed


def is_throttled(threads: int) -> bool:
    """Return True if a CPU quota would throttle a process that keeps this many threads busy."""
    quota = cpu_quota()
    return quota is not None and quota < threads


def sample_s(threads: int) -> float:
    """Return the minimum length of a sample that uses this many threads, in seconds."""
    return _QUOTA_SAMPLE_S if is_throttled(threads) else SAMPLE_S


def best_of(
    tasks: Sequence[TimedTask],
    least_s: float = SAMPLE_S,
    *,
    least_steps: int = 1,
    samples: int = _LEAST_SAMPLES,
    most_s: float = MOST_S,
    threads: float = 1,
    clock: Callable[[], float] | None = None,
    watch: Callable[[], Callable[[], float]] = lambda: LostTimeMeter().lost_s,
) -> list[BestTime]:
    """Return the seconds per step of each task, in order: the mean of its fastest sample.

    Samples of the tasks alternate, so that a burst of other load disturbs few samples of each task. A warm-up step
    precedes a task's first sample, and every sample of a task with short steps.

    least_s, least_steps: minimum seconds and steps of a sample.
    samples: samples of each task; more are taken until the fastest is confirmed. With `samples=1` the fastest sample
    cannot be confirmed.
    most_s: maximum seconds of each task with its preparation. It gets at least two samples, unless `samples` is 1 or
        the first one took twice as long.
    threads: threads that a step uses. They share the time lost to other load; infinity: nothing is corrected.
    watch: called at the start of a sample; returns a function that returns the seconds lost to other load since then.
    """
    clock = clock or time.perf_counter
    took: list[list[_Sample]] = [[] for _ in tasks]
    spent = [0.0] * len(tasks)
    for number in range(samples if samples == 1 else max(samples, _MOST_SAMPLES)):
        for i, task in enumerate(tasks):
            if number and spent[i] >= (most_s if number > 1 else _LONG * most_s):
                continue
            if number >= samples and not _fastest(took[i]).busy:
                continue
            started = clock()
            task.prepare()
            if not took[i] or took[i][-1].seconds < least_s:  # for a long step, the warm-up effect is negligible
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
            lost_part = lost() / max(elapsed_s, 1e-9)
            corrected = max(_LEAST_PART, 1 - lost_part / threads) if lost_part > _LOST else 1.0
            took[i].append(_Sample(seconds / steps, corrected * seconds / steps, lost_part > _LOST))
            spent[i] += clock() - started
    return [_fastest(samples_of_task) for samples_of_task in took]


def _fastest(took: Sequence[_Sample]) -> BestTime:
    """Return the fastest sample, or a corrected time if no undisturbed sample confirms it."""
    best = min(sample.seconds for sample in took)
    near = sum(sample.seconds <= _NEAR * best for sample in took if not sample.busy)
    if near >= min(2, len(took)):
        return BestTime(best, False)
    return BestTime(min(best, statistics.median(sample.corrected_s for sample in took)), True)
