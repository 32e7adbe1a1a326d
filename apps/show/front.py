"""The front of `edge pareto` in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apps.show.table import print_columns, print_note
from edge.pictures.front_points import Point, Result, error, figure, front, fullest, notes, several_types, unit
from quant.text import bytes_text


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


def _measured(point: Point, what: str, scale: float) -> str:
    off = error(point, what)
    measured: Mapping[str, Any] = point["measured"] or {}
    return "-" if off is None else f"{figure(scale * measured[what])} ({100 * off:+.0f} %)"


def _memory(point: Point) -> str:
    """What is needed on the fullest device: as measured, where it was."""
    found = fullest(point["measured"] or {}) or fullest(point["predicted"])
    return "-" if found is None else bytes_text(found[1])
