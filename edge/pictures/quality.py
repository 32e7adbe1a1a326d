"""Chart of models: size against divergence from their reference model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.errors import PictureError
from edge.pictures.canvas import TEXT, Entry, Place, add_table, check_picture, new_axes, save
from edge.quantization.comparison import Evaluation

_MB = 1e6
_SIZE_INCHES = (8.0, 5.0)
_LINE, _POINT, _CHOSEN = "#9aa5b1", "#33658a", "#d1495b"


@dataclass(frozen=True)
class ModelPoint:
    """Model of the chart."""

    label: str
    size_bytes: int
    divergence: float  # mean, in nats
    uniform: bool = False  # True: one of llama.cpp's own types, which are joined by a line


def size_against_divergence(
    points: Sequence[ModelPoint], chosen: str | None, path: Path, *, reference: str = ""
) -> None:
    """Draw `points` as PNG: megabytes on the x axis, mean KL divergence (nats, logarithmic) on the y axis.

    chosen: label of the highlighted model.
    reference: name of the model that all others are compared with.
    A divergence of 0 is drawn at the bottom. The file appears under its name only when it is complete.
    Raises PictureError if the picture cannot be written or there are no points.
    """
    check_picture(path)
    if not points:
        raise PictureError("there is no model to draw; give some to compare with the reference")
    save(_figure(points, chosen, reference), path)


def draw_evaluation(evaluation: Evaluation, path: Path, *, like: str | None = None) -> None:
    """Draw size against divergence from the first model as PNG.

    like: name of the highlighted model among llama.cpp's own types. None: no model is highlighted.
    Raises the errors of `size_against_divergence`.
    """
    reference, *names = (name.removesuffix(".gguf") for name in evaluation.names)
    chosen = like.removesuffix(".gguf") if like is not None else None
    if like is None:
        names = without_common_start([reference, *names])[1:]
    points = [
        ModelPoint(name, result.size_bytes, result.summary.mean_divergence, uniform=like is not None and name != chosen)
        for name, result in zip(names, evaluation.results[1:], strict=True)
    ]
    size_against_divergence(points, chosen, path, reference=reference)


def without_common_start(names: Sequence[str]) -> list[str]:
    """Return the names without the words that all names begin with: "q4_0" for "demo-q4_0" next to "demo-f16"."""
    letters = enumerate(zip(*names, strict=False))
    differ = next((i for i, at_i in letters if len(set(at_i)) > 1), min(map(len, names)))
    end = 1 + max(names[0].rfind(mark, 0, differ) for mark in "-./")
    return [name[end:] or name for name in names]


def _figure(points: Sequence[ModelPoint], chosen: str | None, reference: str) -> Any:
    from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

    axes = new_axes(_SIZE_INCHES)
    foot = _foot(points)
    places = [(point.size_bytes / _MB, _drawn(point, foot)) for point in points]
    line = sorted(place for place, point in zip(places, points, strict=True) if point.uniform)
    if len(line) > 1:
        axes.plot(*zip(*line, strict=True), color=_LINE, linewidth=1.5, zorder=1, label="uniform types")
    all_uniform = all(point.uniform for point in points)
    for place, point in zip(places, points, strict=True):
        stands_out = point.label == chosen
        axes.plot(
            *place,
            marker="*" if stands_out else "o",
            markersize=17 if stands_out else 7,
            color=_CHOSEN if stands_out else _LINE if point.uniform and not all_uniform else _POINT,
            markeredgecolor="white",
            linestyle="none",
            zorder=3 if stands_out else 2,
        )
    axes.set_yscale("log")
    axes.margins(x=0.12, y=0.12)
    low, high = (end(y for _, y in places) for end in (min, max))
    if high < 10 * low:  # Show more than a decade, so that the axis has numbers.
        middle = math.sqrt(low * high)
        axes.set_ylim(middle / 5, middle * 5)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(2, 2)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("size (MB)", fontsize=12, color=TEXT)
    to = f" from {reference}" if reference else ""
    axes.set_ylabel("mean KL divergence (nats)", fontsize=12, color=TEXT)
    axes.set_title(f"Size against mean KL divergence{to}", fontsize=13, color=TEXT, loc="left", wrap=True)
    if len(line) > 1:
        axes.legend(frameon=False, fontsize=11, labelcolor=TEXT)
    add_table(axes, list(_entries(points, places, chosen)))
    return axes.figure


def _foot(points: Sequence[ModelPoint]) -> float:
    """Return the height for a divergence of 0, below all other points."""
    positive = [point.divergence for point in points if point.divergence > 0 and math.isfinite(point.divergence)]
    return min(positive, default=1e-6) / 3


def _drawn(point: ModelPoint, foot: float) -> float:
    """Return the height of a point. A broken model has infinite divergence, which is drawn very high."""
    if not math.isfinite(point.divergence):
        return 1e3
    return point.divergence if point.divergence > 0 else foot


def _entries(points: Sequence[ModelPoint], places: Sequence[Place], chosen: str | None) -> Iterable[Entry]:
    """Yield an entry for each point, smallest model first."""
    for number, (place, point) in enumerate(sorted(zip(places, points, strict=True), key=lambda pair: pair[0]), 1):
        is_chosen = point.label == chosen
        text = f"{point.label}: {place[0]:.3g} MB, {point.divergence:.3g} nats"
        yield Entry(str(number), place, text, _CHOSEN if is_chosen else TEXT, is_chosen)
