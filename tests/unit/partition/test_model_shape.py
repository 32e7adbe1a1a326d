"""Test the size of a model against sums by hand and against llama.cpp's own counts."""

from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from partition.model.check import check_loadable
from partition.model.model import ModelShape, block_of
from quant.errors import ModelFileError
from quant.gguf.file import GgufFile
from quant.types import KV_TYPES, TYPES
from tests.support.slices import rewritten, synthetic
from tests.support.tiny_gguf import EMBD, EXPERTS, FF, HEAD, HEADS, HEADS_KV, LAYERS, VOCAB, Gguf, Tensor, model

ALL = [("llama", 0), ("llama", EXPERTS), ("qwen2", 0), ("qwen3", 0), ("qwen3moe", EXPERTS)]
ALL += [("gemma", 0), ("gemma2", 0), ("gemma3", 0), ("phi3", 0)]
QUIET = llama_cpp.llama_log_callback(lambda level, text, user: None)  # must outlive every use of the library
F16, F32, Q8 = TYPES["f16"], TYPES["f32"], TYPES["q8_0"]


def shape_of(model: Gguf, folder: Path) -> ModelShape:
    return ModelShape.from_gguf(GgufFile.open(model.write(folder / "tiny.gguf")))


@pytest.fixture
def shape(tmp_path: Path) -> ModelShape:
    return shape_of(model("llama", "q8_0"), tmp_path)


def test_sizes(shape: ModelShape) -> None:
    assert (shape.architecture, shape.name, shape.n_layers) == ("llama", "tiny", LAYERS)
    assert (shape.n_embd, shape.n_ff, shape.n_vocab) == (EMBD, (FF,) * LAYERS, VOCAB)
    assert (shape.n_heads, shape.n_heads_kv) == ((HEADS,) * LAYERS, (HEADS_KV,) * LAYERS)
    assert (shape.head_k, shape.head_v, shape.context_length) == (HEAD, HEAD, 128)
    assert (shape.n_experts, shape.n_experts_used) == (0, 0)


def test_bytes_of_the_parts_add_up(shape: ModelShape) -> None:
    matrices = 2 * EMBD * HEADS * HEAD + 2 * EMBD * HEADS_KV * HEAD + 3 * EMBD * FF
    assert shape.layer_bytes == (Q8.n_bytes(matrices) + F32.n_bytes(2 * EMBD),) * LAYERS
    assert shape.embedding_bytes == shape.head_bytes == Q8.n_bytes(EMBD * VOCAB)
    assert not shape.head_is_tied
    norm = F32.n_bytes(EMBD)
    assert shape.weight_bytes == sum(shape.layer_bytes) + shape.embedding_bytes + shape.head_bytes + norm
    assert shape.weight_bytes == sum(shape.bytes_by_type.values())
    assert shape.n_params == LAYERS * (matrices + 2 * EMBD) + 2 * EMBD * VOCAB + EMBD
    assert shape.bytes_by_type == {
        "q8_0": LAYERS * Q8.n_bytes(matrices) + 2 * shape.head_bytes,
        "f32": F32.n_bytes((2 * LAYERS + 1) * EMBD),
    }


def test_tied_head_is_counted_once(tmp_path: Path) -> None:
    shape = shape_of(model("gemma3"), tmp_path)
    assert shape.head_is_tied
    assert shape.head_bytes == shape.embedding_bytes == 4 * EMBD * VOCAB
    assert shape.weight_bytes == sum(shape.layer_bytes) + shape.embedding_bytes + 4 * EMBD


def test_experts(tmp_path: Path) -> None:
    shape = shape_of(model("qwen3moe", experts=EXPERTS), tmp_path)
    assert (shape.n_experts, shape.n_experts_used) == (EXPERTS, 2)


def test_kv_bytes(shape: ModelShape) -> None:
    assert shape.kv_bytes(100, F16, F16) == LAYERS * 100 * HEADS_KV * (HEAD + HEAD) * 2
    assert shape.kv_bytes(100, Q8, F16) == LAYERS * 100 * (34 + HEADS_KV * HEAD * 2)
    assert shape.kv_bytes(0, F16, F16) == 0


def test_kv_type_whose_blocks_do_not_fit(tmp_path: Path) -> None:
    wide = model()
    wide.pairs["llama.attention.key_length"] = ("u32", 20)
    with pytest.raises(ValueError, match="q8_0 stores whole blocks of 32 values, got 40"):
        shape_of(wide, tmp_path).kv_bytes(1, Q8, Q8)


def test_numbers_for_each_layer(tmp_path: Path) -> None:
    mixed = model()
    mixed.pairs["llama.attention.head_count_kv"] = ("arr[i32]", [2, 0])
    mixed.pairs["llama.feed_forward_length"] = ("arr[u32]", [96, 64])
    shape = shape_of(mixed, tmp_path)
    assert shape.n_heads_kv == (2, 0)
    assert shape.n_ff == (96, 64)
    assert shape.kv_bytes(10, F16, F16) == 10 * 2 * 2 * HEAD * 2
    assert shape.kv_layer_bytes(1, 10, F16, F16) == 0


def test_without_optional_metadata(tmp_path: Path) -> None:
    bare = model()
    for key in ("general.name", "llama.attention.head_count_kv", "tokenizer.ggml.tokens"):
        del bare.pairs[key]
    shape = shape_of(bare, tmp_path)
    assert shape.name == "tiny"  # from the file's name
    assert shape.n_heads_kv == shape.n_heads
    assert shape.n_vocab == VOCAB  # from the token table


@pytest.mark.parametrize(
    "value", [None, ("u32", 0), ("i32", -1), ("u32", 513), ("str", "2"), ("f32", 2.0), ("bool", 1)]
)
def test_bad_block_count(tmp_path: Path, value: tuple | None) -> None:
    bad = model()
    if value is None:
        del bad.pairs["llama.block_count"]
    else:
        bad.pairs["llama.block_count"] = value
    with pytest.raises(ModelFileError, match=r"llama\.block_count is"):
        shape_of(bad, tmp_path)


def test_wrong_number_of_layers_in_an_array(tmp_path: Path) -> None:
    bad = model()
    bad.pairs["llama.attention.head_count"] = ("arr[u32]", [4, 4, 4])
    with pytest.raises(ModelFileError, match="has 3 items, the model has 2 layers"):
        shape_of(bad, tmp_path)


def test_architecture_nobody_knows_has_a_shape(tmp_path: Path) -> None:
    assert shape_of(model("nosucharch"), tmp_path).n_layers == LAYERS


def test_no_architecture(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"general\.architecture is missing"):
        shape_of(Gguf({}, {"a": Tensor((1,))}), tmp_path)


def test_block_of() -> None:
    assert block_of("blk.7.attn_q.weight") == 7
    assert block_of("output.weight") is None
    assert block_of("blk.x") is None


@pytest.mark.parametrize(("architecture", "experts"), ALL)
def test_agrees_with_llama_cpp(tmp_path: Path, architecture: str, experts: int) -> None:
    path = model(architecture, experts=experts).write(tmp_path / "m.gguf")
    shape = ModelShape.from_gguf(GgufFile.open(path))
    llama_cpp.llama_log_set(QUIET, None)
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    loaded = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert loaded
    try:
        assert llama_cpp.llama_model_n_params(loaded) == shape.n_params
        assert llama_cpp.llama_model_size(loaded) == shape.weight_bytes
        assert llama_cpp.llama_model_n_layer(loaded) == shape.n_layers
        assert llama_cpp.llama_model_n_embd(loaded) == shape.n_embd
        assert llama_cpp.llama_model_n_head_kv(loaded) == shape.n_heads_kv[0]
        assert llama_cpp.llama_model_n_ctx_train(loaded) == shape.context_length
    finally:
        llama_cpp.llama_model_free(loaded)


def test_every_kv_type_fits_heads_of_64(tmp_path: Path) -> None:
    wide = model()
    wide.pairs["llama.attention.key_length"] = wide.pairs["llama.attention.value_length"] = ("u32", 64)
    shape = shape_of(wide, tmp_path)
    sizes = [shape.kv_bytes(256, TYPES[name], TYPES[name]) for name in KV_TYPES]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("arch", "changed", "message"),
    [
        ("plamo2", {"ssm.group_count": ("u32", 1)}, "ssm.group_count is 1, expected a whole number from 0 to 0"),
        ("bailingmoe3", {"kda.gate_lower_bound": ("f32", 0.5)}, "a kda.gate_lower_bound below 0"),
        ("bailingmoe3", {"kda.safe_gate": ("bool", False)}, "needs kda.safe_gate"),
        ("deepseek2-ocr", {"rope.freq_base": ("f32", 5e5)}, "rope.freq_base is not 10000"),
        ("deepseek2-ocr", {"attention.value_length": ("u32", 8)}, "not as wide as the model"),
        ("glm-dsa", {"attention.indexer.types": ("arr[u32]", [0, 1, 1, 1])}, "first layer has no index of its own"),
    ],
)
def test_what_llama_cpp_asserts_of_single_values(
    arch: str, changed: dict[str, tuple[str, Any]], message: str, tmp_path: Path
) -> None:
    """It would stop the process."""
    sound = synthetic(tmp_path / "sound.gguf", arch, layers=4, embd=64, ff=64)
    check_loadable(GgufFile.open(sound))
    path = rewritten(sound, tmp_path / "bad.gguf", {f"{arch}.{key}": value for key, value in changed.items()})
    with pytest.raises(ModelFileError, match=message):
        check_loadable(GgufFile.open(path))
