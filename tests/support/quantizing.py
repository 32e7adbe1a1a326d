"""What tests of quantizing share."""

from pathlib import Path
from typing import Any

import pytest

from edge.quantization.gguf import Outcome, types_of
from quant.gguf.file import GgufFile
from quant.mixes import Mix


def ask_types_once(patch: pytest.MonkeyPatch) -> None:
    """Let the types that a mix gives, which take a process, be asked for once: test_quantize.py compares them with
    files."""
    answers: dict[object, Outcome] = {}

    def asked_once(file: GgufFile, mix: Mix, types: Any = None, imatrix: Path | None = None) -> Outcome:
        tensors = tuple((name, tensor.type.id, tensor.shape) for name, tensor in file.tensors.items())
        question = (tensors, mix.id, str(types), imatrix and imatrix.read_bytes())
        if question not in answers:
            answers[question] = types_of(file, mix, types, imatrix)
        return answers[question]

    patch.setattr("edge.quantization.gguf.types_of", asked_once)
    patch.setattr("edge.quantization.fit_choices.types_of", asked_once)
