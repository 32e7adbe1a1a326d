"""Common parts of scatter charts: axes, numbered points with a table below, and saving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devices.files import temporary_beside
from edge.errors import PictureError
from edge.pictures.front_points import LOG_FROM
from edge.pictures.front_points import figure as figure_text
from quant.text import printable

SIZE_INCHES = (9.0, 6.0)  # size without the table
TEXT, GRID, DPI = "#222222", "#e4e7eb", 150
QUIET, LINE, _FILL = "#616e7c", "#52606d", "#f0f4f8"
# Types and networks have these colors, in this order.
COLORS = ("#0b6fb8", "#0a8f6a", "#a17400", "#d1570f", "#b3246b", "#6b4fbb", "#5f6b7a", "#222222")
MARKERS = "os^DvPXph<>*"  # shapes of types, networks or kinds
ROW_LETTERS = 105  # letters of a row in the table
_TITLE_LETTERS, _UNDER_LETTERS = 55, 100
_FINE = (1, 1.25, 2, 2.5, 4, 5, 8)  # tick multiples of the first-tokens-per-second axis
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


def scale(axes: Any, places: Sequence[Place], *, prompts: bool) -> None:
    """Set the axis ranges with a margin, and logarithmic scales if values span a large factor.

    prompts: the y axis has first tokens per second, and its ticks show seconds.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for values, set_scale, set_range, axis in (
        ([x for x, _ in places], axes.set_xscale, axes.set_xlim, axes.xaxis),
        ([y for _, y in places], axes.set_yscale, axes.set_ylim, axes.yaxis),
    ):
        low, high = min(values), max(values)
        in_seconds = prompts and axis is axes.yaxis
        if low > 0 and (high > LOG_FROM * low or in_seconds):
            set_scale("log")
            room = (high / low) ** 0.08
            set_range(low / room, high * room)
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_minor_formatter(NullFormatter())
        else:
            room = 0.1 * (high - low) or 0.2 * high or 1.0
            set_range(max(0.0, low - room), high + room)
        shown = FuncFormatter(
            lambda value, _, inverse=in_seconds: figure_text(1 / value if inverse and value else value)
        )
        axis.set_major_formatter(shown)
        if in_seconds:
            axis.set_major_locator(LogLocator(subs=_FINE))


def draw_steps(axes: Any, places: Sequence[Place], color: str, *, shaded: bool = False) -> None:
    """Draw the staircase line of these places, from the left. shaded: fill the area that it dominates."""
    (_, right), (low, _) = axes.get_xlim(), axes.get_ylim()
    corners: list[Place] = []
    height = low
    for x, y in places:
        corners += [(x, height), (x, y)]
        height = y
    corners.append((right, height))
    if shaded:
        axes.fill_between(*zip(*corners, strict=True), low, color=_FILL, linewidth=0, zorder=0.5)
    axes.plot(*zip(*corners, strict=True), color=color, linewidth=1.6, zorder=3, solid_joinstyle="miter")


def write_title(axes: Any, title: str, under: str) -> None:
    """Write the title of a chart, and a line of explanation below it."""
    text = axes.set_title(short(title), fontsize=15, fontweight="bold", color=TEXT, loc="left", pad=26)
    text.set_parse_math(False)
    axes.annotate(
        short(under, _UNDER_LETTERS),
        (0, 1),
        (0, 9),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=11.5,
        color=QUIET,
        parse_math=False,
    )


def short(text: str, most: int = _TITLE_LETTERS) -> str:
    """Return a text without control characters, cut after `most` letters."""
    text = printable(text)
    return text if len(text) <= most else text[: most - 3] + "..."
