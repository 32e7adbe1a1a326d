"""Importance matrices: the size of the inputs of every weight, with which a quantizer weighs its errors.

For each column of a tensor they contain the sum of the squares of its inputs over many tokens, and the number of these
tokens. A tensor of experts has separate sums for each expert. They are stored in GGUF files like those of llama.cpp's
tools: general.type "imatrix" and, for each tensor, NAME.in_sum2 [columns, experts] and NAME.counts [1, experts], both
F32. Older files (".dat") can be read, too. They consist of little-endian int32 numbers, names and float32 values, and
contain means over tokens times a number of chunks.
"""

import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from quant.errors import ModelFileError
from quant.gguf.file import GgufFile
from quant.gguf.header import GgufArray
from quant.gguf.writer import NewTensor, encoded, header
from quant.types import TYPES
from quant.whole_file import whole_file

__all__ = ["Entry", "ImportanceMatrix", "read_imatrix"]

Floats = NDArray[np.float32]
Counts = NDArray[np.int64]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNK_COUNT, _CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
_MOST_ENTRIES = 65536
_MOST_BYTES = 4 << 30  # limit of an older file: a model with 1e12 weights has 2 GiB
_MOST_TOKENS = 2.0**53
_I32 = struct.Struct("<i")
_DAMAGED = "the file is damaged; make it again with `edge imatrix`"


@dataclass(frozen=True)
class Entry:
    """Statistics of one tensor's inputs."""

    sums: Floats  # [experts, columns]: sums of squares over tokens; a tensor without experts has one row
    counts: Counts  # [experts]: number of summed tokens


@dataclass(frozen=True)
class ImportanceMatrix:
    """Importance matrix: statistics of the inputs of a model's tensors on some text."""

    entries: Mapping[str, Entry]  # by tensor name
    datasets: tuple[str, ...] = ()  # names of the texts
    chunk_count: int = 0
    chunk_size: int = 0  # tokens; 0 if an older file does not state it

    @property
    def unseen(self) -> dict[str, int]:
        """Number of experts that no token used, by tensor name, for tensors that have any."""
        missing = {name: int(np.count_nonzero(entry.counts == 0)) for name, entry in self.entries.items()}
        return {name: n for name, n in missing.items() if n}

    def unseen_text(self) -> str:
        """Return a sentence about the unused experts."""
        unseen = self.unseen
        some = ", ".join([*list(unseen)[:3], *(["..."] if len(unseen) > 3 else [])])
        counted_experts = f"{sum(unseen.values())} experts in {len(unseen)} tensors ({some})"
        return f"{counted_experts} were never used; a longer text may reach them"

    def to_json(self) -> dict[str, Any]:
        """Return counts of the content, as docs/cli/imatrix.md describes."""
        chunks = {"chunks": self.chunk_count, "chunk_tokens": self.chunk_size}
        return {"tensors": len(self.entries), **chunks, "unseen_experts": self.unseen}

    def weights(self, name: str, n_experts: int, columns: int) -> Floats | None:
        """Return the mean squares of a tensor's inputs, float32 [n_experts * columns], for llama.cpp's quantizer.

        The mean of an unused expert is 1. Return None for a tensor that the matrix lacks.

        Raises ModelFileError if the size differs, because the matrix is then for another model.
        """
        entry = self.entries.get(name)
        if entry is None:
            return None
        if entry.sums.size != n_experts * columns:
            raise ModelFileError(
                f"the importance matrix has {entry.sums.size} values for {name}, but the tensor needs {n_experts} x"
                f" {columns}; it was made for another model, so make one for this model"
            )
        return _means(entry)

    def weights_of(self, file: GgufFile) -> dict[str, Floats]:
        """Return `weights` of all tensors of a model that the matrix has, by name. Raises the errors of `weights`."""
        weights = {
            name: self.weights(name, math.prod(tensor.shape[2:]), tensor.shape[0])
            for name, tensor in file.tensors.items()
        }
        return {name: values for name, values in weights.items() if values is not None}

    def write(self, path: str | os.PathLike[str]) -> int:
        """Write the matrix as GGUF; return its number of bytes. The file appears only when it is complete.

        Raises OSError if the file cannot be written or the disk has no room, and ModelFileError if entries are not
        valid.
        """
        target = Path(path)
        for name, entry in self.entries.items():
            _check(target.name, name, entry)
        if not self.entries:
            raise ModelFileError(f"{target.name}: there is nothing to write, because no tensor was used")
        pairs = {
            "general.type": encoded("str", "imatrix"),
            _DATASETS: encoded("arr[str]", self.datasets),
            _CHUNK_COUNT: encoded("u32", self.chunk_count),
            _CHUNK_SIZE: encoded("u32", self.chunk_size),
        }
        tensors, data = [], []
        for name, entry in sorted(self.entries.items()):
            experts, columns = entry.sums.shape
            tensors += [
                NewTensor(name + _SUMS, (columns, experts), TYPES["f32"]),
                NewTensor(name + _COUNTS, (1, experts), TYPES["f32"]),
            ]
            data += [entry.sums.astype("<f4").tobytes(), entry.counts.astype("<f4").tobytes()]
        head = header(pairs, tensors)
        with whole_file(target, len(head) + sum(tensor.n_bytes + tensor.padding for tensor in tensors)) as out:
            out.write(head)
            for tensor, values in zip(tensors, data, strict=True):
                out.write(values + bytes(tensor.padding))
            return out.tell()


def read_imatrix(path: str | os.PathLike[str]) -> ImportanceMatrix:
    """Return the importance matrix in `path`, from GGUF or the older format.

    Raises ModelFileError with one line if the file is neither, is incomplete, or has impossible sums.
    """
    path = Path(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block forever
            raise ModelFileError(f"{path}: cannot be read: it is not a regular file")
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
            file.seek(0)
            matrix = None if is_gguf else _Legacy(path.name, file, status.st_size).read()
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except (OSError, ValueError) as exc:  # ValueError: a zero byte in the path
        raise ModelFileError(f"{path}: cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    matrix = matrix or _from_gguf(GgufFile.open(path))
    for name, entry in matrix.entries.items():
        _check(path.name, name, entry)
    return matrix


def _from_gguf(file: GgufFile) -> ImportanceMatrix:
    name = file.path.name
    datasets = file.metadata.get(_DATASETS)
    numbers = [file.metadata.get(key) for key in (_CHUNK_COUNT, _CHUNK_SIZE)]
    if not isinstance(datasets, GgufArray) or datasets.item_type != "str" or None in numbers:
        what = f"a model ({file.architecture})" if file.architecture else "not an importance matrix"
        raise ModelFileError(f"{name}: this is {what}; make an importance matrix with `edge imatrix`")
    for key in (_CHUNK_COUNT, _CHUNK_SIZE):
        if file.value_type(key) != "u32":
            raise ModelFileError(f"{name}: {key} is stored as {file.value_type(key)}, but must be u32; {_DAMAGED}")
    names = {n.removesuffix(_SUMS) for n in file.tensors if n.endswith(_SUMS)}
    odd = file.tensors.keys() - {n + end for n in names for end in (_SUMS, _COUNTS)}
    if odd or any(n + _COUNTS not in file.tensors for n in names) or not names:
        raise ModelFileError(
            f"{name}: {len(names)} tensors have sums, but not all of them have counts, or there are others; {_DAMAGED}"
        )
    entries = {n: _gguf_entry(file, n) for n in sorted(names)}
    chunk_count, chunk_size = (int(n) for n in numbers if isinstance(n, int))
    return ImportanceMatrix(entries, tuple(datasets), chunk_count, chunk_size)


def _gguf_entry(file: GgufFile, name: str) -> Entry:
    values = []
    for tensor in (file.tensors[name + _SUMS], file.tensors[name + _COUNTS]):
        if tensor.type.name != "f32":
            raise ModelFileError(f"{file.path.name}: {tensor.name} is {tensor.type.name}, but must be f32; {_DAMAGED}")
        values.append(np.frombuffer(file.data(tensor.name), "<f4").astype(np.float32))
    sums, counts = values
    if sums.size % counts.size:
        raise ModelFileError(f"{file.path.name}: {name} has {sums.size} sums for {counts.size} experts; {_DAMAGED}")
    if not np.isfinite(counts).all() or (counts < 0).any() or (counts > _MOST_TOKENS).any():
        raise ModelFileError(f"{file.path.name}: {name} has counts that are not numbers of tokens; {_DAMAGED}")
    return Entry(sums.reshape(counts.size, -1), np.rint(counts).astype(np.int64))


class _Legacy:
    """An older file, read from its start, so that little is read of a file of another kind.

    A step beyond the end raises ModelFileError.
    """

    def __init__(self, file_name: str, file: IO[bytes], n_bytes: int) -> None:
        self._file_name, self._file, self._left = file_name, file, n_bytes

    def read(self) -> ImportanceMatrix:
        """Read the whole file. The parts after the entries (number of chunks, name of the text) may be missing."""
        n_bytes = self._left
        n_entries = self._number("the number of tensors") if self._left >= _I32.size else 0
        if not 1 <= n_entries <= _MOST_ENTRIES:
            raise ModelFileError(
                f"{self._file_name}: this is not an importance matrix, neither in GGUF nor in the older format; make"
                " one with `edge imatrix`"
            )
        if n_bytes > _MOST_BYTES:
            raise self._error(f"it has {n_bytes} bytes, more than the limit of {_MOST_BYTES}")
        entries: dict[str, Entry] = {}
        for i in range(n_entries):
            name = self._text(f"the name of tensor {i}")
            if not name.isprintable() or not name or name in entries:
                raise self._error(f"tensor {i} has an impossible name, {name[:80]!r}, or one that occurs twice")
            chunks, n_values = self._number(f"tensor {name!r}"), self._number(f"tensor {name!r}")
            if n_values < 1:
                raise self._error(f"tensor {name!r} has {n_values} values")
            values = np.frombuffer(self._bytes(4 * n_values, f"tensor {name!r}"), "<f4").astype(np.float32)
            # Without a number of chunks, the values are means already.
            entries[name] = Entry(values[None, :], np.array([max(chunks, 1)], np.int64))
        if not self._left:
            return ImportanceMatrix(entries)
        chunk_count = max(self._number("the number of chunks"), 0)
        dataset = self._text("the name of the text") if self._left else ""
        return ImportanceMatrix(entries, (dataset,) if dataset else (), chunk_count)

    def _number(self, what: str) -> int:
        number: int = _I32.unpack(self._bytes(_I32.size, what))[0]
        return number

    def _text(self, what: str) -> str:
        return self._bytes(self._number(what), what).decode("utf-8", "replace")

    def _bytes(self, n: int, what: str) -> bytes:
        if not 0 <= n <= self._left:
            raise self._error(f"{what} needs {n} bytes, but only {self._left} are left")
        data = self._file.read(n)
        if len(data) < n:
            raise self._error(f"it ended inside {what} while it was read")
        self._left -= n
        return data

    def _error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._file_name}: {problem}; {_DAMAGED}")


def _means(entry: Entry) -> Floats:
    counts = entry.counts[:, None].astype(np.float32)
    means: Floats = np.divide(entry.sums, counts, out=np.ones_like(entry.sums), where=counts > 0)
    return means.reshape(-1)


def _check(file_name: str, name: str, entry: Entry) -> None:
    """Raise ModelFileError unless the entry can contain sums of squares."""
    if not np.isfinite(entry.sums).all() or (entry.sums < 0).any():
        raise ModelFileError(f"{file_name}: {name} has sums of squares that are negative or not finite; {_DAMAGED}")
