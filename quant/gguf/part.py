"""Reads one GGUF file: its key-value pairs and its table of tensors, checked like ggml's own reader does.

ggml aborts the whole process on some damaged files. The rules here are those of
https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/gguf.cpp, and a few more for values that ggml trusts.
"""

import math
import mmap
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quant.errors import ModelFileError, UnknownTypeError
from quant.gguf.header import HeaderReader, Pair, Value
from quant.types import TensorType, type_by_id

_MAX_DIMS = 4
_MAX_NAME_BYTES = 63  # ggml stores names in 64 bytes
_MAX_COUNT = 65536  # limit of pairs and of tensors, because ggml's search for duplicates is quadratic
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Location, shape and type of one tensor."""

    name: str
    shape: tuple[int, ...]  # in ggml's order: the number of values in a row comes first
    type: TensorType
    offset: int  # bytes from the start of its file
    n_bytes: int
    path: Path  # its file; parts of a split model differ

    @property
    def n_values(self) -> int:
        return math.prod(self.shape)


class Part(NamedTuple):
    """One file of a model."""

    path: Path
    data: mmap.mmap
    version: int
    pairs: dict[str, Pair]
    alignment: int
    tensors: dict[str, TensorInfo]
    changed_ns: int  # time of the file's last change when it was mapped


def read_part(path: Path, *, has_weights: bool = True) -> Part:
    """Map `path` and read its header.

    has_weights: False if the file may end after its header.

    Raises ModelFileError with one line if the file is not valid.
    """
    data, changed_ns = _map(path)
    reader = HeaderReader(data, path.name)
    version = _check_magic(reader)
    n_tensors, n_pairs = reader.u64("the header"), reader.u64("the header")
    for count, what in ((n_pairs, "key-value pairs"), (n_tensors, "tensors")):
        if count > _MAX_COUNT:
            raise reader.error(f"it claims {count} {what}, more than the limit of {_MAX_COUNT}; the file is damaged")
    pairs: dict[str, Pair] = {}
    for i in range(n_pairs):
        pair = reader.pair(f"pair {i}")
        if pair.key in pairs:
            raise reader.error(f"key {pair.key!r} occurs twice; write the file again with a current converter")
        pairs[pair.key] = pair
    alignment = _alignment(reader, pairs)
    tensors = _read_tensors(reader, path, n_tensors, alignment, has_weights=has_weights)
    return Part(path, reader.data, version, pairs, alignment, tensors, changed_ns)


def leading_values(path: Path) -> dict[str, Value]:
    """Return the metadata before the long ones of the tokenizer, which is enough to tell kinds of files apart.

    Raises ModelFileError as `read_part` does.
    """
    data, _ = _map(path)
    reader = HeaderReader(data, path.name)
    _check_magic(reader)
    reader.u64("the header")
    values: dict[str, Value] = {}
    for i in range(min(reader.u64("the header"), _MAX_COUNT)):
        pair = reader.pair(f"pair {i}")
        if pair.key.startswith("tokenizer."):
            break
        values[pair.key] = pair.value
    return values


def _map(path: Path) -> tuple[mmap.mmap, int]:
    """Return (bytes of the file, time of its last change in ns)."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{path}: this is a folder; {_next_step(path)}")
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: this is not a regular file; give the path of a .gguf file")
        if status.st_size == 0:
            raise ModelFileError(f"{path}: the file is empty; download it again")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except (OSError, ValueError) as exc:  # ValueError: a zero byte in the path
        raise ModelFileError(f"{path}: cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc


def _check_magic(reader: HeaderReader) -> int:
    """Return the version, 2 or 3. Raises ModelFileError for anything else."""
    magic = reader.data[:4]
    if magic != b"GGUF":
        kind = looks_like(reader.data[:512])
        raise reader.error(f"not a GGUF file: it starts with {magic!r}; {kind or 'download or convert it again'}")
    reader.skip(4, "the header")
    version = reader.u32("the header")
    if version & 0xFFFF == 0:
        raise reader.error("big-endian GGUF; convert it with gguf_convert_endian.py, or get the little-endian file")
    if version not in (2, 3):
        raise reader.error(f"GGUF version {version}, but only versions 2 and 3 can be read; convert the model again")
    return version


def _alignment(reader: HeaderReader, pairs: Mapping[str, Pair]) -> int:
    pair = pairs.get("general.alignment")
    if pair is None:
        return _DEFAULT_ALIGNMENT
    value = pair.value
    if pair.type != "u32" or not isinstance(value, int) or value.bit_count() != 1:
        raise reader.error(f"general.alignment is {pair.type} {value!r}, but must be a u32 and a power of two")
    return value


def _read_tensors(
    reader: HeaderReader, path: Path, n_tensors: int, alignment: int, *, has_weights: bool
) -> dict[str, TensorInfo]:
    """Return the tensors. Each must start where the previous one ends, padded to the alignment."""
    rows: dict[str, tuple[tuple[int, ...], TensorType, int]] = {}
    for i in range(n_tensors):
        name = reader.name(f"the name of tensor {i}", _MAX_NAME_BYTES)
        if name in rows:
            raise reader.error(f"tensor {name!r} occurs twice; write the file again with a current converter")
        shape = _shape(reader, name)
        kind = _type(reader, name, shape[0])
        rows[name] = shape, kind, reader.u64(f"the offset of tensor {name!r}")
    tensors = {}
    data_start = _pad(reader.position, alignment)
    expected = 0
    for name, (shape, kind, offset) in rows.items():
        if offset != expected:
            raise reader.error(f"tensor {name!r} is at offset {offset}, expected {expected}; the file is damaged")
        n_bytes = kind.n_bytes(math.prod(shape))
        tensors[name] = TensorInfo(name, shape, kind, data_start + offset, n_bytes, path)
        end = data_start + offset + n_bytes
        if has_weights and end > len(reader.data):
            raise reader.error(
                f"the file ends before its weights: tensor {name!r} needs {end} bytes, but the file has "
                f"{len(reader.data)}; the download is incomplete, continue or repeat it"
            )
        expected = _pad(offset + n_bytes, alignment)
    return tensors


def _shape(reader: HeaderReader, name: str) -> tuple[int, ...]:
    what = f"the shape of tensor {name!r}"
    n_dims = reader.u32(what)
    if n_dims > _MAX_DIMS:
        raise reader.error(f"tensor {name!r} has {n_dims} dimensions, more than the limit of {_MAX_DIMS}")
    shape = tuple(reader.u64(what) for _ in range(n_dims)) or (1,)  # without dimensions it is one value
    if 0 in shape or math.prod(shape) >= 2**63:
        raise reader.error(f"tensor {name!r} has the impossible shape {list(shape)}; the file is damaged")
    return shape


def _type(reader: HeaderReader, name: str, row: int) -> TensorType:
    try:
        kind = type_by_id(reader.u32(f"the type of tensor {name!r}"))
    except UnknownTypeError as exc:
        raise reader.error(f"tensor {name!r} has an {exc}; a newer or modified llama.cpp wrote this file") from None
    if row % kind.block:
        raise reader.error(
            f"tensor {name!r} has rows of {row} values, but {kind.name} needs a multiple of {kind.block}"
        )
    return kind


def _pad(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _next_step(folder: Path) -> str:
    """Return text that says how to use the models in a folder."""
    names = sorted(entry.name for entry in folder.iterdir())
    models = [name for name in names if name.endswith(".gguf")]
    if models:
        return f"name a model in it, such as {folder / models[0]}"
    if any(name.endswith(".safetensors") for name in names):
        return f"it holds safetensors; convert them first: edge quantize {folder} model.gguf"
    return "give the path of a .gguf file"


def looks_like(head: bytes) -> str:
    """Return a hint such as "it looks like safetensors; ...", or "" if unknown. head: up to 512 bytes of the file."""
    text = head.lstrip().lower()
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        return "it is a git-lfs pointer, not the model; run `git lfs pull`"
    if text.startswith((b"<!doctype html", b"<html")):
        return "it looks like a web page, not the model; check the download address"
    if head.startswith(b"PK\x03\x04"):
        return "it looks like a zip archive or a PyTorch checkpoint; convert it to GGUF"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 30:
        return "it looks like safetensors; convert its folder: edge quantize FOLDER model.gguf"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg"):
        return "it looks like a ggml file from before GGUF; convert the original model to GGUF"
    if head[:1] == b"\x08" and head[2:3] in (b"\x12", b"\x1a", b"\x22", b"\x3a", b"\x42"):
        # a ModelProto: field 1 (version), then producer, graph or opset
        return "it looks like ONNX; edge run and edge serve take such a file if its name ends in .onnx"
    if text.startswith((b"{", b"[")):
        return "it looks like JSON"
    if not head.strip(b"\x00"):
        return "it is full of zeros; the download never finished, repeat it"
    return ""
