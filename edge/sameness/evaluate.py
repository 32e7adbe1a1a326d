"""Comparison of routes through a model: perplexity, and divergence from a reference and from one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.llama.interrupt import interrupt_stops
from edge.quantization.divergence import Chunks, Summary, divergence, log_softmax, summarize
from edge.quantization.evaluate import temporary
from edge.sameness.routes import Route

Floats = NDArray[np.float32]

COLUMNS = ("route", "perplexity", "mean KL", "top-1", "KL from one device", "top-1 of it", "of the spread")


@dataclass(frozen=True)
class RouteFigures:
    """Figures of one route: how near it is to the reference and to one device."""

    name: str
    reference: Summary  # compared with the reference file
    one_device: Summary  # compared with the same file on one device


@dataclass(frozen=True)
class RouteComparison:
    """Figures of all routes: one device first, then the settings of llama.cpp that make up the spread, then the
    others."""

    results: Sequence[RouteFigures]
    n_settings: int

    @property
    def spread(self) -> float:
        """The largest mean divergence from one device among llama.cpp's own settings on it."""
        return max(result.one_device.mean_divergence for result in self.results[1 : 1 + self.n_settings])

    def in_spreads(self, result: RouteFigures) -> float:
        """Return a route's divergence from one device in units of the spread; 0 if both are 0."""
        mean = result.one_device.mean_divergence
        return mean / self.spread if self.spread else (0.0 if mean == 0 else float("inf"))

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as docs/cli/evaluate.md says."""
        return {
            "scored_tokens": self.results[0].reference.tokens,
            "spread": self.spread,
            "routes": [
                {
                    "route": result.name,
                    "setting": 0 < i <= self.n_settings,
                    "perplexity": result.reference.perplexity,
                    "perplexity_error": result.reference.perplexity_error,
                    "mean_divergence": result.reference.mean_divergence,
                    "top_1_agreement": result.reference.top_1_agreement,
                    "one_device": {
                        "mean_divergence": result.one_device.mean_divergence,
                        "divergence_99": result.one_device.divergence_99,
                        "top_1_agreement": result.one_device.top_1_agreement,
                    },
                }
                for i, result in enumerate(self.results)
            ],
        }

    def rows(self) -> list[list[str]]:
        """Return the values of COLUMNS for each route."""
        return [
            [
                result.name,
                f"{result.reference.perplexity:.3f}",
                f"{result.reference.mean_divergence:.5f}",
                f"{100 * result.reference.top_1_agreement:.2f} %",
                f"{result.one_device.mean_divergence:.6f}",
                f"{100 * result.one_device.top_1_agreement:.2f} %",
                f"{self.in_spreads(result):.2f}" if i else "-",
            ]
            for i, result in enumerate(self.results)
        ]


def compare_routes(
    reference: Route,
    one_device: Route,
    settings: Sequence[Route],
    others: Sequence[Route],
    chunks: Chunks,
    n_vocab: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RouteComparison:
    """Compare each route's predictions of `chunks` with those of `reference`, which may have another file, and those of
    `one_device`. settings: of llama.cpp on one device, which make up the spread.

    OSError if the disk has no room for the predictions of both; the errors of engines and deployments.
    """
    routes = (reference, one_device, *settings, *others)
    total = len(routes) * len(chunks) * chunks.scored
    results, done = [], 0
    n_bytes = 4 * len(chunks) * chunks.scored * n_vocab
    with temporary(n_bytes) as first, temporary(n_bytes) as second:
        shape = (len(chunks), chunks.scored, n_vocab)
        of_reference, of_one = (np.memmap(file, np.float32, "w+", shape=shape) for file in (first, second))
        for number, route in enumerate(routes):
            scores = _Scores(len(chunks) * chunks.scored)
            with route.opened() as engine, interrupt_stops(engine):
                for i, place, logits in route.predict(engine, chunks):
                    log_p = log_softmax(logits[np.newaxis])[0]
                    if number == 0:
                        of_reference[i, place] = log_p
                    if number == 1:
                        of_one[i, place] = log_p
                    target = int(chunks.targets(i)[place])
                    if number:
                        scores.add(i * chunks.scored + place, target, log_p, of_reference[i, place], of_one[i, place])
                    done += 1
                    progress(done, total)
            if number:
                results.append(scores.result(route.name))
        del of_reference, of_one
    return RouteComparison(results, len(settings))


class _Scores:
    """Scores of every prediction of one route."""

    def __init__(self, n: int) -> None:
        self._nll = np.full(n, np.nan)
        self._divergence = np.full((2, n), np.nan)  # from the reference, and from one device
        self._agree = np.zeros((2, n), np.bool_)

    def add(self, at: int, target: int, log_p: Floats, *others: Floats) -> None:
        """Add prediction number `at`, compared with the reference's and one device's."""
        self._nll[at] = -float(log_p[target])
        for k, other in enumerate(others):
            self._divergence[k, at] = divergence(other[np.newaxis], log_p[np.newaxis])[0]
            self._agree[k, at] = other.argmax() == log_p.argmax()

    def result(self, name: str) -> RouteFigures:
        """Return the figures of all rows; they are NaN if a row is missing."""
        summaries = (summarize(self._nll, self._divergence[k], self._agree[k]) for k in range(2))
        return RouteFigures(name, *summaries)
