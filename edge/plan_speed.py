"""What a plan of a language model does on its devices: measured the way `partition.predict` predicts it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from devices.probe import own_rss
from edge.errors import ContextFull
from edge.scheduler import Request, Scheduler
from edge.text_engine import TextEngine
from partition.cost import Work
from partition.plan import LOCAL

_LEAST_STEPS, _LEAST_S = 24, 1.0  # of measuring
_SETTLED = 3  # tokens of each request before throughput counts


@dataclass(frozen=True)
class Measured:
    """What a plan did on its devices."""

    latency_s: float  # between two tokens of one request alone, mean
    throughput_per_s: float  # tokens of all requests, while all of them decode
    ttft_s: float  # of a prompt alone
    memory_bytes: Mapping[str, int]  # by device: what this process holds, what the others' ranks were granted

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "latency_s": self.latency_s,
            "throughput_per_s": self.throughput_per_s,
            "ttft_s": self.ttft_s,
            "memory_bytes": dict(self.memory_bytes),
        }


def measured(engine: TextEngine, work: Work, microbatches: int, others: Mapping[str, int]) -> Measured:
    """What an engine does with this work. others: bytes of the other devices' ranks."""
    ttft_s = _prompt_s(engine, work.prompt)
    latency_s = token_s(engine, work.depth)
    throughput_per_s = steady_per_s(engine, work.concurrency, work.depth, microbatches)
    return Measured(latency_s, throughput_per_s, ttft_s, {LOCAL: own_rss(), **others})


def _prompt_s(engine: TextEngine, prompt: int) -> float:
    """Seconds until a prompt has its first logits: the median of two, after one that does not count."""
    took = []
    for _ in range(3):
        began = time.perf_counter()
        _read(engine, prompt)
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


def _read(engine: TextEngine, n: int) -> None:
    """Forget everything, and read a prompt of `n` tokens."""
    tokens = np.arange(n, dtype=np.int32) % engine.model.n_vocab
    engine.kv_clear()
    chunk = engine.chunk(n)
    for start in range(0, n, chunk):
        stop = min(n, start + chunk)
        engine.decode(tokens[start:stop], start, outputs="last" if stop == n else "none", top=1)


def token_s(engine: TextEngine, depth: int) -> float:
    """Seconds a token of one request alone, with about `depth` tokens behind it: the mean of many."""
    start = max(1, depth - _LEAST_STEPS // 2)
    _read(engine, start)
    position = start
    for _ in range(2):
        engine.decode([1], position, top=1)
        position += 1
    began = time.perf_counter()
    done = 0
    while (took := time.perf_counter() - began) < _LEAST_S or done < _LEAST_STEPS:
        engine.decode([1], position, top=1)
        done += 1
        position += 1
        if position >= min(engine.context, start + 2 * _LEAST_STEPS):
            engine.kv_remove(0, start)
            position = start
    return took / done


def steady_per_s(engine: TextEngine, requests: int, depth: int, microbatches: int | None = None) -> float:
    """Tokens a second with so many requests, counted while all of them decode with about `depth` tokens behind them."""
    times: list[tuple[float, int]] = []
    room = engine.context // requests - 2
    each = min(room // 2, 8 * _SETTLED)
    depth = min(depth, room - each)
    if each <= _SETTLED + 1:
        least = requests * 2 * (_SETTLED + 4)
        raise ContextFull(
            f"{requests} requests at once need a context of {least} tokens or more; it has {engine.context}"
        )
    asked = [Request([1 + i] * max(1, depth - each // 2), each, ends=False) for i in range(requests)]
    Scheduler(engine, lambda index, _: times.append((time.perf_counter(), index)), microbatches).run(asked)
    counts = [0] * requests
    begin, end = None, len(times) - 1
    for i, (_, index) in enumerate(times):
        counts[index] += 1
        if begin is None and min(counts) >= _SETTLED:
            begin = i
        if counts[index] == each:
            end = i
            break
    assert begin is not None
    # From a token of the request that ends: requests that share steps then count for whole steps.
    begin = next((i for i in range(begin, end) if times[i][1] == times[end][1]), begin)
    return (end - begin) / (times[end][0] - times[begin][0])
