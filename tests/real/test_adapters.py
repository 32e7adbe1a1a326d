"""Adapters of a trained model change its logits as they do in llama.cpp: on one device, on ranks, on stages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge
from edge.llm.engine import Engine
from tests.support.adapters import native_logits, write_adapter
from tests.support.deployments import EXACT, pipeline, stages, tensor
from tests.support.ranks_here import ranks_here

TOKENS = list(range(1000, 1024))
CLOSE = 1e-4  # of the change: sums of two ranks are in another order


@pytest.fixture(scope="module")
def f32(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in 32 bits: products with those of fewer bits round their inputs, which differ between ranks."""
    path = tmp_path_factory.mktemp("m") / "f32.gguf"
    edge.quantize(smollm2, path, type="f32")
    return path


@pytest.mark.parametrize(
    ("how", "close"),
    [(None, 0.0), (pipeline(1, 1), 0.0), (tensor(2, 1), CLOSE), (stages(2, 1), CLOSE)],
    ids=["one", "stages", "ranks", "hybrid"],
)
def test_logits_change_as_in_llama_cpp(how: dict[str, Any] | None, close: float, f32: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter.gguf", f32, rank=8, size=0.01)
    base, expected = (native_logits(f32, adapters, TOKENS) for adapters in ([], [(adapter, 1.5)]))
    change = np.abs(expected - base).max()
    assert change > 0.5
    options = replace(EXACT, repack=False, lora=(f"{adapter}:1.5",))
    if how is None:
        with Engine(f32, options) as engine:
            provided = engine.decode(TOKENS, 0, outputs="all").copy()
    else:
        with ranks_here(f32, how, options, tmp_path) as spread:
            provided = spread.decode(TOKENS, 0, outputs="all").copy()
    assert np.abs(provided - expected).max() <= close * change
