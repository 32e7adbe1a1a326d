"""The choice of who computes streamed layers in passes of few rows."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge.gpu import processor_rows as module
from edge.gpu.processor_rows import CHOICE_S, choose_rows, processor_rows
from edge.microbenchmark import BestTime, best_of


def quiet(on_gpu: float, here: float) -> tuple[BestTime, BestTime]:
    return BestTime(on_gpu, False), BestTime(here, False)


@pytest.mark.parametrize(
    ("here", "expected"),
    [((0.1, 0.2, 0.6), 16), ((0.1, 0.7, 0.9), 4), ((0.1, 0.9, 0.1), 1), ((0.9, 0.1, 0.1), 0)],
)
def test_the_processor_has_passes_up_to_where_it_is_not_clearly_faster(here: tuple[float, ...], expected: int) -> None:
    by_rows = dict(zip((1, 4, 16), here, strict=True))
    assert choose_rows([1, 4, 16], lambda rows: quiet(1.0, by_rows[rows])) == (expected, True)


def test_a_busy_device_needs_a_larger_difference() -> None:
    def busy(here: float) -> tuple[int, bool]:
        return choose_rows([1], lambda _: (BestTime(1.0, True), BestTime(here, False)))

    assert busy(0.5) == (0, False)
    assert busy(0.2) == (1, False)


@pytest.mark.parametrize("was_busy", [False, True])
def test_it_is_measured_with_each_placement_and_remembered_if_quiet(
    was_busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    passes: list[tuple[int, int]] = []

    def best_of(tasks: Any, least_s: float, clock: Any) -> list[BestTime]:
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


@pytest.mark.parametrize(
    ("gpu_s", "here_s", "expected", "longest_s"),
    [
        (8.0, 1.0, 0, CHOICE_S + 8.0),  # far too slow to choose by several tries
        (2.5, 1 / 8, 1, CHOICE_S + 2.5),  # one row was measured, four were not
        (0.5, 1 / 64, 4, CHOICE_S),
    ],
)
def test_choosing_ends_and_the_gpu_has_what_was_not_measured(
    gpu_s: float, here_s: float, expected: int, longest_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU takes as long for each number of rows. What was not measured to its end is measured again."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "best_of", partial(best_of, watch=lambda: lambda: 0.0))  # nothing else runs
    now = [0.0]

    def a_pass(rows: int, most: int) -> None:
        now[0] += here_s * rows if most else gpu_s

    def chosen() -> tuple[int, float]:
        began = now[0]
        return processor_rows(8, a_pass, lambda: "a model", 0.03, lambda: now[0]), now[0] - began

    rows, took_s = chosen()
    assert rows == expected
    assert 0 < took_s <= longest_s
    assert chosen() == (expected, 0.0 if longest_s == CHOICE_S else took_s)
