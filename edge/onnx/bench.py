"""Benchmark of an ONNX model: latency and throughput, measured separately because neither follows from the other."""

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

# An input that takes longer than this multiple of its latency in the idle flow has waited behind others.
_WAITING = 1.25
_TRIES = 3  # measurements in which inputs must wait before the window counts as full

Progress = Callable[[int, int], None]  # inputs completed, inputs in total
# A flow yields the results of inputs in order, with at most `window` (its second argument) of them in flight. Examples
# are `Pipeline.map` and `sequential`.
Flow = Callable[[Iterable[Mapping[str, Array]], int], Iterator[Result]]


@dataclass(frozen=True)
class FlowSpeed:
    """Measured latency and throughput of a flow."""

    latency_ms_median: float  # median time in which the idle model answers one input
    latency_ms_p90: float  # 90th percentile of the same time
    throughput_per_s: float  # inputs completed per second while the window is full
    compute_ms: tuple[float, ...]  # median computing time of each stage, with one input in flight
    window: int  # inputs in flight during the throughput measurement
    repeats: int  # inputs counted by each of the two measurements


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
    """Measure latency and throughput of `flow` with `time.perf_counter`. Errors of the flow are raised.

    Latency is measured with one input in flight, after one uncounted warm-up input. Throughput is measured with
    `window` inputs in flight: each completed input is replaced by another. The first `window` completions warm up, then
    `repeats` completions are counted. Further inputs keep the window full until the last counted completion.

    repeats: number of counted inputs, at least 1
    window: number of inputs in flight, at least 1; None chooses it with `full_window`
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
    """Return the number of inputs in flight that fills the flow.

    alone: the result of one input in the idle flow

    If the window is the bottleneck, an input takes as long as in the idle flow. If a stage or a link is the bottleneck,
    inputs wait, and each takes longer. The window doubles until inputs take a quarter longer in each of several
    measurements. Several are needed because inputs also wait when the processor is briefly busy with other work.
    """
    window = len(alone.compute_s) + 1
    while 2 * window <= MOST_WINDOW:
        if all(_waits(flow, feeds, window) > _WAITING * alone.seconds for _ in range(_TRIES)):
            break
        window *= 2
    return window


def _waits(flow: Flow, feeds: Mapping[str, Array], window: int) -> float:
    """Return the latency in seconds of each input when `window` inputs are in flight."""
    ended = [result.ended for result in flow(repeat(feeds, 2 * window), window)]
    return ended[-1] - ended[window - 1]


def sequential(run: Callable[[Mapping[str, Array]], Feeds]) -> Flow:
    """Return the flow of a function that computes one input at a time. Such a flow ignores the window."""

    def flow(feeds: Iterable[Mapping[str, Array]], window: int) -> Iterator[Result]:
        for inputs in feeds:
            began = time.perf_counter()
            outputs = run(inputs)
            ended = time.perf_counter()
            yield Result(outputs, began, ended, (ended - began,))

    return flow
