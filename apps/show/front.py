"""The front of `edge pareto` in a terminal."""

from __future__ import annotations

from apps.show.table import print_columns, print_note
from edge.pictures.front_points import Result, notes, table, unit


def print_front(result: Result) -> None:
    """Print the plans of the front, the one with the least latency first, and what there is to note.

    result: the object of `edge pareto --json`. Measured figures are beside the predicted ones, with the error of the
    prediction.
    """
    columns, rows = table(result)
    print_columns(columns, rows, whole=("id", "latency ms", f"{unit(result)}/s"))
    for note in notes(result):
        print_note(note)
