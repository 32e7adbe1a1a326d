"""Every architecture whose models can be cut: stages of a small one compute the bits of the whole."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from partition.architectures.table import ARCHITECTURES
from partition.plan.plan import Range
from partition.slices.source import Source
from quant.gguf.file import GgufFile
from tests.support.slices import run_local, run_stages, synthetic
from tests.support.thorough import thorough

CALLS = [(list(range(270, 300)), 0), ([300], 30), ([301, 302], 31)]


# Each of what a stage may have to say of layers: windows, periods, what comes in, leading layers, recurrent layers.
USUALLY = (
    "qwen35", "lfm2", "jamba", "deepseek2", "glm4moe", "llama4", "smallthinker", "cohere2", "granite", "gpt2", "bloom",
    "phi2", "qwen3vl", "minicpm", "apertus", "olmo", "falcon-h1", "mamba2",
)  # fmt: skip


@pytest.mark.parametrize("arch", [*USUALLY, *thorough(*(arch for arch in ARCHITECTURES if arch not in USUALLY))])
def test_stages_compute_the_bits_of_the_whole(arch: str, tmp_path: Path) -> None:
    figures = {"embd": 64, "ff": 64, "vocab": 320, "layers": 17 if ARCHITECTURES[arch].rules.no_stage_of else 9}
    model = synthetic(tmp_path / f"{arch}.gguf", arch, **figures)
    source = Source.of(GgufFile.open(model))
    expected = run_local(model, CALLS)
    assert all(np.isfinite(logits).all() and logits.std() > 0 for logits in expected)
    starts = source.starts
    assert len(starts) > 1
    edges = (*starts, source.shape.n_layers)
    for chosen in ({0, starts[len(starts) // 2]}, {0, starts[1], starts[-1]}):
        cuts = [*sorted(chosen), edges[-1]]
        stages = [Range(start, stop) for start, stop in pairwise(cuts)]
        found = run_stages(model, stages, CALLS, tmp_path)
        assert all((f == e).all() for f, e in zip(found, expected, strict=True)), stages
