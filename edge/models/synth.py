"""Random models: GGUF files with random weights in a real model's shape.

Speed and memory do not depend on the values of weights, so such a file suffices to measure, plan and test.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from devices.files import temporary_beside
from edge.models.catalog import catalog
from edge.models.shapes import Shape, ShapeError, shape
from partition.architectures.table import ARCHITECTURES
from partition.model.file import ModelFile
from quant.gguf.writer import NewTensor, encoded, header
from quant.types import TYPES, TensorType, type_by_name
from quant.whole_file import check_room

__all__ = ["ARCHITECTURES", "SHAPES", "WEIGHT_TYPES", "Shape", "ShapeError", "layout", "shape", "synthesize"]

Progress = Callable[[int, int], None]  # arguments: bytes written, bytes in total
Rows = npt.NDArray[np.uint8]  # shape (rows, bytes of a row)

# llama.cpp computes with all other types and can quantize to them. These are for activations or indices, or need an
# importance matrix, which random weights do not have.
_NOT_WEIGHTS = frozenset({"q8_1", "q8_k", "iq2_xxs", "iq2_xs", "iq1_s", "i8", "i16", "i32", "i64", "f64"})
WEIGHT_TYPES: tuple[str, ...] = tuple(name for name in TYPES if name not in _NOT_WEIGHTS)

# Types that llama.cpp's quantizer substitutes if rows do not fill blocks of 256. If rows do not fill 32 either: F16.
_FALLBACK = {
    "q2_k": "iq4_nl", "q3_k": "iq4_nl", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
    "iq1_m": "iq4_nl", "iq2_s": "iq4_nl", "iq3_xxs": "iq4_nl", "iq3_s": "iq4_nl", "iq4_xs": "iq4_nl",
    "tq1_0": "q4_0", "tq2_0": "q4_0",
}  # fmt: skip

# Tensors, in addition to vectors, that llama.cpp stores or needs as 32-bit floats.
_AS_F32 = (".bias", ".ssm_a", ".ssm_d")
_DECAYS = (".ssm_a",)  # decay of a state: must be below 0, or the state would grow without limit
_PARTS_AS_F32 = ("ffn_gate_inp", "norm", "conv1d", "shortconv.conv", "time_mix_lerp")

_CHUNK_VALUES = 1 << 20  # values quantized together: 4 MiB of floats
_RANDOM_VALUES = 2_000_000_000  # larger models repeat random rows
_POOL_BYTES = 16 << 20
_HEADER_BYTES = 16 << 20  # upper bound of vocabulary and names
REQUIRED = ("layers", "embd", "ff", "heads", "vocab")  # figures that are needed without a known model
SHAPES: Mapping[str, Shape] = {model.name: model.shape for model in catalog() if model.shape is not None}
_FACTORS = "rope_freqs.weight"  # factors that rotation frequencies are divided by


def layout(shape: Shape, type_name: str = "q4_0", head_type: str | None = None) -> list[NewTensor]:
    """Return the tensors of such a file, in order.

    type_name: type of matrices; norms, biases and routers are always F32
    head_type: type of the head (`output`, or the token table of a tied model); None: the wider of `type_name` and
        llama.cpp's default q6_k

    If a row does not fill the blocks of its type, the tensor gets the substitute of llama.cpp's quantizer (q5_0 for
    q4_k, q8_0 for q6_k, ..., f16). Raises UnknownTypeError for an unknown type, and ShapeError for bad figures or a
    type that weights cannot have.
    """
    body = _weight_type(type_name)
    head = _weight_type(head_type) if head_type else max(body, TYPES["q6_k"], key=lambda t: t.bits_per_weight)
    head_name = "token_embd.weight" if shape.tied else "output.weight"

    def type_of(name: str, dims: tuple[int, ...]) -> TensorType:
        if len(dims) == 1 or name.endswith(_AS_F32) or any(part in name for part in _PARTS_AS_F32):
            return TYPES["f32"]
        return fitting_type(head if name == head_name else body, dims[-1])

    return [NewTensor(name, dims[::-1], type_of(name, dims)) for name, dims in shape.tensors()]


def synthesize(
    path: str | os.PathLike[str],
    shape: Shape,
    type_name: str = "q4_0",
    head_type: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    pool_bytes: int | None = None,
) -> int:
    """Write a model of this shape with random weights to `path`. Return its size in bytes.

    Types are as in `layout`. Values are normally distributed with variance 1 / row length, so that hidden states stay
    near 1 at any depth; norms are near 1. `seed` and the name of a tensor determine its values.

    pool_bytes: size of a pool of random rows. Each tensor takes its rows from the pool, beginning at another row, so
        the file is written at disk speed. None: fresh values for each row, or a pool of 16 MiB above 2e9 values.

    Memory stays under 300 MB for any size. The file appears under its name only when it is complete. Raises OSError if
    the disk has no room, ShapeError and UnknownTypeError as in `layout`, and EngineError if llama.cpp cannot quantize
    to the type.
    """
    target = Path(path)
    tensors = layout(shape, type_name, head_type)
    total = _data_bytes(tensors)
    check_room(target, total + _HEADER_BYTES)
    head = _header(shape, tensors, f"{shape.arch} random {seed}")
    if pool_bytes is None and shape.parameters > _RANDOM_VALUES:
        pool_bytes = _POOL_BYTES
    rows = _Random(seed) if pool_bytes is None else _Pool(seed, pool_bytes)
    with temporary_beside(target) as temporary:
        with temporary.open("wb") as out:
            out.write(head)
            done = 0
            for tensor in tensors:
                for chunk in rows.chunks(tensor):
                    out.write(chunk.data)
                    done += chunk.nbytes
                    if progress:
                        progress(done, total)
                done += out.write(bytes(tensor.padding))
        temporary.replace(target)
    return len(head) + total


def outline(path: Path, shape: Shape, type_name: str = "q4_0", head_type: str | None = None) -> None:
    """Write the header of such a model, followed by zeros that take no disk space.

    Raises the errors of `layout`, and OSError if the file cannot be written.
    """
    tensors = layout(shape, type_name, head_type)
    head = _header(shape, tensors, f"{shape.arch} outline")
    with path.open("wb") as out:
        out.write(head)
        out.truncate(len(head) + _data_bytes(tensors))


def _data_bytes(tensors: Sequence[NewTensor]) -> int:
    """Return the bytes after the header."""
    return sum(tensor.n_bytes + tensor.padding for tensor in tensors)


class _Random:
    """Rows of fresh random values."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def chunks(self, tensor: NewTensor) -> Iterator[Rows]:
        """Yield the tensor's quantized rows in chunks."""
        rng = np.random.default_rng([self._seed, zlib.crc32(tensor.name.encode())])
        step = max(1, _CHUNK_VALUES // tensor.shape[0])
        for first in range(0, rows := prod(tensor.shape[1:]), step):
            yield _quantized(tensor, rng, min(step, rows - first))


class _Pool:
    """Rows from pools of random rows. There is a pool for each type and row length."""

    def __init__(self, seed: int, n_bytes: int) -> None:
        self._seed, self._n_bytes = seed, n_bytes
        self._pools: dict[tuple[str, int], Rows] = {}

    def chunks(self, tensor: NewTensor) -> Iterator[Rows]:
        """Yield the tensor's quantized rows in chunks."""
        if len(tensor.shape) == 1:  # norms and biases are small, and norms are not near zero
            yield from _Random(self._seed).chunks(tensor)
            return
        pool = self._pool(tensor)
        at = zlib.crc32(f"{self._seed} {tensor.name}".encode()) % len(pool)
        left = prod(tensor.shape[1:])
        while left:
            chunk = pool[at : at + left]
            yield chunk
            left -= len(chunk)
            at = 0

    def _pool(self, tensor: NewTensor) -> Rows:
        row = tensor.shape[0]
        key = tensor.type.name, row
        if key not in self._pools:
            # The number of rows is odd. Heads and experts come in even numbers, so none of them repeats another.
            rows = max(1, self._n_bytes // tensor.type.n_bytes(row)) | 1
            sample = NewTensor(str(key), (row, rows), tensor.type)
            self._pools[key] = np.concatenate(list(_Random(self._seed).chunks(sample)))
        return self._pools[key]


def _quantized(tensor: NewTensor, rng: np.random.Generator, rows: int) -> Rows:
    """Return the next `rows` rows of a tensor, quantized."""
    from edge.llama import ggml

    values = rng.standard_normal((rows, tensor.shape[0]), dtype=np.float32)
    if tensor.name.endswith(_DECAYS):
        values = -1 - np.abs(values)
    elif len(tensor.shape) > 1:
        values *= 0.02 if tensor.name.endswith(".bias") else tensor.shape[0] ** -0.5
    else:  # noise, so that a test notices a norm or a bias in the wrong place
        values *= 0.02
        values += 0.0 if tensor.name.endswith(".bias") else 1.0
    if tensor.type.name == "f32":
        return values.view(np.uint8)
    return ggml.quantize_rows(values, tensor.type.id)


def _weight_type(name: str) -> TensorType:
    preferred = type_by_name(name)
    if preferred.name not in WEIGHT_TYPES:
        raise ShapeError(f"random weights cannot be made as {preferred.name}; these can: {', '.join(WEIGHT_TYPES)}")
    return preferred


def fitting_type(preferred: TensorType, row: int) -> TensorType:
    """Return `preferred`, or the quantizer's substitute if rows do not fill the blocks of `preferred`."""
    if row % preferred.block == 0:
        return preferred
    other = TYPES[_FALLBACK.get(preferred.name, "f16")]
    return other if row % other.block == 0 else TYPES["f16"]


def _header(shape: Shape, tensors: Sequence[NewTensor], name: str) -> bytes:
    """Return all bytes before the data."""
    general = {"general.architecture": shape.arch, "general.name": name, "general.quantization_version": 2}
    return header({**metadata_pairs({**general, **shape.metadata()}), **_vocabulary_pairs(shape.vocab)}, tensors)


def metadata_pairs(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the encoded metadata, each value in its type."""
    kinds = {bool: "bool", int: "u32", float: "f32", str: "str", list: "arr[i32]"}
    return {key: encoded(kinds[type(value)], value) for key, value in metadata.items()}


def _vocabulary_pairs(n_vocab: int) -> dict[str, bytes]:
    """Return metadata with tokens for any text: control tokens, 256 bytes, and words. Prefixes of words are words,
    too."""
    control = ["<unk>", "<s>", "</s>", "<|endoftext|>"]  # llama.cpp looks for the last one in phi3
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    words = list(islice(_pseudo_words(), n_vocab - len(control) - len(single)))
    scores = [0.0] * (n_vocab - len(words)) + [-float(i) for i in range(len(words))]
    return {
        "tokenizer.ggml.model": encoded("str", "llama"),
        "tokenizer.ggml.tokens": encoded("arr[str]", control + single + words),
        "tokenizer.ggml.scores": encoded("arr[f32]", scores),
        "tokenizer.ggml.token_type": encoded("arr[i32]", [2, 3, 3, 3] + [6] * 256 + [1] * len(words)),
        "tokenizer.ggml.unknown_token_id": encoded("u32", 0),
        "tokenizer.ggml.bos_token_id": encoded("u32", 1),
        "tokenizer.ggml.eos_token_id": encoded("u32", 2),
    }


def _pseudo_words() -> Iterator[str]:
    """Yield the space, the characters of ASCII, then " a", " b", ... " z", " aa", " ab", and so on without end."""
    space = "\u2581"  # the tokenizer's character for a space
    yield space
    yield from map(chr, range(33, 127))
    for length in count(1):
        for letters in product("abcdefghijklmnopqrstuvwxyz", repeat=length):
            yield space + "".join(letters)


def shape_of(name: str | None, arch: str | None, figures: Mapping[str, Any]) -> Shape:
    """Return the shape of a known model with changed `figures`, or of an architecture (None: llama) with these figures.

    Raises ShapeError if the figures do not make a model.
    """
    if name is None:
        missing = [f"--{figure}" for figure in REQUIRED if figure not in figures]
        if missing:
            raise ShapeError(f"give --shape NAME, or also {' '.join(missing)}")
        return shape(arch or "llama", **figures)
    if arch is not None:
        raise ShapeError("--arch needs single figures; --shape already has an architecture")
    if name not in SHAPES:
        raise ShapeError(f"no shape {name!r}; known: {', '.join(SHAPES)}")
    return replace(SHAPES[name], **figures)


def write_outline(path: Path, shape: Shape, name: str, types: Mapping[str, TensorType] | None = None) -> ModelFile:
    """Write the outline of a model and open it. The outline is the header and a hole for the weights, without disk
    space.

    Planner, quantizer (in a dry run) and surveys read nothing else.

    types: type of each tensor; None: F16, or F32 for tensors that quantizers leave in F32

    Raises ShapeError for bad figures, and OSError if the disk cannot hold such a file.
    """
    tensors = layout(shape, "f16", "f16")
    if types:
        tensors = [NewTensor(tensor.name, tensor.shape, types[tensor.name]) for tensor in tensors]
    metadata = {
        "general.architecture": shape.arch,
        "general.name": name,
        **shape.metadata(),
        "tokenizer.ggml.model": "none",
    }
    head = header(metadata_pairs(metadata), tensors)
    with path.open("wb") as out:
        out.write(head)
        end = len(head)
        for tensor in tensors:
            if tensor.name == _FACTORS:
                out.seek(end)
                out.write(struct.pack("<f", 1.0) * tensor.shape[0])
            end += tensor.n_bytes + tensor.padding
        out.truncate(end)
    return ModelFile.open(path)
