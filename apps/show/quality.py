"""Models compared, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from apps.show.table import print_columns, print_note

if TYPE_CHECKING:
    from edge.quantization.comparison import Evaluation


def print_evaluation(evaluation: Evaluation, *notes: str) -> None:
    """The table, and below it `notes` and what there is to note of speeds."""
    from edge.quantization.comparison import COLUMNS

    print_columns(COLUMNS, evaluation.rows(), whole=("model",))
    for note in (*notes, *evaluation.notes):
        print_note(note)
