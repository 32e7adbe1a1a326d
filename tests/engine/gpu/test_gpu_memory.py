"""A budget of a device's memory: streamed layers compute what resident ones do. The processor stands for the GPU, with
buffers of ggml's own; tests/vulkan has the same on a Vulkan device."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from edge.errors import EngineError, NotEnoughMemory
from edge.llama import ggml
from edge.llama.buffers import Device, DeviceBuffer
from edge.llama.hooks import Hook, NodeHooks
from edge.llama.layer_stream import Layer, LayerStream, copy_layer
from edge.llama.llama import Batch, Context
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions, reproducible
from edge.models.demo import MODEL_PATH
from edge.weights import gpu_budget as load
from partition.architectures.table import ARCHITECTURES
from partition.predict.residency import GpuBudget
from tests.support.deployments import deployed, pipeline, tensor
from tests.support.slices import synthetic
from tests.support.thorough import thorough
from tests.support.workers import Worker

OPTIONS = EngineOptions(threads=1, context=128, batch=32, repack=False)
PROMPT = list(range(264, 284))
NOT_STREAMED = ("step35", "nemotron_h", "nemotron_h_moe", "plamo2", "rwkv6qwen2")  # no node of theirs ends a layer
USUALLY = (NOT_STREAMED[0], "kimi-linear", "qwen35", "glm4moe", "deepseek2", "gpt2", "gemma4", "qwen3moe")


@pytest.fixture(name="on_processor")
def _on_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor is the GPU."""
    monkeypatch.setattr("edge.weights.budgets.first_gpu", ggml.cpu_device)


def budget_of(engine: TextEngine) -> GpuBudget:
    assert engine.gpu_layers is not None
    assert engine.gpu_layers.budget is not None
    return engine.gpu_layers.budget


def answer(engine: TextEngine, n: int = 4) -> NDArray[np.float32]:
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


@pytest.mark.usefixtures("on_processor")
@pytest.mark.parametrize("count", [3, 5, 8])
def test_streamed_layers_compute_the_bits_of_resident_ones(count: int) -> None:
    with Engine(MODEL_PATH, OPTIONS) as engine:
        expected = answer(engine)
    with Engine(MODEL_PATH, with_streamed(MODEL_PATH, count)) as engine:
        assert len(budget_of(engine).streamed) == count
        np.testing.assert_array_equal(answer(engine), expected)


@pytest.mark.usefixtures("on_processor")
@pytest.mark.parametrize("arch", [*USUALLY, *thorough(*(arch for arch in ARCHITECTURES if arch not in USUALLY))])
def test_models_of_every_architecture(arch: str, tmp_path: Path) -> None:
    path = synthetic(tmp_path / f"{arch}.gguf", arch, "f16", layers=6, embd=256, ff=256, vocab=320)
    with Engine(path, OPTIONS) as engine:
        expected = answer(engine)
    assert np.isfinite(expected).all()
    if arch in NOT_STREAMED:
        with pytest.raises(EngineError, match="does not mark the end of layer 0, so it cannot be streamed"):
            Engine(path, with_streamed(path, 4))
        return
    with Engine(path, with_streamed(path, 4)) as engine:
        assert len(budget_of(engine).streamed) >= 3
        np.testing.assert_array_equal(answer(engine), expected)


class Copies:
    """Record copies, and check each against what computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[int] = []
        self.began = threading.Condition()
        self._in_use: DeviceBuffer | None = None
        copy, acquire, release = LayerStream._copy, LayerStream._acquire, LayerStream._release

        def copied(stream: LayerStream, slot: int, layer: int) -> object:
            assert stream._slots[slot] is not self._in_use  # nothing comes over what computes
            self.done.append(layer)
            return copy(stream, slot, layer)

        def acquired(stream: LayerStream, node: ggml.Node) -> None:
            acquire(stream, node)
            streamed = list(stream._layers)
            here = streamed.index(stream._in_use)
            self._in_use = stream._slots[here % 2]
            if here + 1 < len(streamed):  # the next one is on its way before this one computes
                arriving = stream._arriving[(here + 1) % 2]
                assert arriving is not None
                assert arriving[0] == streamed[here + 1]

        def released(stream: LayerStream, node: ggml.Node) -> None:
            self._in_use = None
            release(stream, node)

        for name, method in (("_copy", copied), ("_acquire", acquired), ("_release", released)):
            monkeypatch.setattr(LayerStream, name, method)


@pytest.mark.usefixtures("on_processor")
@pytest.mark.parametrize(("count", "a_pass"), [(4, 4), (5, 5), (3, 2)])
def test_each_layer_is_copied_once_a_pass_while_the_one_before_computes(
    count: int, a_pass: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three has a buffer to itself."""
    options = with_streamed(MODEL_PATH, count)
    copies = Copies(monkeypatch)
    with Engine(MODEL_PATH, options) as engine:
        engine.decode(PROMPT, 0)
        copies.done.clear()
        for i in range(3):
            engine.decode([7], len(PROMPT) + i)
        assert len(copies.done) == 3 * a_pass
        assert set(copies.done) <= set(budget_of(engine).streamed)


class Driver:
    """A driver that gives memory in pieces, and some for page-locked memory of the machine."""

    PIECE, FREE = 2 << 20, 1 << 40

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held_bytes = self.most = 0
        allocate, allocate_host = Device.allocate, Device.allocate_host

        def allocate_pieces(device: Device, n_bytes: int) -> DeviceBuffer:
            return self._gives(allocate(device, n_bytes), -(-n_bytes // self.PIECE) * self.PIECE)

        def page_locked(device: Device, n_bytes: int) -> DeviceBuffer:
            return self._gives(allocate_host(device, n_bytes), n_bytes // 8)

        monkeypatch.setattr(Device, "allocate", allocate_pieces)
        monkeypatch.setattr(Device, "allocate_host", page_locked)
        monkeypatch.setattr(ggml, "gpu_free_bytes", lambda devices: self.FREE - self.held_bytes)
        monkeypatch.setattr("edge.weights.gpu_budget.cpu_device", lambda: None)  # the processor's is a GPU's

    def _gives(self, buffer: DeviceBuffer, n_bytes: int) -> DeviceBuffer:
        close = buffer.close

        def closed() -> None:
            self.held_bytes -= n_bytes
            close()

        self.held_bytes += n_bytes
        self.most = max(self.most, self.held_bytes)
        buffer.close = closed  # type: ignore[method-assign]
        return buffer


@pytest.mark.usefixtures("on_processor")
def test_what_is_measured_is_remembered_by_the_batch_and_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice among few rows does not hold for a larger batch."""
    Driver(monkeypatch)
    keys: list[str] = []
    monkeypatch.setattr("edge.weights.gpu_budget.processor_rows", lambda batch, a_pass, key: keys.append(key()) or 0)
    monkeypatch.setattr("partition.predict.residency._PRODUCTS_BYTES", 0)
    monkeypatch.setattr("edge.weights.gpu_budget.MARGIN_BYTES", 1 << 20)
    for batch in (32, 32, 16):
        with Engine(MODEL_PATH, replace(OPTIONS, batch=batch, gpu_memory=8400 << 10)) as engine:
            assert budget_of(engine).streamed
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.usefixtures("on_processor")
@pytest.mark.parametrize("kib", [6800, 7600, 8400, 9200])
def test_a_budget_holds_what_the_driver_really_gives(kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(MODEL_PATH, OPTIONS) as engine:
        expected = answer(engine)
    driver = Driver(monkeypatch)
    monkeypatch.setattr("partition.predict.residency._PRODUCTS_BYTES", 0)
    for name, value in (("processor_rows", lambda *_: 0), ("MARGIN_BYTES", 1 << 20)):
        monkeypatch.setattr(f"edge.weights.gpu_budget.{name}", value)
    with Engine(MODEL_PATH, replace(OPTIONS, gpu_memory=kib << 10)) as engine:
        account = budget_of(engine)
        assert driver.most <= sum(account.parts.values()) <= kib << 10
        assert bool(account.streamed) == (kib < 9200)
        np.testing.assert_array_equal(answer(engine), expected)
    assert driver.held_bytes == 0


@pytest.mark.usefixtures("on_processor")
def test_passes_of_few_rows_are_computed_where_the_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """They copy nothing, and passes of many rows find the layers that were on their way before."""
    with Engine(MODEL_PATH, OPTIONS) as engine:
        expected = answer(engine)
    copies = Copies(monkeypatch)
    with Engine(MODEL_PATH, with_streamed(MODEL_PATH, 5)) as engine:
        stream, node_hooks = engine._loaded.stream, engine._loaded.hooks
        assert stream is not None
        assert node_hooks is not None
        assert stream.is_locked
        stream.processor_rows = 4
        copies.done.clear()
        np.testing.assert_array_equal(answer(engine), expected)
        assert len(copies.done) == 2 + 2 * 5  # of the first two layers, and in each of two prompts
        stream.processor_rows = 0
        node_hooks.use(stream.hooks())
        engine.decode([7], len(PROMPT) + 4)
        assert len(copies.done) == 2 + 3 * 5
        # A graph that is used again is computed where its weights were.
        assert llama_cpp.llama_perf_context(engine._context._handle).n_reused == 0


@pytest.mark.usefixtures("on_processor")
def test_layers_that_stay_have_buffers_as_large_as_the_device_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(MODEL_PATH, OPTIONS) as engine:
        expected, layer = answer(engine), max(engine.shape.layer_bytes)
    sizes: list[int] = []
    allocate = Device.allocate
    monkeypatch.setattr("edge.llama.buffers._max_size", lambda _: 3 * layer)
    monkeypatch.setattr(Device, "allocate", lambda device, n: (sizes.append(n), allocate(device, n))[1])
    with Engine(MODEL_PATH, replace(OPTIONS, gpu_memory=1 << 40)) as engine:
        np.testing.assert_array_equal(answer(engine), expected)
    assert len(sizes) in (3, 4)  # of eight layers; what a device rounds up may leave room for two
    assert max(sizes) <= 3 * layer


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list: with something in it the next copy fails, and empties it."""
    pending: list[bool] = []

    def copied(layer: Layer) -> None:
        if pending:
            pending.clear()
            raise EngineError("the driver is gone for a moment")
        copy_layer(layer)

    monkeypatch.setattr("edge.llama.layer_stream.copy_layer", copied)
    return pending


@pytest.mark.usefixtures("on_processor")
def test_a_copy_that_failed_is_made_again_in_the_next_pass(fails: list[bool]) -> None:
    with Engine(MODEL_PATH, with_streamed(MODEL_PATH, 3)) as engine:
        expected = answer(engine)
        assert engine._loaded.stream is not None
        engine._loaded.stream.finish()  # nothing is on its way: it would fail before the pass, which makes it again
        fails.append(True)
        engine.kv_clear()
        with pytest.raises(EngineError, match="for a moment"):
            answer(engine)  # a copy that the first pass begins may be of the second
        engine.kv_clear()
        np.testing.assert_array_equal(answer(engine), expected)


@pytest.mark.usefixtures("on_processor")
def test_a_copy_that_failed_is_made_again_after_passes_of_few_rows(fails: list[bool]) -> None:
    with Engine(MODEL_PATH, OPTIONS) as engine:
        expected = answer(engine)
    with Engine(MODEL_PATH, with_streamed(MODEL_PATH, 3)) as engine:
        stream = engine._loaded.stream
        assert stream is not None
        stream.processor_rows = 4
        engine.decode(PROMPT, 0)
        stream.finish()  # nothing is on its way
        fails.append(True)
        stream._copy(0, min(stream._layers))
        engine.decode([7], len(PROMPT))
        assert not fails
        np.testing.assert_array_equal(answer(engine), expected)


def test_a_prompt_and_a_token_are_computed_before_layers_are_chosen(
    on_processor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver takes memory for the kernels of both when they are first used. The token needs no room behind the
    prompt."""
    rows: list[int] = []
    decode = NodeHooks.decode

    def noted(self: NodeHooks, context: Context, batch: Batch, n: int, outputs: int) -> None:
        rows.append(n)
        decode(self, context, batch, n, outputs)

    settle = load._settle
    monkeypatch.setattr(load, "_settle", lambda *provided: (rows.append(0), settle(*provided))[1])
    monkeypatch.setattr(NodeHooks, "decode", noted)
    with Engine(MODEL_PATH, replace(with_streamed(MODEL_PATH, 4), context=32)) as engine:
        assert budget_of(engine).streamed
        assert rows[-3:] == [32, 1, 0]
        assert engine.kv_last(0) == -1


@pytest.mark.usefixtures("on_processor")
@pytest.mark.parametrize("layer", [0, 3, 7])
def test_a_pass_that_ended_early_leaves_the_next_one_right(layer: int) -> None:
    """All layers are streamed, and one of them fails in the middle of a pass."""
    fails: list[bool] = []

    def fail(_: ggml.Node) -> bool:
        if fails:
            raise RuntimeError(fails.pop())
        return True

    hook = Hook(lambda node: node.name == f"l_out-{layer}", fail)
    with Engine(MODEL_PATH, OPTIONS) as engine:
        expected = answer(engine)
    with Engine(MODEL_PATH, with_streamed(MODEL_PATH, 8), hooks=[hook]) as engine:
        for _ in range(2):
            engine.kv_clear()
            fails.append(True)
            with pytest.raises(RuntimeError):
                engine.decode(PROMPT, 0)
            np.testing.assert_array_equal(answer(engine), expected)


@pytest.mark.usefixtures("on_processor")
def test_buffers_never_take_more_than_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment of ten loads with answers, with budgets from the least one up to all."""
    used: dict[int, int] = {}
    peaks: list[int] = []
    allocate, close = Device.allocate, DeviceBuffer.close

    def allocated(device: Device, n_bytes: int) -> DeviceBuffer:
        buffer = allocate(device, n_bytes)
        used[buffer.address] = n_bytes
        peaks[-1] = max(peaks[-1], sum(used.values()))
        return buffer

    def closed(buffer: DeviceBuffer) -> None:
        used.pop(buffer.address, None)
        close(buffer)

    least = with_streamed(MODEL_PATH, 8).gpu_memory
    assert least is not None
    monkeypatch.setattr(Device, "allocate", allocated)
    monkeypatch.setattr(DeviceBuffer, "close", closed)
    for share in range(10):
        peaks.append(0)
        options = replace(OPTIONS, gpu_memory=least + share * 800_000)
        with Engine(MODEL_PATH, options) as engine:
            answer(engine, 1)
            budget = budget_of(engine)
        others = sum(n for name, n in budget.parts.items() if name not in ("two buffers", "layers"))
        assert sum(budget.parts.values()) <= budget.budget
        assert peaks[-1] + others <= budget.budget
        assert used == {}
    assert peaks[-1] > peaks[0]


@pytest.mark.usefixtures("on_processor")
def test_too_small_a_budget_says_what_it_lacks() -> None:
    least = with_streamed(MODEL_PATH, 8).gpu_memory
    assert least is not None
    words = (
        r"edge demo needs at least \d+ MiB of the GPU's memory \(head 1, KV cache 1, .*two buffers 2\), the budget has"
    )
    with pytest.raises(NotEnoughMemory, match=words):
        Engine(MODEL_PATH, replace(OPTIONS, gpu_memory=least - 800_000))
    with pytest.raises(NotEnoughMemory, match="the budget has 0; use a smaller --context"):
        Engine(MODEL_PATH, replace(OPTIONS, gpu_memory=1))


def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(EngineError, match="finds no GPU; leave --gpu-memory out"):
        Engine(MODEL_PATH, replace(OPTIONS, gpu_memory=1 << 30))


@pytest.mark.parametrize(
    ("others", "named"),
    [({"gpu_layers": 0}, "gpu_layers"), ({"lora": ["a.gguf"]}, "lora")],
)
def test_options_that_do_not_go_with_it(others: dict[str, object], named: str) -> None:
    with pytest.raises(EngineError, match=f"gpu_memory decides how much the GPU holds; leave it out, or {named}"):
        EngineOptions(gpu_memory=1 << 30, **others)  # type: ignore[arg-type]


def test_it_is_not_reproducible() -> None:
    with pytest.raises(EngineError, match="leave it out for reproducible answers"):
        reproducible(EngineOptions(gpu_memory=1 << 30))


@pytest.mark.usefixtures("on_processor")
@pytest.mark.parametrize("how", [tensor(1, 1), pipeline(1, 1)], ids=str)
def test_a_rank_streams_its_part(one_worker: Worker, how: dict[str, Any]) -> None:
    """The passes before a person's are this rank's own: others know nothing of them."""
    with deployed(one_worker, MODEL_PATH, how, replace(OPTIONS, gpu_memory=1 << 40)) as deployment:
        parts = budget_of(deployment.engine).parts
    least = sum(parts.values()) - parts["layers"] // 4  # of 8 parts of layers, or of 4 layers
    with deployed(one_worker, MODEL_PATH, how, OPTIONS) as deployment:
        expected = answer(deployment.engine)
    with deployed(one_worker, MODEL_PATH, how, replace(OPTIONS, gpu_memory=least + 4096)) as deployment:
        assert len(budget_of(deployment.engine).streamed) >= 3
        np.testing.assert_array_equal(answer(deployment.engine), expected)
