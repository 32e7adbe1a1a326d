"""Test that a fit writes and checks files within its time, with simulated work and a simulated clock."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.quantization.fit import FitOptions, _Fitting
from edge.quantization.pace import Pace
from edge.quantization.rounds import TimePlan
from quant.fit import Fit

WRITE_S = 10.0
CHUNK_S = 0.5
VOCABULARY = 1000


class Work:
    """Simulated quantizer and evaluation, and their clock."""

    def __init__(
        self, patch: pytest.MonkeyPatch, writes: Sequence[float], check: float, *, slow_chunk: int = 0
    ) -> None:
        """Prepare the work.

        writes: how many times WRITE_S each file takes
        check: how many times CHUNK_S a chunk takes, from the chunk `slow_chunk` of all chunks on
        """
        self.now_s = 0.0
        self.written = 0
        self.chunks = 0  # chunks of all evaluations
        self.evaluated: list[tuple[int, int]] = []  # files and chunks of each complete evaluation
        self._writes, self._check, self._slow_chunk = writes, check, slow_chunk
        patch.setattr("edge.quantization.fit.quantize", self._quantize)
        patch.setattr("edge.quantization.fit.evaluate", self._evaluate)

    def _quantize(self, file: Any, out: Path, mix: Any, *, progress: Callable[..., None], **more: Any) -> str:
        factor = self._writes[self.written]
        self.written += 1
        for i in range(20):
            self.now_s += factor * WRITE_S / 20
            progress(i + 1, 20, "tensor")
        out.write_text(f"file {self.written}")
        return out.read_text()

    def _evaluate(
        self,
        reference: Any,
        models: Sequence[Path],
        *args: Any,
        chunk_tokens: int,
        most: int,
        progress: Callable[..., None],
    ) -> list[Any]:
        total = (1 + len(models)) * most
        for i in range(total):
            self.now_s += CHUNK_S * chunk_tokens / 512 * (self._check if self.chunks >= self._slow_chunk else 1)
            self.chunks += 1
            progress(i + 1, total)
        self.evaluated.append((len(models), most))
        # The last file is the best one.
        return [SimpleNamespace(summary=SimpleNamespace(mean_divergence=1.0 / (1 + i))) for i in range(1 + len(models))]

    def fit(self, folder: Path, within_s: float) -> tuple[Fit, Any, float]:
        file: Any = SimpleNamespace(shape=SimpleNamespace(n_vocab=VOCABULARY))
        plan = TimePlan(within_s, lambda: self.now_s)
        options = FitOptions(within_s=within_s, threads=1, clock=lambda: self.now_s)
        fitting = _Fitting(file, "text", options, plan, lambda stage, done, total, what="": None, Pace(1))
        return fitting.best(folder / "out.gguf", [Fit({}, 1.0), Fit({}, 2.0)], folder / "imatrix.gguf")


@pytest.mark.parametrize("second", [0.5, 1, 1.5, 3, 20])
@pytest.mark.parametrize("within_s", [11, 12.5, 39, 40, 41, 45, 60, 200])
def test_writing_and_checking_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: float, within_s: float
) -> None:
    work = Work(monkeypatch, [1, second], 1)
    best, outcome, _ = work.fit(tmp_path, within_s)
    assert work.now_s <= within_s
    complete = within_s > 40 and WRITE_S * (1 + second) < within_s - WRITE_S
    assert outcome == ("file 2" if complete else "file 1")
    assert best.gap == (2.0 if complete else 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    assert (tmp_path / "out.gguf").read_text() == outcome


def test_another_file_is_not_begun_without_time_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, [1, 1], 1)
    work.fit(tmp_path, 39.5)
    assert work.written == 1


def test_a_check_that_becomes_slow_is_cut_and_the_first_check_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(monkeypatch, [1], 4, slow_chunk=4)  # the second check begins to be slow after two chunks
    _, _, measured = work.fit(tmp_path, 17)
    assert work.evaluated == [(1, 1)]
    assert measured == 0.5
    assert 15 <= work.now_s <= 17


@pytest.mark.parametrize("within_s", [0, 5, 10])
def test_one_file_is_written_and_checked_even_without_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within_s: float
) -> None:
    work = Work(monkeypatch, [1], 1)
    assert work.fit(tmp_path, within_s)[1] == "file 1"
    assert work.evaluated == [(1, 1)]
    assert work.now_s == WRITE_S + 2 * CHUNK_S / 4
