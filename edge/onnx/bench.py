"""Benchmark of an ONNX model: latency and throughput by one clock. They are two measurements, because neither follows
from the other."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

from edge.onnx.pipeline import MOST_WINDOW, Result
from edge.onnx.samples import Array, Feeds

_WAITING = 1.25  # times its latency in the idle flow: an input that takes longer has waited for others
_TRIES = 3  # in which the inputs of a window must wait, before it counts as filling the flow

Progress = Callable[[int, int], None]  # inputs completed, inputs in total
# Yields the results of inputs in order, with at most so many of them in flight: `Pipeline.map`, or `sequential`.
Flow = Callable[[Iterable[Mapping[str, Array]], int], Iterator[Result]]


@dataclass(frozen=True)
class FlowSpeed:
    """Latency and throughput that were measured."""

    latency_ms_median: float  # of one input through the idle model, from handing it over to having its outputs
    latency_ms_p90: float  # 90th percentile
    throughput_per_s: float  # inputs completed, with the window full
    compute_ms: tuple[float, ...]  # median of each stage, one input at a time
    window: int  # inputs in flight for the throughput
    repeats: int  # inputs that each of the two measurements counts


def speed_json(speed: FlowSpeed | None) -> dict[str, Any]:
    """Return latency and throughput as plain values; None for each if the model did not run."""
    return {
        "latency_ms_median": speed.latency_ms_median if speed else None,
        "throughput_per_s": speed.throughput_per_s if speed else None,
        "in_flight": speed.window if speed else None,
    }


def measure(
    flow: Flow, feeds: Mapping[str, Array], repeats: int, window: int | None = None, progress: Progress | None = None
) -> FlowSpeed:
    """Measure latency and throughput of `flow` by `time.perf_counter`. Raises the errors of the flow.

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

    alone = sorted(
        islice(map(completed, flow(repeat(feeds, 1 + repeats), 1)), 1, None), key=lambda completion: completion.seconds
    )
    if window is None:
        window = full_window(flow, feeds, alone[len(alone) // 2])
        steps += 2 * window - 2
    ended = [completed(result).ended for result in flow(repeat(feeds, 2 * window - 1 + repeats), window)]
    stages = zip(*(completion.compute_s for completion in alone), strict=True)
    return FlowSpeed(
        latency_ms_median=1e3 * statistics.median(completion.seconds for completion in alone),
        latency_ms_p90=1e3 * alone[math.ceil(0.9 * repeats) - 1].seconds,
        compute_ms=tuple(1e3 * statistics.median(stage) for stage in stages),
        throughput_per_s=repeats / max(ended[window - 1 + repeats] - ended[window - 1], 1e-9),
        window=window,
        repeats=repeats,
    )


def full_window(flow: Flow, feeds: Mapping[str, Array], alone: Result) -> int:
    """Return how many inputs in flight fill the flow. alone: the result of one input in the idle flow.

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
    """Return the seconds in which as many inputs complete as are in flight, which is the latency of each."""
    ended = [result.ended for result in flow(repeat(feeds, 2 * window), window)]
    return ended[-1] - ended[window - 1]


def sequential(run: Callable[[Mapping[str, Array]], Feeds]) -> Flow:
    """Return the flow of a function that computes one input at a time, whatever the window."""

    def flow(feeds: Iterable[Mapping[str, Array]], window: int) -> Iterator[Result]:
        for inputs in feeds:
            began = time.perf_counter()
            outputs = run(inputs)
            ended = time.perf_counter()
            yield Result(outputs, began, ended, (ended - began,))

    return flow
