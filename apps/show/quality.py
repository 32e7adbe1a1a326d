"""Models compared, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from apps.show.table import print_columns, print_note
from quant.text import bytes_text

if TYPE_CHECKING:
    from edge.quantization.comparison import Evaluation

COLUMNS = (
    "model", "size", "bits/weight", "perplexity", "mean KL", "99 % KL", "top-1", "decode tok/s", "prefill tok/s",
)  # fmt: skip


def rows(evaluation: Evaluation) -> list[list[str]]:
    """What COLUMNS name, of each model."""
    table, speeds = [], evaluation.speeds
    for i, (name, result) in enumerate(zip(evaluation.names, evaluation.results, strict=True)):
        s = result.summary
        table.append(
            [
                name,
                bytes_text(result.size_bytes),
                f"{result.bits_per_weight:.2f}",
                f"{s.perplexity:.3f} ± {s.perplexity_error:.3f}",
                f"{s.mean_divergence:.5f}",
                f"{s.divergence_99:.4f}",
                f"{100 * s.top_1_agreement:.2f} %",
                f"{speeds[i].decode:.1f}" if speeds else "-",
                f"{speeds[i].prefill:.1f}" if speeds else "-",
            ]
        )
    return table


def print_evaluation(evaluation: Evaluation, *notes: str) -> None:
    """The table, and below it `notes` and what there is to note of speeds."""
    print_columns(COLUMNS, rows(evaluation), whole=("model",))
    for note in (*notes, *evaluation.notes):
        print_note(note)
