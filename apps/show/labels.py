"""Labels in a picture: each beside its point, and none on another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

_BESIDE = 9.0  # pixels at 100 dots an inch between a point and a label beside it
_DISTANCES = (_BESIDE, 18.0, 28.0, 40.0, 54.0, 70.0)
_ANGLES = (45, 30, 60, 0, 90, -135, -150, -120, 180, -90, 135, -45, 150, 120, -30, -60)  # the best first
_OUTSIDE, _OVERLAP, _CROSSED = 1000.0, 300.0, 60.0  # what these cost, beside pixels that it is far away
_RADIUS = 6  # pixels at 100 dots an inch of a point, with some room

_Place = tuple[float, float]


@dataclass(frozen=True)
class Label:
    """What is written beside one of the points."""

    point: int  # its number
    text: str
    color: str
    size: float  # of the letters
    bold: bool = False
    farther: float = 0.0  # pixels at 100 dots an inch, for a point that is drawn larger
    optional: bool = False  # beside its point, or left out where it is crowded


class _Box(NamedTuple):
    """A rectangle in pixels."""

    x0: float
    y0: float
    x1: float
    y1: float

    def overlaps(self, other: _Box) -> bool:
        return self.x0 <= other.x1 and other.x0 <= self.x1 and self.y0 <= other.y1 and other.y0 <= self.y1

    def contains(self, place: _Place) -> bool:
        return self.x0 <= place[0] <= self.x1 and self.y0 <= place[1] <= self.y1


def add_labels(
    axes: Any,
    labels: Iterable[Label],
    points: Sequence[_Place],
    line: Sequence[_Place] = (),
    faint: Sequence[_Place] = (),
) -> None:
    """Write each label beside its point; farther away, with a line to its point, where it is crowded. The first ones
    have the best places.

    points: those drawn, in the units of the data, which no label may cover. line, faint: a line, and points, that a
    label may cover where nothing else is left. All but the labels must have been drawn, as sizes follow from that.
    """
    from matplotlib.patheffects import withStroke

    figure = axes.figure
    renderer = figure.canvas.get_renderer()
    pixel = figure.dpi / 100
    at = _in_pixels(axes, points)
    radius = _RADIUS * pixel
    taken = [_Box(x - radius, y - radius, x + radius, y + radius) for x, y in at]
    legend = axes.get_legend()
    if legend is not None:
        taken.append(_Box(*legend.get_window_extent(renderer).extents))
    drawn, unimportant = _along(_in_pixels(axes, line)), _in_pixels(axes, faint)
    inside = _Box(*axes.get_window_extent(renderer).extents)
    for label in labels:
        i = label.point
        text = axes.text(
            *points[i],
            label.text,
            fontsize=label.size,
            fontweight="bold" if label.bold else "normal",
            color=label.color,
            verticalalignment="bottom",
            parse_math=False,
            path_effects=[withStroke(linewidth=3, foreground="white", alpha=0.85)],
            zorder=3.2,
        )
        extent = text.get_window_extent(renderer)
        others = [box for j, box in enumerate(taken) if j != i]
        tried = (
            (_box(at[i], extent.width, extent.height, (far + label.farther) * pixel, angle), far, rank)
            for far in _DISTANCES[: 1 if label.optional else None]
            for rank, angle in enumerate(_ANGLES)
        )
        cost, box, far = min(
            (_cost(box, far, rank, at[i], inside, others, drawn, unimportant), box, far) for box, far, rank in tried
        )
        if label.optional and cost >= _OVERLAP:
            text.remove()
            continue
        taken.append(box)
        text.set_position(axes.transData.inverted().transform((box.x0, box.y0)))
        if far > _BESIDE:
            end = axes.transData.inverted().transform(_nearest(box, at[i]))
            axes.plot(*zip(points[i], end, strict=True), color=label.color, linewidth=0.7, zorder=1.5)


def _in_pixels(axes: Any, places: Sequence[_Place]) -> list[_Place]:
    return [tuple(axes.transData.transform(place)) for place in places]


def _box(at: _Place, width: float, height: float, far: float, angle: float) -> _Box:
    """Where a label of this size lies in a direction (degrees) from a point, so far that they do not touch."""
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    left = at[0] + far * cos - width * (1 - cos) / 2
    low = at[1] + far * sin - height * (1 - sin) / 2
    return _Box(left, low, left + width, low + height)


def _cost(
    box: _Box,
    far: float,
    rank: int,
    at: _Place,
    inside: _Box,
    taken: Sequence[_Box],
    drawn: Sequence[_Place],
    unimportant: Sequence[_Place],
) -> float:
    """How bad a place for a label is: it or its line covers others, or the line, or it is far away."""
    outside = not (inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1)
    overlapped = sum(1 for other in taken if box.overlaps(other))
    leader = _along([at, _nearest(box, at)]) if far > _BESIDE else []
    crossed = sum(1 for other in taken if any(other.contains(place) for place in leader))
    on_line, on_faint = (sum(1 for place in places if box.contains(place)) for places in (drawn, unimportant))
    beside = sum(1 for a in leader[3:] if any(math.dist(a, b) < 5 for b in drawn))
    worst = _OUTSIDE * outside + _OVERLAP * overlapped + _CROSSED * crossed
    return worst + 12 * min(on_line, 20) + 3 * min(on_faint, 10) + 3 * beside + far + 0.6 * rank


def _along(line: Sequence[_Place]) -> list[_Place]:
    """Places in pixels, close to each other, along a line through some."""
    found = []
    for (x0, y0), (x1, y1) in pairwise(line):
        n = 1 + int(math.hypot(x1 - x0, y1 - y0) / 4)
        found += [(x0 + (x1 - x0) * i / n, y0 + (y1 - y0) * i / n) for i in range(n + 1)]
    return found


def _nearest(box: _Box, at: _Place) -> _Place:
    """The place of a box that is nearest to a point."""
    return min(max(at[0], box.x0), box.x1), min(max(at[1], box.y0), box.y1)
