"""Chart of `edge advise`: models by answer time and size, with the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge.errors import PictureError
from edge.pictures.canvas import SIZE_INCHES, TEXT, Entry, add_table, check_picture, new_axes, save

_LINE, _FAINT = "#9aa5b1", "#c3cad2"
_COLORS = {"resident": "#0b6fb8", "spread": "#0a8f6a", "paged": "#d1570f"}
_LINES = ((10.0, "10 s"), (30.0, "30 s"))
_GB = 1e9
_MOST_S = 600.0  # longest answer drawn, in seconds: slower models would compress the rest of the chart


def write_picture(result: Mapping[str, Any], path: Path) -> None:
    """Draw the object of `edge advise --json` as PNG: answer time in seconds on the x axis, gigabytes on the y axis.

    The file appears under its name only when it is complete.
    Raises PictureError if the picture cannot be written or no model fits.
    """
    check_picture(path)
    rows = [row for row in result["rows"] if row["answer_s"] is not None]
    if not rows:
        raise PictureError("no model can be drawn, because none fits these devices")
    save(_figure(result, rows), path)


def _figure(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes = new_axes(SIZE_INCHES)
    rows = [row for row in rows if row["answer_s"] <= _MOST_S] or rows
    places = [(row["answer_s"], row["size_bytes"] / _GB) for row in rows]
    front = [i for i, row in enumerate(rows) if row["on_front"]]
    for row, place in zip(rows, places, strict=True):
        color = _COLORS[row["placement"]]
        look = {"markersize": 8, "markeredgecolor": "white"} if row["on_front"] else {"markersize": 5, "alpha": 0.4}
        axes.plot(*place, marker="o", color=color, linestyle="none", zorder=3, **look)
    axes.plot(*zip(*(places[i] for i in front), strict=True), color=_LINE, linewidth=1.5, zorder=2)
    for scale in (axes.set_xscale, axes.set_yscale):
        scale("log")
    axes.margins(x=0.1, y=0.12)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    low, high = axes.get_xlim()
    for seconds, text in _LINES:
        if low < seconds < high:
            axes.axvline(seconds, color=_FAINT, linestyle="--", linewidth=1.2, zorder=1)
            axes.annotate(text, (seconds, 1), (3, -12), xycoords=("data", "axes fraction"), textcoords="offset points",
                          fontsize=10, color=TEXT)  # fmt: skip
    words = f"answer of {result['answer_tokens']} tokens to a prompt of {result['prompt_tokens']} (s)"
    axes.set_xlabel(words, fontsize=12, color=TEXT)
    axes.set_ylabel("weights (GB), a proxy for quality", fontsize=12, color=TEXT)
    title = axes.set_title(f"Models on {', '.join(result['devices'][:6])}", fontsize=13, color=TEXT, loc="left")
    title.set_parse_math(False)
    shown = [name for name in _COLORS if any(row["placement"] == name for row in rows)]
    handles = [Line2D([], [], color=_COLORS[name], marker="o", linestyle="none", label=name) for name in shown]
    axes.legend(handles=handles, frameon=False, fontsize=11, labelcolor=TEXT, loc="lower right")
    entries = [
        Entry(
            str(n),
            places[i],
            f"{rows[i]['model']} {rows[i]['type']}: {places[i][0]:.3g} s, {places[i][1]:.3g} GB",
            _COLORS[rows[i]["placement"]],
        )
        for n, i in enumerate(front, 1)
    ]
    add_table(axes, entries)
    return axes.figure
