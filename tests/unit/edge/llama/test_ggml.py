"""Test reading and writing ggml data: rows of every type, and nodes in place."""

import ctypes

import gguf
import numpy as np
import pytest

from edge.errors import EngineError
from edge.llama import buffers, ggml, llama
from edge.llama.ggml import Node
from edge.llama.hooks import Hook
from edge.llm.engine import Engine
from quant.types import TYPES, TensorType, type_by_name
from tests.conftest import OPTIONS, Synthetic

TOKENS = [5, 300, 17, 401]
NO_ROWS = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}  # not stored, or no weights: neither reads them
ROWS = [kind for kind in gguf.GGMLQuantizationType if kind.name not in NO_ROWS | {"Q1_0"}]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("kind", ROWS, ids=lambda kind: kind.name)
def test_rows_of_any_bytes_are_read_as_the_gguf_package_reads_them(kind: gguf.GGMLQuantizationType) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(int(kind)).integers(0, 256, (16, 8 * block_bytes), np.uint8)
    out = np.empty((16, 8 * block), np.float32)
    ggml.dequantize_rows(raw, int(kind), out)
    expected = gguf.dequantize(raw, kind)
    finite = np.isfinite(expected)  # among random scales are infinite ones, and none
    assert finite.mean() > 0.8
    np.testing.assert_array_equal(out[finite], expected[finite])
    assert not np.isfinite(out[~finite]).any()


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q6_k", "mxfp4", "q1_0", "q2_0"])
def test_what_was_quantized_is_read_back(name: str) -> None:
    kind = type_by_name(name)
    values = np.random.default_rng(1).standard_normal((3, 512), np.float32)
    out = np.empty_like(values)
    ggml.dequantize_rows(ggml.quantize_rows(values, kind.id), kind.id, out)
    error = float(np.sqrt(((out - values) ** 2).mean()))
    assert error <= {"f32": 0, "f16": 1e-3, "bf16": 5e-3, "q8_0": 0.01, "q1_0": 0.7, "q2_0": 0.8}.get(name, 0.15)


@pytest.mark.parametrize(
    "kind", [kind for kind in TYPES.values() if kind.name.upper() not in NO_ROWS], ids=lambda k: k.name
)
def test_scales_of_blocks_are_where_the_table_says(kind: TensorType) -> None:
    """All of a block is in proportion to them. Types without have 8-bit scales, or spread them over the block."""
    first, scales = kind.scales
    assert (scales > 0) == (kind.name not in ("f32", "f16", "bf16", "mxfp4", "nvfp4", "iq1_m"))
    if not scales:
        return

    def read(scale: float) -> np.ndarray:
        blocks = np.random.default_rng(kind.id).integers(0, 256, (8, kind.block_bytes), np.uint8)
        blocks[:, first : first + 2 * scales] = np.full(scales, scale, "<f2").view(np.uint8)
        out = np.empty((1, 8 * kind.block), np.float32)
        ggml.dequantize_rows(blocks.reshape(1, -1), kind.id, out)
        return out

    assert read(1).any()
    np.testing.assert_array_equal(read(2), 2 * read(1))
    assert not read(0).any()


def test_rows_that_cannot_be_read() -> None:
    out = np.empty((2, 64), np.float32)
    q8, i8 = type_by_name("q8_0"), type_by_name("i8")
    with pytest.raises(EngineError, match="68 bytes of ggml type 8 are not 128 values"):
        ggml.dequantize_rows(np.zeros((1, 2 * q8.block_bytes), np.uint8), q8.id, out)
    with pytest.raises(EngineError, match=f"128 bytes of ggml type {i8.id} are not 128 values"):
        ggml.dequantize_rows(np.zeros((2, 64), np.uint8), i8.id, out)
    assert {name.lower() for name in NO_ROWS} <= set(TYPES)


# Nodes.


def test_a_view_is_the_node_itself(synthetic: Synthetic) -> None:
    """The rest of the graph computes with what is written to it."""
    path = synthetic("llama")
    seen: list[np.ndarray] = []

    def double(node: Node) -> None:
        view = node.view()
        assert view is not None
        assert view.shape == node.shape
        assert view.flags.c_contiguous
        assert view.flags.writeable
        np.testing.assert_array_equal(view, node.read())
        seen.append(view.copy())
        view *= 2
        np.testing.assert_array_equal(node.read(), 2 * seen[-1])

    def wants(node: Node) -> bool:
        return node.name == "l_out-0"

    with Engine(path, OPTIONS, hooks=[Hook(wants, double)]) as engine:
        result = engine.decode(TOKENS, 0).copy()
        again = [engine.decode([7], position).copy() for position in (4, 5)]
    with Engine(path, OPTIONS, hooks=[Hook(wants, lambda node: node.write(2 * node.read()))]) as engine:
        np.testing.assert_array_equal(engine.decode(TOKENS, 0), result)
        for position, row in zip((4, 5), again, strict=True):
            np.testing.assert_array_equal(engine.decode([7], position), row)
    assert [x.shape for x in seen] == [(4, 128), (1, 128), (1, 128)]


def test_views_follow_nodes_from_graph_to_graph(synthetic: Synthetic) -> None:
    """They are remembered by where they lie, which another engine may use for another tensor."""
    checked = 0

    def check(node: Node) -> None:
        nonlocal checked
        view = node.view()
        if view is not None:
            np.testing.assert_array_equal(view, node.read())
            assert view.shape == node.shape
            checked += 1

    def floats(node: Node) -> bool:
        return node.name.startswith(("l_out", "ffn_", "attn_norm", "result_"))

    for arch in ("llama", "gemma3", "llama"):
        with Engine(synthetic(arch), OPTIONS, hooks=[Hook(floats, check)]) as engine:
            for start, n in ((0, 4), (4, 1), (5, 1), (6, 9), (15, 3)):
                engine.decode([7] * n, start)
    assert checked > 100


def test_there_is_no_view_of_other_types(synthetic: Synthetic) -> None:
    seen: list[object] = []
    hook = Hook(lambda node: node.name == "inp_tokens" or node.weight == "inp_tokens", lambda node: None)
    half = Hook(lambda node: node.name.startswith("cache_k_l0 (view)"), lambda node: seen.append(node.view()))
    with Engine(synthetic("llama"), OPTIONS, hooks=[hook, half]) as engine:
        engine.decode(TOKENS, 0)
    assert seen
    assert all(view is None for view in seen)


def test_amx_is_taken_out_of_what_weights_are_repacked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {1: b"AMX", 2: b"CPU_REPACK", 3: b"KLEIDIAI"}
    array = (ctypes.c_void_p * 4)(1, 2, 3, None)
    monkeypatch.setattr(buffers, "_extra_array", lambda: array)
    monkeypatch.setattr(buffers, "_type_name", names.get)
    buffers.disable_amx()
    assert list(array) == [2, 3, None, None]
    buffers.disable_amx()  # once more changes nothing
    assert list(array) == [2, 3, None, None]


def test_llama_cpp_repacks_for_no_kernel_that_may_end_the_process() -> None:
    llama.initialise()
    assert b"AMX" not in [buffers._type_name(kind) for kind in buffers._extra_types()]


def test_gpus_have_names_where_there_are_some() -> None:
    assert bool(ggml.gpu_names()) == llama.has_gpu()


def test_a_gpu_is_named_by_ggml_and_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {10: 1, 11: 0, 12: 2}  # a GPU, the processor, and a GPU that has the machine's memory
    monkeypatch.setattr(ggml, "_device_count", lambda: len(kinds))
    monkeypatch.setattr(ggml, "_device", lambda i: list(kinds)[i])
    monkeypatch.setattr(ggml, "_device_type", kinds.__getitem__)
    monkeypatch.setattr(ggml, "_device_name", lambda device: f"Vulkan{device}".encode())
    monkeypatch.setattr(ggml, "_device_description", lambda _: b"a driver's \xff name")
    assert ggml.gpu_names() == [f"Vulkan{device} (a driver's \N{REPLACEMENT CHARACTER} name)" for device in (10, 12)]
