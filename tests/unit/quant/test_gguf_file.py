"""Test the GGUF container: files are read as they were written, and broken ones are refused."""

import contextlib
import os
import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quant.errors import ModelFileError
from quant.gguf.file import GgufFile
from quant.gguf.header import GgufArray
from quant.types import TYPES
from tests.support import tiny_gguf
from tests.support.helpers import calls
from tests.support.thorough import some
from tests.support.tiny_gguf import Gguf, Tensor

FAST = settings(max_examples=some(20, 60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

TEXT = st.text(max_size=20)
VALUES = st.one_of(
    st.tuples(st.just("u8"), st.integers(0, 255)),
    st.tuples(st.just("i8"), st.integers(-128, 127)),
    st.tuples(st.just("u16"), st.integers(0, 2**16 - 1)),
    st.tuples(st.just("i16"), st.integers(-(2**15), 2**15 - 1)),
    st.tuples(st.just("u32"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("i32"), st.integers(-(2**31), 2**31 - 1)),
    st.tuples(st.just("f32"), st.floats(width=32, allow_nan=False)),
    st.tuples(st.just("bool"), st.booleans()),
    st.tuples(st.just("str"), TEXT),
    st.tuples(st.just("u64"), st.integers(0, 2**64 - 1)),
    st.tuples(st.just("i64"), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just("f64"), st.floats(allow_nan=False)),
    st.tuples(st.just("arr[str]"), st.lists(TEXT, min_size=1, max_size=5)),
    st.tuples(st.just("arr[i32]"), st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5)),
)
PAIRS = st.dictionaries(st.from_regex(r"[a-z][a-z0-9_.]{0,20}", fullmatch=True), VALUES, max_size=8)
TENSORS = st.dictionaries(
    st.from_regex(r"[a-z][a-z0-9_.]{0,40}", fullmatch=True),
    st.tuples(st.lists(st.integers(1, 4), max_size=3), st.sampled_from(["F32", "F16", "Q4_0", "Q6_K", "I8"])),
    max_size=5,
)

# What the gguf package calls our value types.
NAMES = {
    "u8": "UINT8", "i8": "INT8", "u16": "UINT16", "i16": "INT16", "u32": "UINT32", "i32": "INT32", "f32": "FLOAT32",
    "bool": "BOOL", "str": "STRING", "u64": "UINT64", "i64": "INT64", "f64": "FLOAT64",
}  # fmt: skip

NOBODY = 65534


def error(path: Path) -> str:
    """The message of the error that opening `path` raises."""
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def broken(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    return error(path)


def open_or_refuse(path: Path, data: bytes) -> None:
    """Damaged data may still be a valid file; then all of it can be read."""
    path.write_bytes(data)
    with contextlib.suppress(ModelFileError):
        file = GgufFile.open(path)
        for value in file.metadata.values():
            if isinstance(value, GgufArray):
                list(value)


def tiny() -> Gguf:
    return Gguf(
        {"general.architecture": ("str", "llama"), "list": ("arr[str]", ["a", "bc"]), "n": ("arr[i32]", [1, -2])},
        {"a": Tensor((32, 2)), "b": Tensor((64,), "q4_0"), "c": Tensor((3,))},
    )


@FAST
@given(pairs=PAIRS, tensors=TENSORS)
def test_reads_what_the_gguf_package_writes(tmp_path: Path, pairs: dict, tensors: dict) -> None:
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, (kind, value) in pairs.items():
        if kind.startswith("arr"):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, getattr(gguf.GGUFValueType, NAMES[kind[4:-1]]))
        else:
            writer.add_key_value(key, value, getattr(gguf.GGUFValueType, NAMES[kind]))
    arrays = {}
    for name, (dims, kind) in tensors.items():
        block_bytes = TYPES[kind.lower()].block_bytes
        arrays[name] = np.full((*dims, block_bytes), len(arrays) + 1, np.uint8)
        writer.add_tensor(name, arrays[name], raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GgufFile.open(path)
    assert file.architecture == "llama"
    assert file.size_bytes == path.stat().st_size
    for key, (kind, value) in pairs.items():
        assert file.value_type(key) == kind
        read = file.metadata[key]
        assert (list(read) if kind.startswith("arr") else read) == value
    assert list(file.tensors) == list(arrays)
    for name, (dims, kind) in tensors.items():
        info = file.tensors[name]
        assert info.type is TYPES[kind.lower()]
        assert info.shape == (info.type.block, *reversed(dims))
        assert bytes(file.data(name)) == arrays[name].tobytes()


def test_the_gguf_package_reads_what_the_test_writer_writes(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(tiny_gguf.model().write(tmp_path / "m.gguf"))
    assert reader.fields["llama.block_count"].contents() == tiny_gguf.LAYERS
    ours = GgufFile.open(tmp_path / "m.gguf").tensors
    assert {t.name: (t.data_offset, t.n_bytes) for t in reader.tensors} == {
        n: (t.offset, t.n_bytes) for n, t in ours.items()
    }


def test_truncation_at_any_byte_is_an_error(tmp_path: Path) -> None:
    header, data = tiny().encode()
    whole = header + data[: 3 * 128]  # without the padding behind the last tensor, which nobody needs
    end = len(header) + 256 + 64 + 12
    for size in range(end):
        broken(tmp_path, whole[:size])
    assert "the file is empty" in broken(tmp_path, b"")
    (tmp_path / "whole.gguf").write_bytes(whole[:end])
    GgufFile.open(tmp_path / "whole.gguf")


@FAST
@given(data=st.binary(max_size=300))
def test_random_bytes_never_raise_anything_else(tmp_path: Path, data: bytes) -> None:
    broken(tmp_path, data)
    open_or_refuse(tmp_path / "broken.gguf", b"GGUF\x03\x00\x00\x00" + data)


def test_overwritten_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    header, data = tiny().encode()
    noise = random.Random(0)
    path = tmp_path / "overwritten.gguf"
    for _ in range(1500):
        changed = bytearray(header + data)
        at, size = noise.randrange(len(header)), noise.choice((1, 4, 8))
        changed[at : at + size] = noise.choice((0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1)).to_bytes(8, "little")[:size]
        open_or_refuse(path, changed)


@pytest.mark.parametrize("count", [2**16 + 1, 2**32, 2**60, 2**64 - 1])
def test_absurd_counts_cost_neither_time_nor_memory(tmp_path: Path, count: int) -> None:
    key = struct.pack("<Q", 1) + b"k"
    many = struct.pack("<Q", count)
    headers = {
        "tensors": struct.pack("<I", 3) + many + bytes(8),
        "pairs": struct.pack("<IQ", 3, 0) + many,
        "key": struct.pack("<IQQ", 3, 0, 1) + many,
        "string": struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", 8) + many,
        "strings": struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<II", 9, 8) + many,
        "numbers": struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<II", 9, 12) + many,
    }
    for header in headers.values():
        n_calls = calls(lambda: broken(tmp_path, b"GGUF" + header + bytes(200)))  # noqa: B023
        assert n_calls < 1000, n_calls


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"PK\x03\x04", "PyTorch"),
        (struct.pack("<Q", 400) + b'{"__metadata__"', "safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\x08\x07\x12\x07pytorch", "ONNX"),
        (b"tjgg", "before GGUF"),
        (b'{"error": "not found"}', "JSON"),
        (bytes(64), "full of zeros"),
        (b"\x7fELF", "download or convert"),
    ],
)
def test_other_formats_are_named(tmp_path: Path, start: bytes, words: str) -> None:
    message = broken(tmp_path, start + bytes(64))
    assert "not a GGUF file" in message
    assert words in message


@pytest.mark.parametrize(
    ("version", "words"), [(1, "version 1,"), (4, "version 4,"), (3 << 24, "big-endian"), (2 << 24, "big-endian")]
)
def test_other_versions_are_named(tmp_path: Path, version: int, words: str) -> None:
    assert words in broken(tmp_path, b"GGUF" + struct.pack("<IQQ", version, 0, 0))


def test_version_2_is_read(tmp_path: Path) -> None:
    model = tiny()
    model.version = 2
    assert GgufFile.open(model.write(tmp_path / "v2.gguf")).version == 2


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    assert "no such file" in error(tmp_path / "missing.gguf")
    assert "this is a folder; give the path of a .gguf file" in error(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert f"edge quantize {tmp_path} model.gguf" in error(tmp_path)
    (tmp_path / "b.gguf").touch()
    assert f"such as {tmp_path / 'b.gguf'}" in error(tmp_path)
    assert "cannot be read" in error(tmp_path / "a\0b")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in error(tmp_path / "pipe")


def test_unreadable_file(tmp_path: Path) -> None:
    path = tiny().write(tmp_path / "secret.gguf")
    path.chmod(0)
    me = os.geteuid()
    if me == 0:
        os.seteuid(NOBODY)  # root may read everything
    try:
        assert "Permission denied" in error(path)
    finally:
        os.seteuid(me)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("x" * 64, Tensor((1,)), "64 bytes long, but must have 1 to 63"),
        ("", Tensor((1,)), "0 bytes long"),
        ("a\nb", Tensor((1,)), "unprintable"),
        ("d", Tensor((1, 1, 1, 1, 1)), "5 dimensions"),
        ("d", Tensor((0,)), "impossible shape"),
        ("d", Tensor((-1, 4)), "impossible shape"),
        ("d", Tensor((2**32, 2**32)), "impossible shape"),
        ("d", Tensor((2**40,)), "the file ends before its weights"),
        ("d", Tensor((33,), "q4_0"), "rows of 33 values, but q4_0 needs a multiple of 32"),
        ("d", Tensor((32,), type_id=4), "unknown tensor type id 4"),
        ("d", Tensor((32,), type_id=2**32 - 1), "unknown tensor type id"),
        ("d", Tensor((1,), offset=0), "at offset 0, expected 352"),
        ("d", Tensor((1,), offset=384), "at offset 384, expected 352"),
        ("d", Tensor((1,), offset=353), "at offset 353, expected 352"),
    ],
)
def test_bad_tensors(tmp_path: Path, name: str, tensor: Tensor, words: str) -> None:
    model = tiny()
    model.tensors[name] = tensor
    assert words in error(model.write(tmp_path / "bad.gguf"))


@pytest.mark.parametrize("value", [("u32", 0), ("u32", 3), ("u32", 33), ("u64", 32), ("str", "32"), ("i32", 32)])
def test_bad_alignment(tmp_path: Path, value: tuple) -> None:
    model = tiny()
    model.pairs["general.alignment"] = value
    assert "power of two" in error(model.write(tmp_path / "bad.gguf"))


def test_alignment_is_used(tmp_path: Path) -> None:
    model = tiny()
    model.pairs["general.alignment"] = ("u32", 128)
    file = GgufFile.open(model.write(tmp_path / "a.gguf"))
    assert file.alignment == 128
    assert all(t.offset % 128 == 0 for t in file.tensors.values())


def test_duplicates_unknown_types_and_nested_arrays(tmp_path: Path) -> None:
    def file(*pairs: bytes) -> bytes:
        return (
            b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(struct.pack("<Q", 1) + b"k" + p for p in pairs)
        )

    assert "'k' occurs twice" in broken(tmp_path, file(struct.pack("<IB", 0, 1), struct.pack("<IB", 0, 1)))
    assert "unknown type 13" in broken(tmp_path, file(struct.pack("<II", 13, 1)))
    assert "array of arrays" in broken(tmp_path, file(struct.pack("<IIQ", 9, 9, 1)))
    assert "unknown type 99" in broken(tmp_path, file(struct.pack("<IIQ", 9, 99, 0)))
    assert "not valid UTF-8" in broken(tmp_path, file(b"").replace(b"k", b"\xff"))


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    header, data = tiny().encode()
    assert "'a' occurs twice" in broken(tmp_path, header.replace(b"\1\0\0\0\0\0\0\0b", b"\1\0\0\0\0\0\0\0a") + data)


def test_strings_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    model = tiny()
    model.pairs["general.name"] = ("str", b"caf\xe9")
    model.pairs["list"] = ("arr[str]", [b"\xc3", b"\xbc"])
    file = GgufFile.open(model.write(tmp_path / "bytes.gguf"))
    assert file.metadata["general.name"] == "caf\ufffd"
    assert list(file.metadata["list"]) == ["\ufffd", "\ufffd"]
    assert file.metadata["list"].raw_strings() == [b"\xc3", b"\xbc"]


def test_raw_value_is_what_a_writer_needs(tmp_path: Path) -> None:
    file = GgufFile.open(tiny().write(tmp_path / "m.gguf"))
    assert file.raw_value("n") == struct.pack("<IIQii", 9, 5, 2, 1, -2)
    assert file.raw_value("general.architecture") == struct.pack("<IQ", 8, 5) + b"llama"


def split(folder: Path, n_parts: int = 3) -> Path:
    """A model in parts: one tensor in each. Returns the first part."""
    for i in range(n_parts):
        pairs = {"split.no": ("u16", i), "split.count": ("u16", n_parts), "split.tensors.count": ("i32", n_parts)}
        part = Gguf({"general.architecture": ("str", "llama"), **pairs}, {f"t{i}": Tensor((4,))}, seed=i)
        part.write(folder / f"m-{i + 1:05d}-of-{n_parts:05d}.gguf")
    return folder / f"m-00001-of-{n_parts:05d}.gguf"


def test_parts_are_seen_as_one(tmp_path: Path) -> None:
    file = GgufFile.open(split(tmp_path))
    assert list(file.tensors) == ["t0", "t1", "t2"]
    assert [t.path.name for t in file.tensors.values()] == [p.name for p in file.paths]
    assert file.size_bytes == sum(p.stat().st_size for p in tmp_path.iterdir())
    assert len({bytes(file.data(name)) for name in file.tensors}) == 3


def test_missing_part_is_named(tmp_path: Path) -> None:
    first = split(tmp_path)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    assert "1 of 3 parts are missing: m-00002-of-00003.gguf" in error(first)


def test_damaged_part_is_named(tmp_path: Path) -> None:
    first = split(tmp_path)
    part = tmp_path / "m-00003-of-00003.gguf"
    part.write_bytes(part.read_bytes()[:-20])
    assert error(first).startswith("m-00003-of-00003.gguf: the file ends before its weights")


def test_wrong_parts(tmp_path: Path) -> None:
    first = split(tmp_path)
    second, third = (tmp_path / f"m-0000{i}-of-00003.gguf" for i in (2, 3))
    assert "open m-00001-of-00003.gguf" in error(second)
    renamed = first.rename(tmp_path / "other.gguf")
    assert "give the file its old name back" in error(renamed)
    renamed.rename(first)
    third.write_bytes(second.read_bytes())
    assert "this is not part 3" in error(first)


def test_wrong_split_metadata(tmp_path: Path) -> None:
    first = split(tmp_path, 2)
    pairs = {"split.no": ("u16", 1), "split.count": ("u16", 2)}
    second = tmp_path / "m-00002-of-00002.gguf"
    Gguf(pairs, {"t0": Tensor((4,))}).write(second)
    assert "tensor 't0' is also in m-00001-of-00002.gguf" in error(first)
    Gguf(pairs).write(second)
    assert "the parts contain 1 tensors, but split.tensors.count has i32 2" in error(first)
    Gguf(pairs | {"split.no": ("u32", 1)}).write(second)
    assert "split.no is stored as u32, but must be u16" in error(first)


def test_a_vocabulary_of_128k_tokens_opens_in_few_steps(tmp_path: Path) -> None:
    model = tiny()
    model.pairs["tokenizer.ggml.tokens"] = ("arr[str]", [f"token{i}" for i in range(128_000)])
    path = model.write(tmp_path / "big.gguf")
    n_calls = calls(lambda: GgufFile.open(path))
    assert n_calls < 4 * 128_000, n_calls
    file = GgufFile.open(path)
    assert file.metadata["tokenizer.ggml.tokens"][127_999] == "token127999"  # type: ignore[index]
