"""A picture of models: size against how far they are from what they were made from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.errors import UsageError
from apps.show.labels import Label, add_labels
from devices.files import temporary_beside

_MB = 1e6
_SIZE_INCHES, _DPI = (8.0, 5.0), 150
_TEXT, _LINE, _POINT, _CHOSEN = "#222222", "#9aa5b1", "#33658a", "#d1495b"

_Place = tuple[float, float]


@dataclass(frozen=True)
class Point:
    """One model."""

    label: str
    size_bytes: int
    divergence: float  # mean, nats
    uniform: bool = False  # one of llama.cpp's own types; these are joined by a line


def check_picture(path: Path) -> None:
    """UsageError where no picture can be drawn or written there: to be known before anything is computed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError('a picture needs matplotlib; pip install "edge-runtime[quantize]"') from None
    if path.suffix.lower() != ".png":
        raise UsageError(f"{path}: pictures are PNG, so its name must end in .png")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: needed is the name of a file in a folder that exists")


def size_against_divergence(points: Sequence[Point], chosen: str | None, path: Path, *, reference: str = "") -> None:
    """Draw `points` as PNG: megabytes to the right, mean KL divergence (nats, logarithmic) up.

    chosen: the label of the one to stand out. reference: what all are compared with. A divergence of 0 is drawn at the
    foot. The file appears under its name only when it is whole. UsageError as `check_picture`, or without points.
    """
    check_picture(path)
    if not points:
        raise UsageError("there is no model to draw; give some to compare with the reference")
    figure = _figure(points, chosen, reference)
    with temporary_beside(path) as temporary:
        figure.savefig(temporary, format="png", dpi=_DPI)
        temporary.replace(path)


def _figure(points: Sequence[Point], chosen: str | None, reference: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
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
    if len(points) == 1:  # there is no range to show
        axes.set_ylim(places[0][1] / 10, places[0][1] * 10)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="major", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=11, colors=_TEXT)
    axes.set_xlabel("size (MB)", fontsize=12, color=_TEXT)
    to = f" from {reference}" if reference else ""
    axes.set_ylabel("mean KL divergence (nats)", fontsize=12, color=_TEXT)
    axes.set_title(f"Size against mean KL divergence{to}", fontsize=13, color=_TEXT, loc="left", wrap=True)
    if len(line) > 1:
        axes.legend(frameon=False, fontsize=11, labelcolor=_TEXT)
    figure.draw_without_rendering()  # where everything is, is known from here on
    add_labels(axes, _labels(points, places, chosen), places, line)
    return figure


def _foot(points: Sequence[Point]) -> float:
    """Where a divergence of 0 is drawn: below all others."""
    positive = [point.divergence for point in points if point.divergence > 0 and math.isfinite(point.divergence)]
    return min(positive, default=1e-6) / 3


def _drawn(point: Point, foot: float) -> float:
    """The height of a point. Infinity, which a broken model has, is drawn as very far."""
    if not math.isfinite(point.divergence):
        return 1e3
    return point.divergence if point.divergence > 0 else foot


def _labels(points: Sequence[Point], places: Sequence[_Place], chosen: str | None) -> list[Label]:
    """One for each point, the chosen one first."""
    order = sorted(range(len(points)), key=lambda i: (points[i].label != chosen, places[i]))
    return [
        Label(
            i,
            points[i].label + (" (0)" if points[i].divergence <= 0 else ""),
            color=_CHOSEN if points[i].label == chosen else _TEXT,
            size=12 if points[i].label == chosen else 10.5,
            bold=points[i].label == chosen,
            farther=5 if points[i].label == chosen else 0,
        )
        for i in order
    ]
