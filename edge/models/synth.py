"""Write a GGUF with random weights of a real model's shape.

Speed and memory do not depend on what the weights say, so such a file is enough to measure both, to plan and to test.
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
from quant.gguf.file import GgufFile
from quant.gguf.writer import NewTensor, encoded, header
from quant.types import TYPES, TensorType, type_by_name
from quant.whole_file import check_room

__all__ = ["ARCHITECTURES", "SHAPES", "WEIGHT_TYPES", "Shape", "ShapeError", "layout", "shape", "synthesize"]

Progress = Callable[[int, int], None]  # bytes written so far, bytes in all
Rows = npt.NDArray[np.uint8]  # (rows, bytes of a row)

# llama.cpp computes with these and can make them from values alone: the others are for activations or indices, or need
# an importance matrix, which random weights do not have.
_NOT_WEIGHTS = frozenset({"q8_1", "q8_k", "iq2_xxs", "iq2_xs", "iq1_s", "i8", "i16", "i32", "i64", "f64"})
WEIGHT_TYPES: tuple[str, ...] = tuple(name for name in TYPES if name not in _NOT_WEIGHTS)

# What llama.cpp's quantizer takes instead when a row does not fill blocks of 256; F16 when it does not fill 32 either.
_FALLBACK = {
    "q2_k": "iq4_nl", "q3_k": "iq4_nl", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
    "iq1_m": "iq4_nl", "iq2_s": "iq4_nl", "iq3_xxs": "iq4_nl", "iq3_s": "iq4_nl", "iq4_xs": "iq4_nl",
    "tq1_0": "q4_0", "tq2_0": "q4_0",
}  # fmt: skip

# Beside vectors: what llama.cpp keeps, or needs, as 32-bit numbers.
_AS_F32 = (".bias", ".ssm_a", ".ssm_d")
_DECAYS = (".ssm_a",)  # of a state: below 0, else it would grow without end
_PARTS_AS_F32 = ("ffn_gate_inp", "norm", "conv1d", "shortconv.conv", "time_mix_lerp")

_CHUNK_VALUES = 1 << 20  # 4 MiB of floats at a time
_RANDOM_VALUES = 2_000_000_000  # above, random rows are used again and again
_POOL_BYTES = 16 << 20
_HEADER_BYTES = 16 << 20  # more than the vocabulary and the names take
REQUIRED = ("layers", "embd", "ff", "heads", "vocab")  # where no known model is named
SHAPES: Mapping[str, Shape] = {model.name: model.shape for model in catalog() if model.shape is not None}
_FACTORS = "rope_freqs.weight"  # rotation divides by them


def layout(shape: Shape, type_name: str = "q4_0", head_type: str | None = None) -> list[NewTensor]:
    """The tensors of such a file, in order.

    Matrices have `type_name`; norms, biases and routers are F32. The head (`output`, or the token table of a tied
    model) has `head_type`: without it q6_k, as llama.cpp's quantizer chooses, or `type_name` where that is wider. A row
    that does not fill whole blocks gets what llama.cpp's quantizer falls back to (q4_k: q5_0, q6_k: q8_0, ..., f16).
    UnknownTypeError for an unknown type; ShapeError for bad figures or a type that weights cannot have.
    """
    body = _weight_type(type_name)
    head = _weight_type(head_type) if head_type else max(body, TYPES["q6_k"], key=lambda t: t.bits_per_weight)
    head_name = "token_embd.weight" if shape.tied else "output.weight"

    def type_of(name: str, dims: tuple[int, ...]) -> TensorType:
        if len(dims) == 1 or name.endswith(_AS_F32) or any(part in name for part in _PARTS_AS_F32):
            return TYPES["f32"]
        return _that_fits(head if name == head_name else body, dims[-1])

    return [NewTensor(name, dims[::-1], type_of(name, dims)) for name, dims in shape.tensors()]


def synthesize(
    path: str | os.PathLike[str],
    shape: Shape,
    type_name: str = "q4_0",
    head_type: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> int:
    """Write a model of this shape with random weights to `path`; its bytes.

    Types are as in `layout`. Values are normal with a variance of 1 / row length, so that hidden states stay near 1 at
    any depth; norms are near 1. Every tensor has its own values, given by `seed` and its name. Above 2e9 values a pool
    of random rows is used again and again, from another row on in each tensor, and the file is written at disk speed.

    Memory stays under 300 MB whatever the size. The file appears under its name only when it is whole.
    OSError when the disk has no room; ShapeError and UnknownTypeError as `layout`; EngineError if llama.cpp
    cannot quantize to the type.
    """
    target = Path(path)
    tensors = layout(shape, type_name, head_type)
    total = _data_bytes(tensors)
    check_room(target, total + _HEADER_BYTES)
    head = _header(shape, tensors, f"{shape.arch} random {seed}")
    rows = _Pool(seed) if shape.parameters > _RANDOM_VALUES else _Random(seed)
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
    """Write the header of such a model, and behind it zeros that take no room on the disk. Errors as `layout`; OSError
    where it cannot be written."""
    tensors = layout(shape, type_name, head_type)
    head = _header(shape, tensors, f"{shape.arch} outline")
    with path.open("wb") as out:
        out.write(head)
        out.truncate(len(head) + _data_bytes(tensors))


def _data_bytes(tensors: Sequence[NewTensor]) -> int:
    """Bytes behind the header."""
    return sum(tensor.n_bytes + tensor.padding for tensor in tensors)


class _Random:
    """Rows of fresh random values."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def chunks(self, tensor: NewTensor) -> Iterator[Rows]:
        """The tensor's rows, quantized, a chunk at a time."""
        rng = np.random.default_rng([self._seed, zlib.crc32(tensor.name.encode())])
        step = max(1, _CHUNK_VALUES // tensor.shape[0])
        for first in range(0, rows := prod(tensor.shape[1:]), step):
            yield _quantized(tensor, rng, min(step, rows - first))


class _Pool:
    """Rows out of a pool of random ones: one pool for each type and row length."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pools: dict[tuple[str, int], Rows] = {}

    def chunks(self, tensor: NewTensor) -> Iterator[Rows]:
        """The tensor's rows, quantized, a chunk at a time."""
        if len(tensor.shape) == 1:  # norms and biases are few, and not near zero
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
            # An odd number of rows: heads and experts come in even ones, so none of them repeats another.
            rows = max(1, _POOL_BYTES // tensor.type.n_bytes(row)) | 1
            sample = NewTensor(str(key), (row, rows), tensor.type)
            self._pools[key] = np.concatenate(list(_Random(self._seed).chunks(sample)))
        return self._pools[key]


def _quantized(tensor: NewTensor, rng: np.random.Generator, rows: int) -> Rows:
    """The next `rows` rows of a tensor."""
    from edge.llama import ggml

    values = rng.standard_normal((rows, tensor.shape[0]), dtype=np.float32)
    if tensor.name.endswith(_DECAYS):
        values = -1 - np.abs(values)
    elif len(tensor.shape) > 1:
        values *= 0.02 if tensor.name.endswith(".bias") else tensor.shape[0] ** -0.5
    else:  # a little noise, so that a norm or a bias in the wrong place shows
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


def _that_fits(preferred: TensorType, row: int) -> TensorType:
    """`preferred`, or what llama.cpp's quantizer takes instead for rows that do not fill its blocks."""
    if row % preferred.block == 0:
        return preferred
    other = TYPES[_FALLBACK.get(preferred.name, "f16")]
    return other if row % other.block == 0 else TYPES["f16"]


def _header(shape: Shape, tensors: Sequence[NewTensor], name: str) -> bytes:
    """Everything before the data."""
    general = {"general.architecture": shape.arch, "general.name": name, "general.quantization_version": 2}
    return header({**metadata_pairs({**general, **shape.metadata()}), **_vocabulary_pairs(shape.vocab)}, tensors)


def metadata_pairs(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Metadata as a file holds it, in the type of each value."""
    kinds = {bool: "bool", int: "u32", float: "f32", str: "str", list: "arr[i32]"}
    return {key: encoded(kinds[type(value)], value) for key, value in metadata.items()}


def _vocabulary_pairs(n_vocab: int) -> dict[str, bytes]:
    """Tokens that spell any text: control tokens, the 256 bytes, and words (a prefix of a word is a word, too)."""
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
    space = "\u2581"  # how this tokenizer writes one
    yield space
    yield from map(chr, range(33, 127))
    for length in count(1):
        for letters in product("abcdefghijklmnopqrstuvwxyz", repeat=length):
            yield space + "".join(letters)


def shape_of(name: str | None, arch: str | None, figures: Mapping[str, Any]) -> Shape:
    """The shape of a known model with other `figures`, or one of an architecture (None: llama) with these figures
    alone. ShapeError if they do not make one."""
    if name is None:
        missing = [f"--{figure}" for figure in REQUIRED if figure not in figures]
        if missing:
            raise ShapeError(f"give --shape NAME, or also {' '.join(missing)}")
        return shape(arch or "llama", **figures)
    if arch is not None:
        raise ShapeError("--arch goes with single figures; --shape has an architecture already")
    if name not in SHAPES:
        raise ShapeError(f"no shape {name!r}; known: {', '.join(SHAPES)}")
    return replace(SHAPES[name], **figures)


def write_outline(path: Path, shape: Shape, name: str, types: Mapping[str, TensorType] | None = None) -> GgufFile:
    """Write the outline of a model and open it: its header, and a hole in place of weights, which takes no room on a
    disk. Planner, quantizer (on a dry run) and surveys read nothing else. types: by tensor; None: F16, and F32
    where quantizers keep that. ShapeError for bad figures; OSError if the disk cannot hold such a file."""
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
    return GgufFile.open(path)
