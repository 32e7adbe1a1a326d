"""Test sizes of a model that are fitted to budgets in one file: the file is complete or absent."""

import errno
import os
import random
import re
import resource
from itertools import islice
from pathlib import Path

import pytest

from edge.models.demo import MODEL_PATH
from edge.quantization.fit import FitOptions
from edge.quantization.make import Source, budgets_between, quantize_to_sizes
from edge.tasks import Steps
from partition.model.file import ModelFile
from quant.gguf.elastic import elastic_sizes
from quant.types import TYPES
from tests.support.quantizing import measure_less
from tools.demo_model.grammar import statements

TEXT = " ".join(islice(statements(random.Random(7)), 40))
OPTIONS = FitOptions(kinds=(TYPES["q4_0"], TYPES["q8_0"]), within_s=1.0, threads=1)


@pytest.fixture(autouse=True)
def _measured_less(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_less(monkeypatch)


@pytest.fixture
def budgets() -> tuple[int, int]:
    most = ModelFile.open(MODEL_PATH).size_bytes
    return most * 2 // 3, most


def test_each_size_has_the_divergence_that_was_measured_of_it(tmp_path: Path, budgets: tuple[int, int]) -> None:
    out, file = tmp_path / "out.gguf", ModelFile.open(MODEL_PATH)
    fitted = quantize_to_sizes(Source(file, file.size_bytes), out, budgets[::-1], TEXT, OPTIONS)  # in any order
    sizes = elastic_sizes(ModelFile.open(out))
    assert [size.file_bytes for size in sizes] == [fit.outcome.n_bytes for fit in fitted.fits]
    assert [size.divergence for size in sizes] == pytest.approx([fit.measured_divergence for fit in fitted.fits])
    assert sizes[0].divergence < sizes[1].divergence
    assert fitted.predicted_bytes == fitted.n_bytes == out.stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_disk_that_fills_while_all_sizes_are_written_leaves_nothing(tmp_path: Path, budgets: tuple[int, int]) -> None:
    before, file = resource.getrlimit(resource.RLIMIT_FSIZE), ModelFile.open(MODEL_PATH)

    class Filling(Steps):
        def say(self, line: str) -> None:
            if predicted := re.search(r"will have ([\d,]+) bytes", line):
                resource.setrlimit(resource.RLIMIT_FSIZE, (int(predicted[1].replace(",", "")) - 1, before[1]))

    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            quantize_to_sizes(Source(file, file.size_bytes), tmp_path / "out.gguf", budgets, TEXT, OPTIONS, Filling())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_each_budget_is_as_many_times_the_one_before() -> None:
    assert budgets_between(1000, 8000, 4) == [1000, 2000, 4000, 8000]
    assert budgets_between(1000, 1000, 4) == [1000]
