"""Common parts of scatter charts: axes, numbered points with a table below, and saving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devices.files import temporary_beside
from edge.errors import PictureError

SIZE_INCHES = (9.0, 6.0)  # size without the table
TEXT, GRID, DPI = "#222222", "#e4e7eb", 150
_ROW_INCHES = 0.19  # height of a row in the table

Place = tuple[float, float]


@dataclass(frozen=True)
class Entry:
    """Numbered point of a chart and its row in the table below."""

    number: str
    place: Place  # in axis units
    text: str
    color: str
    bold: bool = False


def check_picture(path: Path) -> None:
    """Raise PictureError if no picture can be drawn or written to `path`. Called before any computation."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PictureError('a picture needs matplotlib; pip install "edge-runtime[quantize]"') from None
    if path.suffix.lower() != ".png":
        raise PictureError(f"{path}: pictures are PNG, so its name must end in .png")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise PictureError(f"{path}: expected the name of a file in a folder that exists")


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
    """Write a figure as PNG. The file appears under its name only when it is complete."""
    with temporary_beside(path) as temporary:
        figure.savefig(temporary, format="png", dpi=DPI)
        temporary.replace(path)


def add_table(axes: Any, entries: Sequence[Entry]) -> None:
    """Write each number at the upper left of its point, and a table of all entries below the chart.

    The picture grows by the height of the table.
    """
    from matplotlib.patheffects import withStroke

    figure = axes.figure
    width, height = figure.get_size_inches()
    table_height = _ROW_INCHES * len(entries)
    figure.set_size_inches(width, height + table_height)
    grid = figure.add_gridspec(2, 1, height_ratios=(height, table_height))
    axes.set_subplotspec(grid[0])
    below = figure.add_subplot(grid[1], xlim=(0, 1), ylim=(len(entries), 0))
    below.set_axis_off()
    for row, entry in enumerate(entries):
        look = {"color": entry.color, "fontweight": "bold" if entry.bold else "normal", "parse_math": False}
        axes.annotate(
            entry.number,
            entry.place,
            (-5, 3),
            textcoords="offset points",
            horizontalalignment="right",
            fontsize=10,
            path_effects=[withStroke(linewidth=3, foreground="white", alpha=0.85)],
            zorder=6,
            **look,
        )
        for x, text, side in ((0.05, entry.number, "right"), (0.065, entry.text, "left")):
            below.text(x, row + 0.5, text, fontsize=9, verticalalignment="center", horizontalalignment=side, **look)
