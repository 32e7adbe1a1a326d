"""Sizes of a model fitted to budgets, in one file: whole, or not there."""

import errno
import os
import random
import resource
from itertools import islice
from pathlib import Path

import pytest

from edge.demo import MODEL_PATH
from edge.quantization.fit import FitOptions
from edge.quantization.make import budgets_between, fit_sizes
from quant.gguf.elastic import elastic_sizes
from quant.gguf.file import GgufFile
from quant.types import TYPES
from tests.support.quantizing import measure_less
from tools.demo_model.grammar import statements

TEXT = " ".join(islice(statements(random.Random(7)), 40))
OPTIONS = FitOptions(kinds=(TYPES["q4_0"], TYPES["q8_0"]), within_s=1.0, threads=1)


def silent(*_: object) -> None:
    pass


@pytest.fixture(autouse=True)
def _measured_less(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_less(monkeypatch)


@pytest.fixture
def budgets() -> tuple[int, int]:
    most = GgufFile.open(MODEL_PATH).size_bytes
    return most * 2 // 3, most


def test_each_size_has_the_divergence_that_was_measured_of_it(tmp_path: Path, budgets: tuple[int, int]) -> None:
    out, predicted = tmp_path / "out.gguf", list[int]()
    fitted = fit_sizes(GgufFile.open(MODEL_PATH), out, budgets, TEXT, OPTIONS, silent, predicted.append)
    sizes = elastic_sizes(GgufFile.open(out))
    assert [size.file_bytes for size in sizes] == [fit.outcome.n_bytes for fit in fitted.fits]
    assert [size.divergence for size in sizes] == pytest.approx([fit.measured_divergence for fit in fitted.fits])
    assert sizes[0].divergence < sizes[1].divergence
    assert predicted == [out.stat().st_size]
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_disk_that_fills_while_all_sizes_are_written_leaves_nothing(tmp_path: Path, budgets: tuple[int, int]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(n_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes - 1, before[1]))

    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            fit_sizes(GgufFile.open(MODEL_PATH), tmp_path / "out.gguf", budgets, TEXT, OPTIONS, silent, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_each_budget_is_as_many_times_the_one_before() -> None:
    assert budgets_between(1000, 8000, 4) == [1000, 2000, 4000, 8000]
    assert budgets_between(1000, 1000, 4) == [1000]
