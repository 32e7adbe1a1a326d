"""Chart of `edge pareto --networks`: the front of each network, by latency and throughput or TTFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge.pictures import front_points
from edge.pictures.canvas import (
    COLORS,
    MARKERS,
    QUIET,
    ROW_LETTERS,
    SIZE_INCHES,
    TEXT,
    Entry,
    Place,
    add_table,
    draw_steps,
    new_axes,
    scale,
    short,
    write_title,
)
from edge.pictures.front_points import Point, Result
from quant.text import number_text, printable

_MOST_NAMES, _MOST_ROWS = 6, 20


def figure_of(result: Result) -> Any:
    """Return the figure. A network has its own color and marker, and plans of equal figures share a number."""
    networks, prompts = result["networks"], front_points.of_first_tokens(result)
    fronts = [front_points.by_first_token(network["front"]) if prompts else network["front"] for network in networks]
    axes = new_axes(SIZE_INCHES)
    scale(axes, [_at(point) for front in fronts for point in front_points.front(front)], prompts=prompts)
    for i, front in enumerate(fronts):
        draw_steps(axes, [_at(point) for point in front_points.line(front)], COLORS[i])
        size = 8 + 2.5 * (len(fronts) - 1 - i)  # An earlier marker shows around a later one at the same place.
        for point in front_points.front(front):
            look = {"markerfacecolor": "none", "markeredgewidth": 1.8, "markersize": size, "linestyle": "none"}
            axes.plot(*_at(point), color=COLORS[i], marker=MARKERS[i], zorder=4, **look)
    _write_around(axes, result, fronts[0], prompts)
    add_table(axes, _entries(networks, fronts, prompts))
    return axes.figure


def network_text(network: Mapping[str, Any]) -> str:
    """Return the name of a network with its rate and delay."""
    return f"{network['name']}: {rate_text(network['bytes_per_s'])}, {delay_text(network['latency_s'])}"


def rate_text(bytes_per_s: float) -> str:
    """Return a bandwidth in Mbit/s."""
    return f"{number_text(bytes_per_s / 125_000)} Mbit/s"


def delay_text(latency_s: float) -> str:
    """Return a delay in milliseconds."""
    return f"{number_text(1e3 * latency_s)} ms"


def _at(point: Point) -> Place:
    return 1e3 * front_points.latency_s(point), front_points.throughput(point)


def _write_around(axes: Any, result: Result, front: Result, prompts: bool) -> None:
    """Write the title, axis labels and legend."""
    from matplotlib.lines import Line2D

    unit = front_points.unit(result)
    axes.set_xlabel("latency (ms a token)" if unit == "tokens" else "latency (ms)", fontsize=12, color=TEXT)
    upwards = f"throughput ({unit}/s)"
    if prompts:
        upwards = f"first token of a prompt of {front['points'][0]['predicted']['prompt']} tokens (s)"
    axes.set_ylabel(upwards, fontsize=12, color=TEXT)
    on = front_points.first_few(front_points.names(result), _MOST_NAMES)
    write_title(axes, result["model"], f"predicted on {on}, over {len(result['networks'])} networks")
    look: dict[str, Any] = {"markerfacecolor": "none", "markeredgewidth": 1.8, "markersize": 8}
    handles = [
        Line2D([], [], color=COLORS[i], marker=MARKERS[i], label=printable(network_text(network)), **look)
        for i, network in enumerate(result["networks"])
    ]
    legend = axes.figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=2 if len(handles) % 3 == 1 else 3,
        frameon=False,
        title="Delays are one way.",
        fontsize=11,
        labelcolor=TEXT,
    )
    legend.get_title().set_color(QUIET)


def _entries(networks: Sequence[Mapping[str, Any]], fronts: Sequence[Result], prompts: bool) -> list[Entry]:
    """Return entries for the ends and the knee of each front first, and for other plans, up to _MOST_ROWS."""
    same: dict[tuple[str, ...], list[tuple[int, Point]]] = {}
    for i, front in enumerate(fronts):
        for point in front_points.front(front):
            key = (point["label"], *map(front_points.figure, _at(point)))
            same.setdefault(key, []).append((i, point))
    roles = [front_points.roles(front) for front in fronts]
    chosen = sorted(same.values(), key=lambda members: not any(p["id"] in roles[i] for i, p in members))[:_MOST_ROWS]
    chosen.sort(key=lambda members: (members[0][0], _at(members[0][1])))
    entries = []
    for number, members in enumerate(chosen, 1):
        first, point = members[0]
        latency, throughput = _at(point)
        upwards = f"first token {front_points.figure(1 / throughput)} s" if prompts else ""
        upwards = upwards or f"{front_points.figure(throughput)} {front_points.unit(fronts[first])}/s"
        names = (
            "all networks" if len(members) == len(networks) > 1 else ", ".join(networks[i]["name"] for i, _ in members)
        )
        text = f"{names}: {front_points.figure(latency)} ms, {upwards}: {point['label']}"
        entries.append(Entry(str(number), _at(point), short(text, ROW_LETTERS), COLORS[first]))
    return entries
