"""Test the choice of the passes whose streamed layers the processor computes."""

from pathlib import Path

import pytest

from edge.weights.processor_rows import processor_rows


@pytest.mark.parametrize(
    ("gpu_s", "processor_s", "batch", "expected"),
    [
        (1.0, 0.9, 512, 0),  # the processor is not clearly faster
        (1.0, 0.7, 512, 1),
        (1.0, 0.1, 512, 8),
        (1.0, 0.01, 512, 16),  # llama.cpp copies the weights of larger passes itself
        (1.0, 0.01, 8, 4),
    ],
)
def test_rows_follow_from_passes_of_one_row_and_are_remembered(
    gpu_s: float, processor_s: float, batch: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    now = [0.0]
    passes: list[tuple[int, int]] = []

    def a_pass(rows: int, most: int) -> None:
        moves = not passes or passes[-1] != (rows, most)
        passes.append((rows, most))
        now[0] += (processor_s if most else gpu_s) + 5.0 * moves  # moving the weights is not timed

    for _ in range(2):
        assert processor_rows(batch, a_pass, lambda: "a model", lambda: now[0]) == expected
    assert passes == [(1, 0)] * 3 + [(1, 1)] * 3
