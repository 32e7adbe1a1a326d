"""A budget of memory beside a GPU: weights on the GPU, in memory and on disk give the logits of one device. The
processor stands for the GPU, with buffers of ggml's own; tests/vulkan has the same on a Vulkan device."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge.errors import EngineError, NotEnoughMemory
from edge.llama import ggml, llama
from edge.llama.buffers import Device, DeviceBuffer
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.weights.on_gpu import GpuShare, layers_of
from partition.model.file import ModelFile
from partition.predict.residency import GpuBudget, LayerBytes
from tests.support import paging
from tests.support.paging import ALL_FITS, EXPERTS, answer, least, paged, resident_answer, streams
from tests.support.thorough import thorough

OPTIONS = replace(paging.OPTIONS, repack=False)
ALL_ON_GPU = 1 << 40


@pytest.fixture(autouse=True)
def _on_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor is the GPU, and takes no memory for products."""
    monkeypatch.setattr("edge.weights.budgets.first_gpu", ggml.cpu_device)
    monkeypatch.setattr("partition.predict.residency._PRODUCTS_BYTES", 0)
    monkeypatch.setattr("edge.weights.on_gpu._CHUNK", 50_000)  # a weight is copied in several pieces


@pytest.fixture(params=["llama", "qwen3moe", *thorough("gpt-oss", "gemma3")])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paging.model(tmp_path_factory, request.param)


def budget_of(engine: Engine) -> GpuBudget:
    assert engine.gpu_layers is not None
    assert engine.gpu_layers.budget is not None
    return engine.gpu_layers.budget


def sizes(path: Path) -> tuple[int, list[LayerBytes]]:
    """Bytes on the GPU besides the layers, and those of each layer."""
    with paged(path, ALL_FITS, OPTIONS, gpu_memory=ALL_ON_GPU) as engine:
        parts = dict(budget_of(engine).parts)
        layers = layers_of(ModelFile.open(path), engine._loaded.sizes, 0)
    return sum(parts.values()) - parts["layers"] - parts["KV cache"], layers


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_logits_are_those_of_one_device_wherever_the_weights_are(path: Path, share: float) -> None:
    fixed, layers = sizes(path)
    n_bytes = [layer.dense + layer.experts + layer.kv for layer in layers]
    first = layers[-1].dense + layers[-1].kv
    gpu_memory = fixed + first + round(share * (sum(n_bytes) - first))
    options = replace(OPTIONS, gpu_memory=gpu_memory)
    for memory in (least(path, options), (least(path, options) + least(path, OPTIONS)) // 2, ALL_FITS):
        with paged(path, memory, options) as engine:
            account = budget_of(engine)
            assert sum(account.parts.values()) <= gpu_memory
            assert engine.memory.total <= memory
            assert engine.gpu_layers is not None
            assert (engine.gpu_layers.layers == len(layers) + 1) or share < 1
            if memory == ALL_FITS:
                assert not streams(engine)
            np.testing.assert_array_equal(answer(engine), resident_answer(path, False, min(16, engine.batch)))


def test_what_is_on_the_gpu_needs_no_memory(path: Path) -> None:
    """The least budget falls, and so do the bytes that every token reads."""
    fixed, layers = sizes(path)
    half = fixed + sum(layer.dense + layer.kv for layer in layers[len(layers) // 2 :])
    memory = paging.halfway(path, OPTIONS)
    with paged(path, memory, OPTIONS) as alone, paged(path, memory, OPTIONS, gpu_memory=half) as engine:
        assert alone.paging is not None
        assert engine.paging is not None
        weights = [sum(piece.n_bytes for piece in w._roles.pieces) for w in (alone.paging, engine.paging)]
        assert weights[0] - weights[1] >= sum(layer.dense for layer in layers[len(layers) // 2 :]) * 0.9
        assert engine.paging.plan.streamed_bytes <= alone.paging.plan.streamed_bytes


@pytest.mark.parametrize("arch", EXPERTS)
def test_dense_weights_come_before_experts(arch: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = paging.model(tmp_path_factory, arch)
    fixed, layers = sizes(path)
    dense = fixed + sum(layer.dense + layer.kv for layer in layers)
    for n in range(len(layers) + 1):
        gpu_memory = dense + sum(layer.experts for layer in layers[:n])
        with paged(path, ALL_FITS, OPTIONS, gpu_memory=gpu_memory) as engine:
            account = budget_of(engine)
            assert len(account.processor_experts) == len(layers) - n
            assert engine.paging is not None
            assert set(engine.paging._roles.experts) == set(account.processor_experts)
            assert not engine.paging._roles.factors
            np.testing.assert_array_equal(answer(engine), resident_answer(path, False, min(16, engine.batch)))


@pytest.mark.parametrize("n", [1, 2, 4, 5, 99])
def test_a_number_of_layers_beside_a_budget(path: Path, n: int) -> None:
    options = replace(OPTIONS, gpu_layers=n)
    with paged(path, least(path, options), options) as engine:
        assert engine.gpu_layers is not None
        assert engine.gpu_layers.layers == min(n, 5)
        np.testing.assert_array_equal(answer(engine), resident_answer(path, False, min(16, engine.batch)))


def test_a_model_with_experts_needs_no_budget_of_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = paging.model(tmp_path_factory, "qwen3moe")
    fixed, layers = sizes(path)
    gpu_memory = fixed + sum(layer.dense + layer.kv for layer in layers) + layers[0].experts
    with Engine(path, replace(paging.unpaged(OPTIONS, repack=False), gpu_memory=gpu_memory)) as engine:
        assert budget_of(engine).processor_experts == (0, 1, 2)
        assert engine.memory.budget is not None
        np.testing.assert_array_equal(answer(engine), resident_answer(path, False, min(16, engine.batch)))


def test_a_budget_that_holds_no_layer_names_the_least(path: Path) -> None:
    fixed, layers = sizes(path)
    needed = fixed + layers[-1].dense + layers[-1].kv
    with paged(path, ALL_FITS, OPTIONS, gpu_memory=needed):
        pass
    with pytest.raises(NotEnoughMemory, match=r"of the GPU's memory \(.*a layer") as caught:
        paged(path, ALL_FITS, OPTIONS, gpu_memory=needed - 1)
    assert f"{needed / (1 << 20):,.0f} MiB" in str(caught.value)


def test_a_driver_without_the_memory_it_reported_is_an_error_that_frees_all(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first buffer is given, and the second one is not."""
    _, layers = sizes(path)
    allocate, freed = Device.allocate, list[int]()

    class Counted(DeviceBuffer):
        def __init__(self, buffer: DeviceBuffer) -> None:
            self.handle, self.address, self.n_bytes = buffer.handle, buffer.address, buffer.n_bytes

        def close(self) -> None:
            freed.append(self.n_bytes)
            super().close()

    allocated = list[int]()

    def once(device: Device, n_bytes: int) -> DeviceBuffer:
        if allocated:
            raise NotEnoughMemory("the GPU has no memory left")
        allocated.append(n_bytes)
        return Counted(allocate(device, n_bytes))

    monkeypatch.setattr("edge.llama.buffers._max_size", lambda _: max(layer.dense for layer in layers))
    monkeypatch.setattr(Device, "allocate", once)
    with pytest.raises(NotEnoughMemory, match="no memory left"):
        paged(path, ALL_FITS, OPTIONS, gpu_memory=ALL_ON_GPU)
    assert freed == allocated


def test_layers_on_a_gpu_need_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(EngineError, match="finds no GPU"):
        Engine(path, replace(OPTIONS, gpu_layers=2))


def test_a_model_larger_than_the_memory_gets_a_budget_by_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without options. If a budget is too small to page in, its weights are mapped, as before."""
    weights, smallest = ModelFile.open(path).shape.weight_bytes, least(path, OPTIONS)
    for available, rss, pages in ((weights, smallest, False), (weights - 1, smallest, True), (1 << 20, 0, False)):
        monkeypatch.setattr("edge.weights.budgets.own_rss", lambda rss=rss: rss)
        monkeypatch.setattr("edge.weights.budgets.available_memory", lambda available=available: available)
        options: EngineOptions = paging.unpaged(OPTIONS, repack=False)
        with paging.steady_runtime(), Engine(path, options) as engine:
            assert (engine.memory.budget is not None) == pages
            np.testing.assert_array_equal(answer(engine), resident_answer(path, False, min(16, engine.batch)))


@pytest.mark.parametrize("has_less", [False, True])
def test_a_budget_alone_uses_a_gpu_that_has_the_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch, has_less: bool
) -> None:
    """A GPU whose driver refuses memory that it reported is left out."""
    monkeypatch.setattr(llama, "has_gpu", lambda: True)
    monkeypatch.setattr(ggml, "discrete_gpus", lambda: [ggml.cpu_device()])
    monkeypatch.setattr(ggml, "gpu_free_bytes", lambda _: ALL_ON_GPU)

    def refuse(*_: object) -> None:
        raise NotEnoughMemory("the driver has no memory left")

    if has_less:
        monkeypatch.setattr(GpuShare, "place", refuse)
    with paged(path, ALL_FITS, OPTIONS) as engine:
        assert (engine.gpu_layers is None) == has_less
        np.testing.assert_array_equal(answer(engine), resident_answer(path, False, min(16, engine.batch)))
    with paged(path, ALL_FITS, OPTIONS, most_gpu_layers=2) as engine:
        assert engine.gpu_layers is None or engine.gpu_layers.layers == 2
