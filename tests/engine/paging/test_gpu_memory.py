"""A budget of a device's memory: streamed layers compute what resident ones do. The processor stands for the GPU, with
buffers of ggml's own; tests/vulkan has the same on a Vulkan device."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.demo import MODEL_PATH
from edge.errors import EngineError, NotEnoughMemory
from edge.llama import ggml
from edge.llama.buffers import Device, DeviceBuffer
from edge.llama.hooks import Hook
from edge.llm.engine import Engine, ModelRunner
from edge.llm.options import EngineOptions, reproducible
from edge.paging import gpu_load, layer_stream
from edge.paging.gpu_budget import GpuBudget
from edge.paging.layer_stream import LayerStream
from partition.architectures.table import ARCHITECTURES
from tests.support.slices import synthetic
from tests.support.thorough import thorough

OPTIONS = EngineOptions(threads=1, context=128, batch=32, repack=False)
PROMPT = list(range(264, 284))
NEVER, ALWAYS, PROMPTS = 33, 1, 8  # least rows of a pass that streams
USUALLY = ("qwen35", "glm4moe", "deepseek2", "gpt2", "gemma4", "qwen3moe")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The processor is the GPU; passes stream from as many rows on as the test says."""
    monkeypatch.setattr("edge.llm.engine.first_gpu", ggml.cpu_device)
    monkeypatch.setattr(gpu_load, "_measured", lambda *_: getattr(request, "param", ALWAYS))


def budget_of(engine: ModelRunner) -> GpuBudget:
    assert engine.gpu_layers is not None
    assert engine.gpu_layers.budget is not None
    return engine.gpu_layers.budget


def answer(engine: Engine, n: int = 4) -> NDArray[np.float32]:
    """Logits of the prompt's last token and of `n` more, twice: the second time what was copied ahead is used."""
    rows = []
    for _ in range(2):
        engine.kv_clear()
        rows.append(engine.decode(PROMPT, 0).copy())
        for i in range(n):
            rows.append(engine.decode([int(rows[-1].argmax())], len(PROMPT) + i).copy())
    return np.stack(rows)


def with_streamed(path: Path, count: int, options: EngineOptions = OPTIONS) -> EngineOptions:
    """Return options with the least budget that streams `count` layers or fewer."""
    with Engine(path, replace(options, gpu_memory=1 << 40)) as engine:
        budget = budget_of(engine)
        layers = engine.shape.layer_bytes
    fixed = sum(budget.parts.values()) - budget.parts["layers"]
    return replace(options, gpu_memory=fixed + sum(sorted(layers)[: len(layers) - count]) + 2 * max(layers) + 4096)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("measured", [ALWAYS, PROMPTS, NEVER], indirect=True)
@pytest.mark.parametrize("count", [3, 5, 8])
def test_streamed_layers_compute_the_bits_of_resident_ones(count: int) -> None:
    with Engine(MODEL_PATH, OPTIONS) as engine:
        expected = answer(engine)
    with Engine(MODEL_PATH, with_streamed(MODEL_PATH, count)) as engine:
        assert len(budget_of(engine).streamed) == count
        np.testing.assert_array_equal(answer(engine), expected)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("arch", [*USUALLY, *thorough(*(arch for arch in ARCHITECTURES if arch not in USUALLY))])
def test_models_of_every_architecture(arch: str, tmp_path: Path) -> None:
    path = synthetic(tmp_path / f"{arch}.gguf", arch, "f16", layers=6, embd=256, ff=256, vocab=320)
    with Engine(path, OPTIONS) as engine:
        expected = answer(engine)
    assert np.isfinite(expected).all()
    with Engine(path, with_streamed(path, 4)) as engine:
        assert len(budget_of(engine).streamed) >= 3
        np.testing.assert_array_equal(answer(engine), expected)
