"""Chart of `edge pareto`: plans by latency and throughput or TTFT, with their front and measurements."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from edge.arguments import checked
from edge.errors import PictureError
from edge.models.paths import PathLike
from edge.pictures import front_points, network_fronts
from edge.pictures.canvas import (
    COLORS,
    LINE,
    MARKERS,
    QUIET,
    ROW_LETTERS,
    SIZE_INCHES,
    TEXT,
    Entry,
    Place,
    add_table,
    check_picture,
    draw_steps,
    new_axes,
    save,
    scale,
    short,
    write_title,
)  # fmt: skip
from edge.pictures.front_points import Point, Result
from quant.text import printable

KIND_COLORS = {
    "single": "#5f6b7a",
    "pipeline": "#0b6fb8",
    "tensor": "#d1570f",
    "hybrid": "#0a8f6a",
    "replicas": "#8a3fb5",
}
# Type colors if plans differ in quality. The type with the least divergence gets the first color.
TYPE_COLORS = COLORS[:7]
_MOST_NAMES, _MOST_ROWS = 6, 20


@checked
def write_picture(result: Result, path: PathLike) -> None:
    """Draw the object of `edge pareto --json`, also with --networks, as PNG, 1350 pixels wide: latency (ms) on
    the x axis, throughput on the y axis.

    If TTFT is an objective and throughput is not, the y axis shows TTFT, with the shortest at the top. A table below
    the chart explains the numbered points. The file appears under its name only when it is complete.
    Raises PictureError if the picture cannot be written or there are no plans.
    """
    path = Path(path)
    check_picture(path)
    is_over_networks = "networks" in result
    if not is_over_networks and not front_points.front(result):
        raise PictureError("there is no plan to draw: none fits these devices")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # A letter that the font lacks is drawn as a box.
        if is_over_networks:
            save(network_fronts.figure_of(result), path)
            return
        prompts = front_points.of_first_tokens(result)
        save(_figure(front_points.by_first_token(result) if prompts else result), path)


def _figure(result: Result) -> Any:
    axes = new_axes(SIZE_INCHES)
    shown, faint = front_points.visible_plans(result)
    look = _Look(result)
    for point in faint:
        look.mark(axes, _at(point), point, markersize=4.5, alpha=0.35, markeredgewidth=0, zorder=2)
    for point in shown:
        color, measured = look.color(point), _measured(point)
        if point["knee"]:
            look.mark(axes, _at(point), point, marker="o", markersize=21, alpha=0.22, markeredgewidth=0, zorder=2.5)
        if measured is not None:
            axes.plot(*zip(_predicted(point), measured, strict=True), color=color, linewidth=1, zorder=3.5)
            look.mark(axes, measured, point, markersize=8, markeredgecolor="white", zorder=5)
        look.mark(axes, _predicted(point), point, markersize=8, markerfacecolor="white", markeredgewidth=1.8)
    seen = [_at(point) for point in shown] + [_predicted(point) for point in shown if point["measured"]]
    scale(axes, seen + [_at(point) for point in faint], prompts=front_points.of_first_tokens(result))
    draw_steps(axes, [_at(point) for point in front_points.line(result)], LINE, shaded=True)
    for type_, points in front_points.lines(result).items():
        draw_steps(axes, [_at(point) for point in points], look.type_colors[type_])
    _write_around(axes, result, shown, faint, look)
    add_table(axes, _entries(result, shown, look))
    return axes.figure


def _at(point: Point) -> Place:
    """Return the position of a plan: measured if available, else predicted."""
    return 1e3 * front_points.latency_s(point), front_points.throughput(point)


def _predicted(point: Point) -> Place:
    return 1e3 * point["predicted"]["latency_s"], point["predicted"]["throughput_per_s"]


def _measured(point: Point) -> Place | None:
    measured = point["measured"]
    return (1e3 * measured["latency_s"], measured["throughput_per_s"]) if measured else None


class _Look:
    """Colors and markers of plans. Kinds have colors and types have shapes; the reverse if plans differ in quality."""

    def __init__(self, result: Result) -> None:
        self.types = front_points.several_types(result)
        self.by_type = front_points.has_quality(result)
        self.type_colors = {name: TYPE_COLORS[i % len(TYPE_COLORS)] for i, name in enumerate(self.types)}
        marked = KIND_COLORS if self.by_type else self.types
        self.markers = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(marked)}

    def color(self, point: Point) -> str:
        return self.type_colors[str(point["type"])] if self.by_type else KIND_COLORS.get(point["parallel"], LINE)

    def mark(self, axes: Any, place: Place, point: Point, **how: Any) -> None:
        marker = self.markers.get(str(point["parallel" if self.by_type else "type"]), "o")
        axes.plot(*place, **{"color": self.color(point), "marker": marker, "linestyle": "none", "zorder": 4, **how})


def _write_around(axes: Any, result: Result, shown: Sequence[Point], faint: Sequence[Point], look: _Look) -> None:
    """Write the title, axis labels and legend."""
    counted_unit = front_points.unit(result)
    axes.set_xlabel("latency (ms a token)" if counted_unit == "tokens" else "latency (ms)", fontsize=12, color=TEXT)
    upwards = f"throughput ({counted_unit}/s)"
    if front_points.of_first_tokens(result):
        upwards = f"first token of a prompt of {shown[0]['predicted']['prompt']} tokens (s)"
    axes.set_ylabel(upwards, fontsize=12, color=TEXT)
    at_once = f"; {result['concurrency']} {'sequences' if counted_unit == 'tokens' else 'inputs'} at once"
    if look.by_type:
        at_once += "; nats: divergence from the model"
    on = front_points.first_few(front_points.names(result), _MOST_NAMES)
    write_title(axes, result["model"], f"on {on}{at_once}")
    has_knee = front_points.knee(result) and len(front_points.front(result)) > 1
    explanations = [f"Knee: {front_points.KNEE}."] if has_knee else []
    explanations += [f"Dominated: {front_points.DOMINATED}."] if faint else []
    handles = list(_legend(result, shown, faint, look))
    legend = axes.figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles) if len(handles) <= (5 if look.by_type else 7) else min(6, (len(handles) + 1) // 2),
        frameon=False,
        title="  ".join(explanations),
        title_fontproperties={"size": 10},
        fontsize=11,
        labelcolor=TEXT,
        handlelength=1.1,
        handletextpad=0.5,
        columnspacing=1.4,
    )
    legend.get_title().set_color(QUIET)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _legend(result: Result, shown: Sequence[Point], faint: Sequence[Point], look: _Look) -> Iterable[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def entry(label: str, **how: Any) -> Any:
        return Line2D([], [], **{"color": LINE, "marker": "o", "linestyle": "none", "label": label, **how})

    kinds = {point["parallel"] for point in (*shown, *faint)}
    if look.by_type:
        for name, color in look.type_colors.items():
            yield Patch(color=color, label=printable(front_points.type_label(result, name)))
    else:
        yield from (Patch(color=color, label=kind) for kind, color in KIND_COLORS.items() if kind in kinds)
    for name, marker in look.markers.items():
        if not look.by_type or name in kinds:
            yield entry(printable(name), marker=marker, markersize=7)
    yield entry("predicted", markerfacecolor="white", markeredgewidth=1.8, markersize=8)
    if any(point["measured"] for point in shown):
        yield entry("measured", markersize=8, markeredgecolor="white")
    if faint:
        left_out = len(result["points"]) - len(shown) - len(faint)
        outside = f" ({left_out} more beyond)" if left_out else ""
        yield entry(f"dominated{outside}", markersize=4.5, alpha=0.5, markeredgewidth=0)


def _entries(result: Result, shown: Sequence[Point], look: _Look) -> list[Entry]:
    """Return entries for plans with a role, and for other plans up to _MOST_ROWS, by latency."""
    roles = front_points.roles(result)
    chosen = sorted(shown, key=lambda point: point["id"] not in roles)[:_MOST_ROWS]
    entries = []
    for point in front_points.in_order(chosen):
        latency, throughput = _at(point)
        upwards = f"{front_points.figure(throughput)} {front_points.unit(result)}/s"
        if front_points.of_first_tokens(result):
            upwards = f"first token {front_points.figure(1 / throughput)} s"
        words = ", ".join((f"{front_points.figure(latency)} ms", upwards, *roles.get(point["id"], ())))
        text = short(f"{words}: {point['label']}", ROW_LETTERS)
        entries.append(Entry(short(point["id"], 8), _at(point), text, look.color(point), bool(point["knee"])))
    return entries
