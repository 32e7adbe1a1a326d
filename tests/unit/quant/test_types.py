"""Test the table of tensor types against its two sources."""

import ctypes
from pathlib import Path

import gguf
import llama_cpp
import pytest

from quant.errors import UnknownTypeError
from quant.types import KV_TYPES, TYPES, CacheType, TensorType, cache_type, type_by_id, type_by_name


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    folder = Path(llama_cpp.__file__).parent / "lib"
    library = ctypes.CDLL(str(next(p for p in sorted(folder.glob("*ggml-base*")) if p.is_file())))
    library.ggml_type_name.restype = ctypes.c_char_p
    library.ggml_type_size.restype = ctypes.c_size_t
    library.ggml_blck_size.restype = ctypes.c_int64
    return library


@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda t: t.name)
def test_type_agrees_with_llama_cpp(kind: TensorType, ggml: ctypes.CDLL) -> None:
    assert ggml.ggml_type_name(kind.id).decode().lower() == kind.name
    assert ggml.ggml_blck_size(kind.id) == kind.block
    assert ggml.ggml_type_size(kind.id) == kind.block_bytes


def test_no_type_of_llama_cpp_is_missing(ggml: ctypes.CDLL) -> None:
    ids = range(max(t.id for t in TYPES.values()) + 1)
    assert {i for i in ids if ggml.ggml_blck_size(i) > 0} == {t.id for t in TYPES.values()}


# The package still counts q8_1 with wider scales than ggml's; the type only exists while a product is computed.
IN_THE_PACKAGE = [kind for kind in gguf.GGMLQuantizationType if kind.name != "Q8_1"]


@pytest.mark.parametrize("kind", IN_THE_PACKAGE, ids=lambda t: t.name)
def test_type_agrees_with_the_gguf_package(kind: gguf.GGMLQuantizationType) -> None:
    ours = type_by_id(kind)
    assert (ours.name, ours.block, ours.block_bytes) == (kind.name.lower(), *gguf.GGML_QUANT_SIZES[kind])


def test_bytes_and_bits() -> None:
    q4 = type_by_name("Q4_0")
    assert q4.n_bytes(4096) == 128 * 18
    assert q4.bits_per_weight == 4.5
    assert q4.n_bytes(0) == 0


def test_partial_block_is_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks of 256 values, got 100"):
        type_by_name("q6_k").n_bytes(100)


def test_unknown_types_list_the_known_ones() -> None:
    with pytest.raises(UnknownTypeError, match=r"'q4_2'; known: f32, f16, q4_0"):
        type_by_name("q4_2")
    with pytest.raises(UnknownTypeError, match=r"id 4; known: 0 f32, 1 f16"):
        type_by_id(4)


def test_kv_types_are_types() -> None:
    assert set(KV_TYPES) <= set(TYPES)


@pytest.mark.parametrize("keys", KV_TYPES)
def test_a_cache_has_a_type_of_keys_and_one_of_values(keys: str) -> None:
    assert cache_type(keys) == CacheType(TYPES[keys], TYPES[keys])
    assert cache_type(f"{keys}/q4_1") == CacheType(TYPES[keys], TYPES["q4_1"])
    for name in (keys, f"{keys}/q8_0"):
        assert cache_type(name).name == ("q8_0" if name == "q8_0/q8_0" else name)


@pytest.mark.parametrize("name", ["", "/", "f16/", "/f16", "q2_k", "f16/q2_k", "f16/f16/f16", "f16 /f16"])
def test_other_names_of_a_cache_are_refused(name: str) -> None:
    with pytest.raises(UnknownTypeError, match=r"cannot store a KV cache; use one of f32, .*, or two, KEYS/VALUES"):
        cache_type(name)
