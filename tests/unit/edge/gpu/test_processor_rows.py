"""The choice of who computes streamed layers in passes of few rows."""

from pathlib import Path
from typing import Any

import pytest

from edge.gpu import processor_rows as module
from edge.gpu.processor_rows import choose_rows, processor_rows
from edge.microbenchmark import BestTime


def quiet(on_gpu: float, here: float) -> tuple[BestTime, BestTime]:
    return BestTime(on_gpu, False), BestTime(here, False)


@pytest.mark.parametrize(
    ("here", "expected"),
    [((0.1, 0.2, 0.6), 16), ((0.1, 0.7, 0.9), 4), ((0.1, 0.9, 0.1), 1), ((0.9, 0.1, 0.1), 0)],
)
def test_the_processor_has_passes_up_to_where_it_is_not_clearly_faster(here: tuple[float, ...], expected: int) -> None:
    by_rows = dict(zip((1, 4, 16), here, strict=True))
    assert choose_rows([1, 4, 16], lambda rows: quiet(1.0, by_rows[rows])) == (expected, False)


def test_a_busy_device_needs_a_larger_difference() -> None:
    def busy(here: float) -> tuple[int, bool]:
        return choose_rows([1], lambda _: (BestTime(1.0, True), BestTime(here, False)))

    assert busy(0.5) == (0, True)
    assert busy(0.2) == (1, True)


@pytest.mark.parametrize("was_busy", [False, True])
def test_it_is_measured_with_each_placement_and_remembered_if_quiet(
    was_busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    passes: list[tuple[int, int]] = []

    def best_of(tasks: Any, least_s: float) -> list[BestTime]:
        assert least_s == 0.5
        for task in tasks:
            assert task.prepare is task.step  # the first pass of a sample moves the weights
            task.step()
        return [BestTime(9.0, was_busy), BestTime(1.0, False)]

    monkeypatch.setattr(module, "best_of", best_of)

    def chosen() -> int:
        passes.clear()
        return processor_rows(31, lambda *rows: passes.append(rows), lambda: "a model", 0.5)

    assert chosen() == 4
    assert passes == [(1, 0), (1, 1), (4, 0), (4, 4)]  # 16 rows are more than half of a batch
    assert chosen() == 4
    assert bool(passes) == was_busy
