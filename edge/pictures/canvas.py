"""Canvas for pictures of points: axes, labels that do not cover points or each other, and saving."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from devices.files import temporary_beside
from edge.errors import PictureError

SIZE_INCHES = (9.0, 6.0)  # of a picture of points with names
TEXT, GRID, DPI = "#222222", "#e4e7eb", 150
_BESIDE = 9.0  # pixels at 100 dots an inch between a point and its label
_DISTANCES = (_BESIDE, 18.0, 28.0, 40.0, 54.0, 70.0, 90.0, 115.0, 145.0)
_ANGLES = (45, 30, 60, 0, 90, -135, -150, -120, 180, -90, 135, -45, 150, 120, -30, -60)  # best first
_OUTSIDE, _OVERLAP, _CROSSED = 1000.0, 600.0, 60.0  # penalties, added to the distance in pixels
_RADIUS = 6  # pixels at 100 dots an inch of a point, with some room
_STEPS = 100  # samples along each part of a line that labels keep away from

Place = tuple[float, float]


@dataclass(frozen=True)
class Label:
    """Label of one of the points."""

    point: int  # number of the point
    text: str
    color: str
    size: float  # of the letters
    bold: bool = False
    farther: float = 0.0  # extra pixels at 100 dots an inch, for a point that is drawn larger
    optional: bool = False  # placed right beside its point, or left out if there is no room


def check_picture(path: Path) -> None:
    """Raise PictureError if no picture can be drawn or written there. Called before anything is computed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PictureError('a picture needs matplotlib; pip install "edge-runtime[quantize]"') from None
    if path.suffix.lower() != ".png":
        raise PictureError(f"{path}: pictures are PNG, so its name must end in .png")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise PictureError(f"{path}: needed is the name of a file in a folder that exists")


def new_axes(size_inches: tuple[float, float]) -> Any:
    """Return matplotlib axes with a grid, alone in a figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inches, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(visible=True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=11, colors=TEXT)
    return axes


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG. The file appears under its name only when it is whole."""
    with temporary_beside(path) as temporary:
        figure.savefig(temporary, format="png", dpi=DPI)
        temporary.replace(path)


def add_labels(
    axes: Any,
    labels: Iterable[Label],
    points: Sequence[Place],
    line: Sequence[Place] = (),
    faint: Sequence[Place] = (),
) -> None:
    """Write each label beside its point, or farther away with a line to its point if it is crowded. The first labels
    get the best places.

    points: drawn points, in the units of the data, which no label may cover. line, faint: a line, and points, that a
    label may cover if no other place is left. All but the labels must have been drawn, because sizes follow from that.
    """
    from matplotlib.path import Path as Line
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    figure = axes.figure
    figure.draw_without_rendering()  # computes the layout
    renderer, pixel = figure.canvas.get_renderer(), figure.dpi / 100
    at, drawn, unimportant = (
        axes.transData.transform(np.reshape(np.asarray(places, np.float64), (-1, 2)))
        for places in (points, line, faint)
    )
    drawn = Line(drawn).interpolated(_STEPS).vertices if len(drawn) > 1 else drawn
    radius = _RADIUS * pixel
    occupied = [Bbox.from_extents(x - radius, y - radius, x + radius, y + radius) for x, y in at]
    if (legend := axes.get_legend()) is not None:
        occupied.append(legend.get_window_extent(renderer))
    inside = axes.get_window_extent(renderer)

    def cost(box: Any, point: Any, far: float, rank: int) -> float:
        """Return the cost of a place: the label or its line covers others, or the line, or it is far away."""
        outside = not all(inside.contains(x, y) for x, y in (box.min, box.max))
        leader = Line([point, _nearest(box, point)]) if far > _BESIDE else None
        crossed = sum(leader.intersects_bbox(other) for other in occupied) if leader else 0
        worst = _OUTSIDE * outside + _OVERLAP * box.count_overlaps(occupied) + _CROSSED * crossed
        on_line, on_faint = box.count_contains(drawn), box.count_contains(unimportant)
        return float(worst + 12 * min(on_line, 20) + 3 * min(on_faint, 10) + far + 0.6 * rank)

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
        size = text.get_window_extent(renderer).size
        tried = []
        for far in _DISTANCES[: 1 if label.optional else None]:
            for rank, angle in enumerate(_ANGLES):
                low = _corner(at[i], size, (far + label.farther) * pixel, angle)
                box = Bbox([low, low + size])
                tried.append((cost(box, at[i], far, rank), far, box))
        least, far, box = min(tried, key=lambda place: place[:2])
        if label.optional and least >= _OVERLAP:
            text.remove()
            continue
        occupied.append(box)
        to_data = axes.transData.inverted().transform
        text.set_position(to_data(box.min))
        if far > _BESIDE:
            end = to_data(_nearest(box, at[i]))
            axes.plot(*zip(points[i], end, strict=True), color=label.color, linewidth=0.7, zorder=1.5)


def _corner(at: Any, size: Any, far: float, angle: float) -> Any:
    """Return the lower left corner of a label of this size in a direction (degrees) from a point, so far away that they
    do not touch."""
    direction = np.array((math.cos(math.radians(angle)), math.sin(math.radians(angle))))
    return at + far * direction - size * (1 - direction) / 2


def _nearest(box: Any, at: Any) -> Any:
    """Return the place of a box that is nearest to a point."""
    return np.clip(at, box.min, box.max)
