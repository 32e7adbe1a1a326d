"""Fits a model to several sizes, and writes one file that holds them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from devices.files import temporary_beside
from edge.quantization.fit import FitOptions, Fitted, Progress, fit_file
from quant.gguf.elastic import plan_elastic, write_elastic
from quant.gguf.file import GgufFile
from quant.whole_file import check_room


@dataclass(frozen=True)
class FittedSizes:
    """A file that holds a model in several sizes."""

    fits: Sequence[Fitted]  # the largest first
    predicted_bytes: int  # of the file, before it was written
    n_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as docs/cli/quantize.md says."""
        return {
            "type": "elastic",
            "predicted_bytes": self.predicted_bytes,
            "size_bytes": self.n_bytes,
            "sizes": [
                {
                    "size_bytes": fitted.outcome.n_bytes,
                    "expected_divergence": fitted.expected_divergence,
                    "measured_divergence": fitted.measured_divergence,
                    "types": {name: kind.name for name, kind in fitted.outcome.types.items()},
                }
                for fitted in self.fits
            ],
        }


def budgets_between(least: int, most: int, n: int) -> list[int]:
    """Return `n` sizes, two or more, from `least` to `most` bytes, each as many times the one before."""
    if least == most:
        return [most]
    return [round(least * (most / least) ** (k / (n - 1))) for k in range(n)]


def fit_sizes(
    file: GgufFile,
    out: Path,
    budgets: Sequence[int],
    text: str,
    options: FitOptions,
    progress: Progress,
    predicted: Callable[[int], None] = lambda n_bytes: None,
) -> FittedSizes:
    """Write a model to `out` in files of at most `budgets` bytes, all in one: each size is what `fit_file` writes.

    predicted: called with the bytes of the file before it is written. While that is made, all sizes lie beside it. The
    errors of `fit_file`.
    """
    check_room(out, 2 * sum(min(budget, file.size_bytes) for budget in budgets))
    each = replace(options, within_s=options.within_s / len(budgets))
    with ExitStack() as stack:
        fits: list[tuple[Fitted, Path]] = []
        for budget in sorted(budgets):  # the smallest may be too small
            path = stack.enter_context(temporary_beside(out, ".gguf"))
            fitted = fit_file(file, path, budget, text, each, progress)
            if not fits or fitted.outcome.types != fits[-1][0].outcome.types:
                fits.append((fitted, path))
        fits.reverse()
        plan = plan_elastic([GgufFile.open(path) for _, path in fits], [fit.measured_divergence for fit, _ in fits])
        predicted(plan.n_bytes)
        write_elastic(plan, out)
    return FittedSizes([fitted for fitted, _ in fits], plan.n_bytes, out.stat().st_size)
