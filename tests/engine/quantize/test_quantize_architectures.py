"""A model of every architecture, quantized, runs and says nearly the same."""

from pathlib import Path

import numpy as np
import pytest

from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.quantization.gguf import quantize
from partition.architectures.table import ARCHITECTURES
from partition.model.file import ModelFile
from quant.mixes import MIXES
from tests.support.slices import synthetic
from tests.support.thorough import thorough

USUALLY = ("qwen35", "glm4moe", "mamba2")
OPTIONS = EngineOptions(threads=1, context=64)
PROMPT = list(range(264, 280))


@pytest.mark.parametrize("arch", [*USUALLY, *thorough(*(arch for arch in ARCHITECTURES if arch not in USUALLY))])
def test_a_quantized_model_says_nearly_the_same(arch: str, tmp_path: Path) -> None:
    window = ARCHITECTURES[arch].rules.window
    layers = window.period if window and window.both else 4
    model = synthetic(tmp_path / f"{arch}.gguf", arch, "f16", layers=layers, embd=256, ff=256, vocab=320)
    smaller = tmp_path / "smaller.gguf"
    quantize(ModelFile.open(model), smaller, MIXES["q8_0"])
    assert smaller.stat().st_size < 0.8 * model.stat().st_size
    logits = []
    for path in (model, smaller):
        with Engine(path, OPTIONS) as engine:
            logits.append(engine.decode(PROMPT, 0).copy())
    assert np.corrcoef(logits[0], logits[1])[0, 1] > 0.9
