"""Shared parts of the quantization tests."""

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edge.quantization.gguf import Outcome, types_of_each
from quant.gguf.file import GgufFile
from quant.mixes import Mix
from tests.support.thorough import some


def ask_types_once(patch: pytest.MonkeyPatch) -> None:
    """Let the types that a mix gives, which take a process, be asked for once: test_quantize.py compares them with
    files."""
    answers: dict[object, list[Outcome]] = {}

    def asked_once(
        jobs: Sequence[tuple[GgufFile, Mix]], types: Any = None, imatrix: Path | None = None
    ) -> Generator[Outcome, None, None]:
        files = [
            (mix.id, tuple((name, tensor.type.id, tensor.shape) for name, tensor in file.tensors.items()))
            for file, mix in jobs
        ]
        question = (*files, str(types), imatrix and imatrix.read_bytes())
        if question not in answers:
            answers[question] = list(types_of_each(jobs, types, imatrix))
        yield from answers[question]

    patch.setattr("edge.quantization.gguf.types_of_each", asked_once)
    patch.setattr("edge.quantization.fit_choices.types_of_each", asked_once)


def measure_less(patch: pytest.MonkeyPatch) -> None:
    """Let the errors of weights be those of fewer of them, and kernels be timed with small matrices."""
    patch.setattr("edge.quantization.tensor_rows._SAMPLE_VALUES", some(1 << 14, 1 << 16))
    patch.setattr("edge.quantization.kernels._MATRIX_BYTES", 4 << 20)
