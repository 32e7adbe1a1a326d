"""Comparison of routes through a model: perplexity, and divergence from a reference and from one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge.llama.interrupt import interrupt_stops
from edge.quantization.divergence import Chunks, Scores, Summary, log_softmax
from edge.quantization.evaluate import temporary
from edge.quantization.routes import Route

COLUMNS = ("route", "perplexity", "mean KL", "top-1", "KL from one device", "top-1 of it", "of the spread")


@dataclass(frozen=True)
class RouteFigures:
    """Figures of one route: its agreement with the reference and with one device."""

    name: str
    reference: Summary  # comparison with the reference file
    one_device: Summary  # comparison with the same file on one device


@dataclass(frozen=True)
class RouteComparison:
    """Figures of all routes: first one device, then the llama.cpp settings that define the spread, then other
    routes."""

    results: Sequence[RouteFigures]
    n_settings: int

    @property
    def spread(self) -> float:
        """The largest mean divergence from one device among llama.cpp's own settings on that device."""
        return max(result.one_device.mean_divergence for result in self.results[1 : 1 + self.n_settings])

    def in_spreads(self, result: RouteFigures) -> float:
        """Return a route's divergence from one device in units of the spread; 0 if both are 0."""
        mean = result.one_device.mean_divergence
        return mean / self.spread if self.spread else (0.0 if mean == 0 else float("inf"))

    def to_json(self) -> dict[str, Any]:
        """Return plain values in the format of docs/cli/evaluate.md."""
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
    """Compare each route's predictions of `chunks` with the predictions of `reference` and `one_device`.

    reference: route that may use another file
    settings: routes with llama.cpp settings on one device, which define the spread

    Raises OSError if the disk has no room for the predictions of both. Raises the errors of engines and deployments.
    """
    routes = (reference, one_device, *settings, *others)
    total = len(routes) * len(chunks) * chunks.scored
    results, done = [], 0
    n_bytes = 4 * len(chunks) * chunks.scored * n_vocab
    with temporary(n_bytes) as first, temporary(n_bytes) as second:
        shape = (len(chunks), chunks.scored, n_vocab)
        of_reference, of_one = (np.memmap(file, np.float32, "w+", shape=shape) for file in (first, second))
        for number, route in enumerate(routes):
            scores = Scores(len(chunks) * chunks.scored, 2)
            with route.opened() as engine, interrupt_stops(engine):
                for i, place, logits in route.predict(engine, chunks):
                    log_p, row = log_softmax(logits[np.newaxis]), slice(place, place + 1)
                    if number == 0:
                        of_reference[i, row] = log_p
                    if number == 1:
                        of_one[i, row] = log_p
                    if number:
                        at = i * chunks.scored + place
                        scores.add(at, chunks.targets(i)[row], log_p, of_reference[i, row], of_one[i, row])
                    done += 1
                    progress(done, total)
            if number:
                results.append(RouteFigures(route.name, *scores.summaries()))
        del of_reference, of_one
    return RouteComparison(results, len(settings))
