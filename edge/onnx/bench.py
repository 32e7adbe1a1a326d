"""Latency and throughput of a model, on one clock: two measurements, because neither follows from the other."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

from edge.onnx.pipeline import MOST_WINDOW, Result
from edge.onnx.samples import Feeds
from edge.onnx.wire import Array

_WAITING = 1.25  # of its latency alone that an input takes where it waits for others
_TRIES = 3  # of a window, before it is taken to fill the flow

Progress = Callable[[int, int], None]  # inputs completed, of how many
# The results of inputs, in order, with so many of them in flight: `Pipeline.map`, or `in_turn`.
Flow = Callable[[Iterable[Mapping[str, Array]], int], Iterator[Result]]


@dataclass(frozen=True)
class Speed:
    """What was measured."""

    latency_ms_median: float  # one input through the idle model, from handing it over to having its outputs
    latency_ms_p90: float  # nine of ten took no longer
    throughput_per_s: float  # inputs completed, with the window full
    compute_ms: tuple[float, ...]  # of each stage, medians, one input at a time
    window: int  # inputs in flight for the throughput
    repeats: int  # inputs that each of the two counts


def speed_json(speed: Speed | None) -> dict[str, Any]:
    """What a model or a cut gives, as plain values; None where it did not run."""
    return {
        "latency_ms_median": speed.latency_ms_median if speed else None,
        "throughput_per_s": speed.throughput_per_s if speed else None,
        "in_flight": speed.window if speed else None,
    }


def measure(
    flow: Flow, feeds: Mapping[str, Array], repeats: int, window: int | None = None, progress: Progress | None = None
) -> Speed:
    """Latency and throughput of `flow` by `time.perf_counter`. Errors are those of the flow.

    Latency: one input at a time, after one that does not count. Throughput: `window` inputs are in flight and, whenever
    one is complete, another one follows. The first `window` to be complete warm up; from the last of these on `repeats`
    completions are counted, with as many behind them as keep the window full. window: None takes what `full_window`
    says. Both are 1 or more.
    """
    done = 0
    steps = 1 + repeats + 2 * (window or 1) - 1 + repeats

    def completed(result: Result) -> Result:
        nonlocal done
        done += 1
        if progress:
            progress(done, steps)
        return result

    alone = sorted(islice(map(completed, flow(repeat(feeds, 1 + repeats), 1)), 1, None), key=lambda one: one.seconds)
    if window is None:
        window = full_window(flow, feeds, alone[len(alone) // 2])
        steps += 2 * window - 2
    ended = [completed(result).ended for result in flow(repeat(feeds, 2 * window - 1 + repeats), window)]
    stages = zip(*(one.compute_s for one in alone), strict=True)
    return Speed(
        latency_ms_median=1e3 * statistics.median(one.seconds for one in alone),
        latency_ms_p90=1e3 * alone[math.ceil(0.9 * repeats) - 1].seconds,
        compute_ms=tuple(1e3 * statistics.median(stage) for stage in stages),
        throughput_per_s=repeats / max(ended[window - 1 + repeats] - ended[window - 1], 1e-9),
        window=window,
        repeats=repeats,
    )


def full_window(flow: Flow, feeds: Mapping[str, Array], alone: Result) -> int:
    """Inputs in flight that fill the flow. alone: what came of one in the idle flow.

    Where the window is what limits, an input that goes in takes as long as alone, so that window x interval = latency;
    where it is a stage or a link, inputs wait, and the product is more. It doubles until it is a quarter more in each
    of several tries: inputs also wait for a processor that is gone for a moment.
    """
    window = len(alone.compute_s) + 1
    while 2 * window <= MOST_WINDOW:
        if all(_waits(flow, feeds, window) > _WAITING * alone.seconds for _ in range(_TRIES)):
            break
        window *= 2
    return window


def _waits(flow: Flow, feeds: Mapping[str, Array], window: int) -> float:
    """Seconds in which as many inputs complete as are in flight: what each takes."""
    ended = [result.ended for result in flow(repeat(feeds, 2 * window), window)]
    return ended[-1] - ended[window - 1]


def in_turn(run: Callable[[Mapping[str, Array]], Feeds]) -> Flow:
    """The flow of what computes one input at a time, whatever the window."""

    def flow(feeds: Iterable[Mapping[str, Array]], window: int) -> Iterator[Result]:
        for one in feeds:
            began = time.perf_counter()
            outputs = run(one)
            ended = time.perf_counter()
            yield Result(outputs, began, ended, (ended - began,))

    return flow
