"""Measure a plan of a language model on its devices, with the workload of `partition.predict.predict`."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devices.probe import own_rss
from edge.errors import ContextFull
from edge.llm.continuation import Continuation, Request
from edge.llm.interface import Answer, TextEngine, VerifyResult
from edge.llm.requests import RequestState
from edge.llm.sampler import SamplingParams, TokenSampler
from edge.llm.scheduler import Scheduler
from edge.microbenchmark import BestTime, TimedTask, best_of
from partition.plan.plan import LOCAL
from partition.predict.cost import Work
from partition.predict.drafts import Draft

ROUNDS = 3  # rounds of all measurements, because a disturbance rarely lasts for several
_SAMPLE_S, _SAMPLES = 0.1, 3  # seconds and samples for the latency in each round
_STEPS = 24  # maximum number of decode steps before the cache is rolled back to the starting depth
_WINDOW_TOKENS = 100  # length of an answer that is generated with draft windows
_RIGHT, _WRONG = 1, 2  # token ids: the drafted token, and a different token
_SETTLED = 3  # tokens that each request generates before throughput is measured


@dataclass(frozen=True)
class Measured:
    """Best figures of several rounds of a plan on its devices."""

    latency_s: float  # seconds between two tokens of a single request; for an ONNX model, of a single input
    throughput_per_s: float  # tokens of all requests while all decode; for an ONNX model, inputs with a full pipeline
    ttft_s: float | None  # seconds to the first token of a single prompt; None for an ONNX model
    memory_bytes: Mapping[str, int]  # by device: resident bytes of this process, and granted bytes of other ranks
    spread: float  # relative difference of the worst and the best round in latency or throughput

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def measured(
    engine: TextEngine, work: Work, microbatches: int, others: Mapping[str, int], draft: Draft | None = None
) -> Measured:
    """Measure an engine with this workload.

    others: bytes of the other devices' ranks.
    draft: assumed draft. Its verify passes are measured; its acceptance rate and drafting time are assumed.
    """
    _read(engine, work.prompt)  # the first prompt takes longer
    ttft_s, latency_s, throughput_per_s = [], [], []
    for _ in range(ROUNDS):
        ttft_s.append(_prompt_s(engine, work.prompt))
        latency_s.append(_alone_s(engine, work.depth, draft))
        throughput_per_s.append(steady_per_s(engine, work.concurrency, work.depth, microbatches))
    if draft is not None and work.concurrency == 1:  # the scheduler had no drafts
        throughput_per_s = [1 / seconds for seconds in latency_s]
    return Measured(
        min(latency_s),
        max(throughput_per_s),
        min(ttft_s),
        {LOCAL: own_rss(), **others},
        max(spread(latency_s), spread(throughput_per_s)),
    )


def of_copies(copies: Sequence[Measured]) -> Measured:
    """Return the figures of several copies that were measured one after another: the latency of the first copy, and the
    sum of throughputs. Copies that slow each other down have less.
    """
    n_bytes: Counter[str] = Counter()
    for copy in copies:
        n_bytes.update(copy.memory_bytes)
    return replace(
        copies[0],
        throughput_per_s=sum(copy.throughput_per_s for copy in copies),
        memory_bytes=dict(n_bytes),
        spread=max(copy.spread for copy in copies),
    )


def spread(values: Sequence[float]) -> float:
    """Return by what fraction the largest value exceeds the smallest."""
    return max(values) / max(min(values), 1e-12) - 1


def _alone_s(engine: TextEngine, depth: int, draft: Draft | None) -> float:
    """Return the seconds per token of a single request."""
    if draft is None:
        return token_s(engine, depth).seconds
    if draft.windows == 1:
        return float(draft.token_s(token_s(engine, depth, draft.rows).seconds))
    return windows_s(engine, depth, draft)


def _prompt_s(engine: TextEngine, prompt: int) -> float:
    """Return the seconds until a prompt has its first logits."""
    began = time.perf_counter()
    _read(engine, prompt)
    return time.perf_counter() - began


def _read(engine: TextEngine, n: int) -> None:
    """Clear the cache and prefill a prompt of `n` tokens."""
    tokens = np.arange(n, dtype=np.int32) % engine.model.n_vocab
    engine.kv_clear()
    chunk = engine.chunk(n)
    for start in range(0, n, chunk):
        stop = min(n, start + chunk)
        engine.decode(tokens[start:stop], start, outputs="last" if stop == n else "none", top=1)


def token_s(engine: TextEngine, depth: int, rows: int = 1) -> BestTime:
    """Return the time of a token of a single request at about `depth` tokens, or of a verify pass of several rows."""
    start = max(1, depth - _STEPS // 2)
    end = min(engine.context, start + _STEPS) - rows + 1
    _read(engine, start)
    position = start

    def step() -> None:
        nonlocal position
        if position >= end:
            if not engine.kv_remove(0, start):  # recurrent layers cannot roll back that far
                _read(engine, start)
            position = start
        engine.decode([1] * rows, position, top=1)
        position += rows

    [timing] = best_of([TimedTask(step)], _SAMPLE_S, samples=_SAMPLES)
    return timing


class _Assumed:
    """Implementation of `Drafter` with windows of one shape. Its drafts are arbitrary and take the assumed time."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def begin(self) -> None:
        """Do nothing: there are no statistics."""

    def shape(self, requests: Sequence[Answer], most_rows: int, most_windows: int) -> tuple[int, int]:
        """Return the assumed shape."""
        return min(self._draft.rows, most_rows), min(self._draft.windows, most_windows)

    def draft(self, request: Answer, first: Sequence[int], rows: int, assumed: Sequence[int] = ()) -> Sequence[int]:
        """Return a window of `rows` tokens after the assumed drafting time."""
        if wait_s := self._draft.waiting_s(rows - len(first)):
            time.sleep(wait_s)
        return [*first, *[_RIGHT] * (rows - len(first))]

    def verified(self, results: Sequence[VerifyResult]) -> None:
        """Do nothing: this drafter does not learn from results."""

    def disturbed(self) -> None:
        """Do nothing: this drafter does not measure times."""

    def ended(self, request: Answer) -> None:
        """Do nothing: there are no drafts to drop."""

    def to_json(self) -> dict[str, Any]:
        """Return no statistics."""
        return {}

    def describe(self) -> str:
        """Return no text."""
        return ""


class _AssumedSampler(TokenSampler):
    """Sampler that accepts drafts at the assumed rate, regardless of the logits."""

    def __init__(self, engine: TextEngine, sampling: SamplingParams, accepted: Iterator[bool]) -> None:
        super().__init__(engine.model, sampling)
        self._accepted = accepted

    def choose(self, logits: NDArray[np.float32], *, constrained: bool = True, may_end: bool = True) -> int:
        """Return the drafted token if the next draft counts as accepted, and a different token otherwise."""
        return _RIGHT if next(self._accepted) else _WRONG


def windows_s(engine: TextEngine, depth: int, draft: Draft) -> float:
    """Return the seconds per token of a single request at about `depth` tokens, with windows of drafts in flight.

    The assumed fraction of drafts is accepted, at random places that are the same each time.
    """
    start = max(1, depth - _STEPS // 2)
    n_tokens = max(1, min(_WINDOW_TOKENS, engine.context - start - draft.rows * draft.windows))
    accepted = [i < round(draft.acceptance * _WINDOW_TOKENS) for i in range(_WINDOW_TOKENS)]
    random.Random(0).shuffle(accepted)
    sampling = SamplingParams(temperature=0, allow_repetition=True)
    request = Request([_RIGHT] * start, n_tokens + 1, sampling, ends=False)
    sampler = _AssumedSampler(engine, sampling, cycle(accepted))
    state = RequestState(0, Continuation(engine.model, request, sampler=sampler), ())
    with Scheduler(engine, slots=1, drafter=_Assumed(draft)) as scheduler:
        scheduler.enqueue(state)
        while not state.answer:
            scheduler.step()
        began, done = time.perf_counter(), len(state.answer)
        while not state.ended:
            scheduler.step()
        return (time.perf_counter() - began) / (len(state.answer) - done)


def steady_per_s(engine: TextEngine, requests: int, depth: int, microbatches: int | None = None) -> float:
    """Return the tokens per second of `requests` requests, while all decode at about `depth` tokens."""
    times: list[tuple[float, int]] = []
    room = engine.context // requests - 2
    each = min(room // 2, 4 * _SETTLED)
    depth = min(depth, room - each)
    if each <= _SETTLED + 1:
        least = requests * 2 * (_SETTLED + 4)
        raise ContextFull(
            f"{requests} concurrent requests need a context of {least} tokens or more; it has {engine.context}"
        )
    queue = [Request([1 + i] * max(1, depth - each // 2), each, ends=False) for i in range(requests)]
    with Scheduler(engine, microbatches) as scheduler:
        for request in queue:
            scheduler.add(request)
        while scheduler.busy:
            for event in scheduler.step():
                if event.token_id is not None:
                    times.append((time.perf_counter(), event.request))
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
    # Begin at a token of the request that ends first, so that requests sharing steps count for whole steps.
    begin = next((i for i in range(begin, end) if times[i][1] == times[end][1]), begin)
    return (end - begin) / (times[end][0] - times[begin][0])
