"""Statistics of a network, counted as Triton does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PHASES = ("queue", "compute_input", "compute_infer", "compute_output")  # durations of a request, in order


@dataclass
class Duration:
    """Number of requests or runs, and their total time."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """Count one request or run."""
        self.count += 1
        self.ns += ns


def _phases(*names: str) -> dict[str, Duration]:
    return {name: Duration() for name in names}


@dataclass
class Statistics:
    """Counters of a network since the server was started."""

    last_inference: int = 0  # milliseconds since 1970
    inference_count: int = 0  # rows
    execution_count: int = 0  # runs
    requests: dict[str, Duration] = field(default_factory=lambda: _phases("success", "fail", *PHASES))
    batches: dict[int, dict[str, Duration]] = field(default_factory=dict)  # durations of runs by number of rows

    def succeeded(self, total_ns: int, durations: Sequence[int], rows: int, run_rows: int, *, is_first: bool) -> None:
        """Count a request with outputs.

        total_ns: time from its arrival to its outputs.
        durations: nanoseconds of PHASES.
        rows: rows of the request.
        run_rows: rows of the run that computed it.
        is_first: the request is the first one of its run.
        """
        self.last_inference = round(1000 * time.time())
        self.inference_count += rows
        self.requests["success"].add(total_ns)
        for name, ns in zip(PHASES, durations, strict=True):
            self.requests[name].add(ns)
        if is_first:
            self.execution_count += 1
            batch = self.batches.setdefault(run_rows, _phases(*PHASES[1:]))
            for name, ns in zip(PHASES[1:], durations[1:], strict=True):
                batch[name].add(ns)

    def failed(self, total_ns: int) -> None:
        """Count a request that failed."""
        self.requests["fail"].add(total_ns)

    def to_json(self, name: str, version: str) -> dict[str, Any]:
        """Return the statistics in the form of the statistics extension."""

        def plain(phases: dict[str, Duration]) -> dict[str, Any]:
            return {key: {"count": phase.count, "ns": phase.ns} for key, phase in phases.items()}

        return {
            "name": name,
            "version": version,
            "last_inference": self.last_inference,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": plain({**self.requests, **_phases("cache_hit", "cache_miss")}),
            "batch_stats": [{"batch_size": rows, **plain(phases)} for rows, phases in sorted(self.batches.items())],
        }
