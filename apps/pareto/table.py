"""The front of `edge pareto` in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apps.pareto.points import Point, Result, dominated, error, front, fullest, knee, several_types, some, unit
from apps.show.format import bytes_text
from apps.show.table import print_columns, print_note
from edge.planning.measuring import OFF, SCATTER, is_off

_MOST_ERRORS = 5  # that are told


def print_front(result: Result) -> None:
    """Print the plans of the front, the one with the least latency first, and what there is to note.

    result: the object of `edge pareto --json`. Measured figures are beside the predicted ones, with the error of the
    prediction.
    """
    columns, rows = table(result)
    print_columns(columns, rows, whole=("id", "latency ms", f"{unit(result)}/s"))
    for note in notes(result):
        print_note(note)


def table(result: Result) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and a row for each plan of the front."""
    types, measured = several_types(result), any(point["measured"] for point in front(result))
    columns = ["id", "plan", "latency ms", f"{unit(result)}/s", "memory"]
    if types:
        columns.insert(2, "type")
    if measured:
        at = columns.index("latency ms")
        columns[at : at + 2] = ["latency ms", "measured", f"{unit(result)}/s", "measured"]
    rows = []
    for point in front(result):
        row = [point["id"] + (" *" if point["knee"] else ""), point["label"]]
        if types:
            row.append(point["type"] or "-")
        for what, scale in (("latency_s", 1e3), ("throughput_per_s", 1.0)):
            row.append(figure(scale * point["predicted"][what]))
            if measured:
                row.append(_measured(point, what, scale))
        rows.append([*row, _memory(point)])
    return columns, rows


def notes(result: Result) -> list[str]:
    """What to know about the table, a sentence each."""
    found = []
    if knee(result) is not None:
        found.append("* the knee: beyond it, a little more of one costs much of the other")
    if any(point["measured"] for point in front(result)):
        found.append("In brackets: by how much the prediction is above what was measured.")
    if any(len(point["devices"]) > 1 for point in front(result)):
        found.append("Memory is that of the device which needs the most.")
    found += _of_measuring(result)
    n = len(dominated(result))
    if n:
        found.append(
            f"{n} other {'plan is' if n == 1 else 'plans are'} dominated: no better in anything, worse in some."
        )
    if not result["exact"]:
        found.append("Too many plans for all to be looked at: there may be better ones.")
    estimated = [device["name"] for device in result["devices"] if device["estimate"]]
    if estimated:
        found.append(f"Estimated, not measured: {', '.join(estimated)}.")
    failed = [point for point in result["points"] if point["error"]]
    found += [f"{point['id']} could not be measured: {point['error']}" for point in failed[:_MOST_ERRORS]]
    if len(failed) > _MOST_ERRORS:
        found.append(f"{len(failed) - _MOST_ERRORS} more could not be measured.")
    return found


def _of_measuring(result: Result) -> list[str]:
    """What was measured, and how far it is to be believed."""
    taken = [point for point in result["points"] if point["measured"]]
    if not taken:
        return []
    n = len(taken)
    found = [
        f"Front and knee are those of the {n} measured {'plan' if n == 1 else 'plans'}; others are only predicted."
    ]
    off = [point["id"] for point in taken if is_off(point["predicted"], point["measured"])]
    if off:
        found.append(f"Predicted more than {100 * OFF:.0f} % off: {some(off, _MOST_ERRORS)}; they were measured again.")
    apart = [f"{point['id']} {100 * point['measured']['spread']:.0f} %" for point in taken if _scatters(point)]
    if apart:
        told = some(apart, _MOST_ERRORS)
        found.append(f"Other work disturbed what was measured, by: {told}. The best counts; --fresh measures again.")
    return found


def _scatters(point: Point) -> bool:
    return bool(point["measured"].get("spread", 0.0) > SCATTER)


def figure(value: float) -> str:
    """Three digits that count: "0.0123", "12.3", "123", "12300"."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def _measured(point: Point, what: str, scale: float) -> str:
    off = error(point, what)
    measured: Mapping[str, Any] = point["measured"] or {}
    return "-" if off is None else f"{figure(scale * measured[what])} ({100 * off:+.0f} %)"


def _memory(point: Point) -> str:
    """What is needed on the fullest device: as measured, where it was."""
    found = fullest(point["measured"] or {}) or fullest(point["predicted"])
    return "-" if found is None else bytes_text(found[1])
