"""Statistics of paging: bytes read, waits, and cache hits, for decode and prefill."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.weights.experts import ExpertCounts
from edge.weights.reader import Reader, ReaderCounts
from quant.text import bytes_text


@dataclass(frozen=True)
class PassStats:
    """Statistics of all passes of one kind, per token."""

    tokens: int = 0
    bytes_per_token: float = 0.0
    disk_gbps: float = 0.0  # bytes read, divided by the seconds in which something was read
    stall_ms: float = 0.0  # time in which the engine waited for weights
    hidden_ms: float = 0.0  # time in which weights were read while the engine computed
    compute_ms: float = 0.0  # remaining time: computing, or waiting for a core
    hit_rate: float | None = None  # fraction of chosen experts that were in memory; None without experts

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "tokens"}

    def describe(self) -> str:
        """Return a text with the statistics."""
        parts = [
            f"{bytes_text(round(self.bytes_per_token))} read a token at {self.disk_gbps:.2f} GB/s",
            f"{self.stall_ms:.1f} ms waiting, {self.compute_ms:.1f} ms computing, {self.hidden_ms:.1f} ms of reading"
            " hidden behind that",
        ]
        if self.hit_rate is not None:
            parts.append(f"{self.hit_rate:.0%} of the experts were in memory")
        return ", ".join(parts)


@dataclass(frozen=True)
class PagingStats:
    """Statistics of decode (passes with one row per sequence) and of prefill (all other passes)."""

    decode: PassStats
    prefill: PassStats


_Counts = tuple[ReaderCounts, ExpertCounts]


def _grown(total: Any, before: Any, after: Any) -> Any:
    return total + (after - before)


@dataclass
class _Sum:
    tokens: int = 0
    seconds: float = 0.0
    reads: ReaderCounts = field(default_factory=ReaderCounts)
    experts: ExpertCounts = field(default_factory=ExpertCounts)

    def add(self, tokens: int, seconds: float, before: _Counts, after: _Counts) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.reads = ReaderCounts(*map(_grown, self.reads, before[0], after[0]))
        self.experts = ExpertCounts(*map(_grown, self.experts, before[1], after[1]))

    def stats(self) -> PassStats:
        n, reads, experts = max(1, self.tokens), self.reads, self.experts
        return PassStats(
            tokens=self.tokens,
            bytes_per_token=reads.n_bytes / n,
            disk_gbps=reads.n_bytes / reads.busy_s / 1e9 if reads.busy_s else 0.0,
            stall_ms=reads.wait_s / n * 1e3,
            hidden_ms=max(0.0, reads.busy_s - reads.wait_s) / n * 1e3,
            compute_ms=max(0.0, self.seconds - reads.wait_s) / n * 1e3,
            hit_rate=experts.hits / experts.chosen if experts.chosen else None,
        )


class Passes:
    """Sums of reads per pass. Reads between two passes count for the second one."""

    def __init__(
        self, reader: Reader, experts: Callable[[], ExpertCounts], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._reader, self._experts, self._clock = reader, experts, clock
        self._tokens, self._decodes, self._began = 0, False, 0.0
        self._before = self._counts()
        self._sums = {True: _Sum(), False: _Sum()}

    def begin(self, sequences: NDArray[np.int32]) -> None:
        """Begin a pass with these rows. sequences: sequence of each row."""
        self._began = self._clock()
        self._tokens = len(sequences)
        self._decodes = len(set(sequences.tolist())) == len(sequences)

    def end(self) -> None:
        """End the pass, and add its counts."""
        counts, seconds = self._counts(), self._clock() - self._began
        self._sums[self._decodes].add(self._tokens, seconds, self._before, counts)
        self._before = counts

    def stats(self) -> PagingStats:
        """Return the statistics of the passes since the last `clear`."""
        return PagingStats(decode=self._sums[True].stats(), prefill=self._sums[False].stats())

    def clear(self) -> None:
        self._before = self._counts()
        self._sums = {True: _Sum(), False: _Sum()}

    def _counts(self) -> _Counts:
        return self._reader.counts(), self._experts()
