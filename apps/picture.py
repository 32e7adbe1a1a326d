"""A picture of models: size against how far they are from what they were made from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from apps.options import UsageError
from devices.files import temporary_beside

_MB = 1e6
_SIZE_INCHES, _DPI = (8.0, 5.0), 150
_TEXT, _LINE, _POINT, _CHOSEN = "#222222", "#9aa5b1", "#33658a", "#d1495b"
_BESIDE = 9.0  # pixels at 100 dots an inch between a point and a label beside it
_DISTANCES = (_BESIDE, 18.0, 28.0, 40.0, 54.0, 70.0)
_ANGLES = (45, 30, 60, 0, 90, -135, -150, -120, 180, -90, 135, -45, 150, 120, -30, -60)  # the best first

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
    _add_labels(axes, points, places, chosen, line)
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


def _add_labels(
    axes: Any, points: Sequence[Point], places: Sequence[_Place], chosen: str | None, line: Sequence[_Place]
) -> None:
    """A label beside each point; farther away, with a line to its point, where it is crowded. The chosen goes first."""
    from matplotlib.transforms import Bbox

    figure = axes.figure
    renderer = figure.canvas.get_renderer()
    pixel = figure.dpi / 100
    at: list[_Place] = [tuple(axes.transData.transform(place)) for place in places]
    radius = 6 * pixel
    taken = [Bbox.from_extents(x - radius, y - radius, x + radius, y + radius) for x, y in at]
    legend = axes.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent(renderer))
    drawn = _along([tuple(axes.transData.transform(place)) for place in line])
    for i in sorted(range(len(points)), key=lambda i: (points[i].label != chosen, places[i])):
        point, is_chosen = points[i], points[i].label == chosen
        text = axes.text(
            *places[i],
            point.label + (" (0)" if point.divergence <= 0 else ""),
            fontsize=12 if is_chosen else 10.5,
            fontweight="bold" if is_chosen else "normal",
            color=_CHOSEN if is_chosen else _TEXT,
            verticalalignment="bottom",
            zorder=4,
        )
        extent = text.get_window_extent(renderer)
        others = [box for j, box in enumerate(taken) if j != i]
        tried = (
            (_box(at[i], extent.width, extent.height, (far + 5 * is_chosen) * pixel, angle), far, rank)
            for far in _DISTANCES
            for rank, angle in enumerate(_ANGLES)
        )
        inside = axes.get_window_extent(renderer)
        box, far, _ = min(tried, key=lambda one: _cost(one[0], one[1], one[2], at[i], inside, others, drawn))
        taken.append(box)
        text.set_position(axes.transData.inverted().transform((box.x0, box.y0)))
        if far > _BESIDE:
            end = axes.transData.inverted().transform(_nearest(box, at[i]))
            axes.plot(*zip(places[i], end, strict=True), color=_TEXT, linewidth=0.7, zorder=1.5)


def _box(at: _Place, width: float, height: float, far: float, angle: float) -> Any:
    """Where a label of this size lies in a direction (degrees) from a point, so far that they do not touch."""
    from matplotlib.transforms import Bbox

    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    left = at[0] + far * cos - width * (1 - cos) / 2
    low = at[1] + far * sin - height * (1 - sin) / 2
    return Bbox.from_bounds(left, low, width, height)


def _cost(
    box: Any, far: float, rank: int, at: _Place, inside: Any, taken: Sequence[Any], drawn: Sequence[_Place]
) -> float:
    """How bad a place for a label is: it or its line covers others, or the line of types, or it is far away."""
    outside = not (inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1)
    covered = sum(1 for other in taken if box.overlaps(other))
    leader = _along([at, _nearest(box, at)]) if far > _BESIDE else []
    crossed = sum(1 for other in taken if any(other.contains(*place) for place in leader))
    on_line = sum(1 for place in drawn if box.contains(*place))
    beside = sum(1 for a in leader[3:] if any(math.dist(a, b) < 5 for b in drawn))
    return 1000 * outside + 300 * covered + 60 * crossed + 4 * min(on_line, 15) + 3 * beside + far + 0.6 * rank


def _along(line: Sequence[_Place]) -> list[_Place]:
    """Places in pixels, close to each other, along a line through some."""
    found = []
    for (x0, y0), (x1, y1) in pairwise(line):
        n = 1 + int(math.hypot(x1 - x0, y1 - y0) / 4)
        found += [(x0 + (x1 - x0) * i / n, y0 + (y1 - y0) * i / n) for i in range(n + 1)]
    return found


def _nearest(box: Any, at: _Place) -> _Place:
    """The place of a box that is nearest to a point."""
    return min(max(at[0], box.x0), box.x1), min(max(at[1], box.y0), box.y1)
