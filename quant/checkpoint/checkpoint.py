"""A Hugging Face folder of safetensors, opened and checked: its JSON files and the location of its tensors.

Format: https://huggingface.co/docs/safetensors. A file is a u64 header length, a JSON header with the type, shape and
byte range of each tensor, and then the bytes. Tensors are read with `pread`, piece by piece, because every touched page
of a mapping would count as memory of this process.
"""

import json
import math
import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from quant.errors import ModelFileError
from quant.text import with_article

MAX_JSON_BYTES = 200 << 20
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_MAX_TENSORS = 1 << 20
_MAX_DIMS = 8
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

# Bytes of a value. The other types are listed by name only, so that the error for them can name the tensor.
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
          "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location, shape and type of one tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first
    dtype: str  # the format's name of the type, such as "BF16"
    path: Path
    offset: int  # bytes from the start of its file
    n_bytes: int


class Checkpoint:
    """A folder of safetensors, read-only. Close it, or use it as a context manager."""

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        self.folder = folder
        self.tensors = tensors
        self._handles: dict[Path, int] = {}

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read and check the headers of all files of `folder`. Raises ModelFileError with one line."""
        if not folder.is_dir():
            raise ModelFileError(f"{folder}: this is not a folder; give the folder of a Hugging Face model")
        if not (folder / "config.json").is_file():
            raise ModelFileError(f"{folder}: it has no config.json; give the folder of a Hugging Face model")
        return cls(folder, _tensors(folder))

    @property
    def paths(self) -> set[Path]:
        """All files that contain tensors."""
        return {tensor.path for tensor in self.tensors.values()}

    def json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file of the folder, or {} without such a file. Raises ModelFileError."""
        path = self.folder / name
        return read_json(path) if path.exists() else {}

    def content(self, name: str) -> bytes | None:
        """Return a small file of the folder, or None without such a file. Raises ModelFileError."""
        path = self.folder / name
        return _read(path) if path.exists() else None

    def read(self, tensor: StoredTensor, start: int, n_bytes: int) -> bytes:
        """Return `n_bytes` of a tensor from its byte `start` on. Raises ModelFileError if the file became shorter."""
        if tensor.path not in self._handles:
            self._handles[tensor.path] = os.open(tensor.path, os.O_RDONLY | os.O_CLOEXEC)
        parts, at = [], tensor.offset + start
        while n_bytes:
            part = os.pread(self._handles[tensor.path], n_bytes, at)
            if not part:
                raise ModelFileError(f"{tensor.path.name}: it ended inside {tensor.name!r} while it was read")
            parts.append(part)
            at += len(part)
            n_bytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close the files."""
        while self._handles:
            with suppress(OSError):
                os.close(self._handles.popitem()[1])

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelFileError if the file cannot be read or contains anything else."""
    return _object(_read(path), path.name)


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path.name}: this is not a regular file")
        if status.st_size > MAX_JSON_BYTES:
            raise ModelFileError(f"{path.name}: it has {status.st_size} bytes, more than the limit of {MAX_JSON_BYTES}")
        return path.read_bytes()
    except OSError as exc:
        raise ModelFileError(f"{path.name}: cannot be read: {exc.strerror or exc}") from exc


def _object(raw: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as exc:
        raise ModelFileError(f"{name}: not valid JSON: {exc}; download it again") from exc
    if not isinstance(value, dict):
        raise ModelFileError(
            f"{name}: it needs a JSON object, but has {with_article(type(value).__name__)}; download it again"
        )
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice")
    return values


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all files, by name."""
    if (folder / _SINGLE).exists():
        return _file_tensors(folder / _SINGLE)
    if not (folder / _INDEX).exists():
        raise ModelFileError(f"{folder}: it has neither {_SINGLE} nor {_INDEX}; only safetensors can be read")
    places = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelFileError(f"{_INDEX}: it has no weight_map; download it again")
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(_names(places.values())):
        if not (folder / name).exists():
            raise ModelFileError(f"{folder}: {name} is missing, but {_INDEX} names it; download it")
        part = _file_tensors(folder / name)
        twice = tensors.keys() & part.keys()
        if twice:
            raise ModelFileError(f"{name}: tensor {min(twice)!r} is also in {tensors[min(twice)].path.name}")
        tensors |= part
    for tensor, name in places.items():
        if tensor not in tensors or tensors[tensor].path.name != name:
            raise ModelFileError(f"{name}: it has no tensor {tensor!r}, but {_INDEX} names it; download both again")
    return tensors


def _names(values: Iterable[Any]) -> set[str]:
    """Return the file names of an index. Raises ModelFileError for a name that leads out of the folder."""
    names = set()
    for name in values:
        if not isinstance(name, str) or not name.endswith(".safetensors") or set(name) & set("/\\\0"):
            raise ModelFileError(f"{_INDEX}: {name!r:.80} is not the name of a .safetensors file in this folder")
        names.add(name)
    return names


def _file_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file. Raises ModelFileError unless their ranges lie in the file and do not overlap."""
    name = path.name
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block forever
            raise ModelFileError(f"{name}: this is not a regular file")
        with path.open("rb") as file:
            length = file.read(8)
            if len(length) < 8:
                raise ModelFileError(f"{name}: it has {len(length)} bytes and is not safetensors; download it again")
            n_header = struct.unpack("<Q", length)[0]
            if n_header > min(_MAX_HEADER_BYTES, status.st_size - 8):
                raise ModelFileError(
                    f"{name}: its header claims {n_header} bytes, but the file has {status.st_size}; it is not a "
                    "complete safetensors file: download it again"
                )
            header = _object(file.read(n_header), name)
    except OSError as exc:
        raise ModelFileError(f"{name}: cannot be read: {exc.strerror or exc}") from exc
    header.pop("__metadata__", None)
    if len(header) > _MAX_TENSORS:
        raise ModelFileError(f"{name}: it claims {len(header)} tensors, more than the limit of {_MAX_TENSORS}")
    tensors = {key: _tensor(path, key, entry, 8 + n_header) for key, entry in header.items()}
    end, before = 8 + n_header, ""
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.n_bytes)):
        if tensor.offset < end:
            raise ModelFileError(f"{name}: tensors {before!r} and {tensor.name!r} overlap; the file is damaged")
        end, before = tensor.offset + tensor.n_bytes, tensor.name
    if end > status.st_size:
        raise ModelFileError(
            f"{name}: tensor {before!r} ends at byte {end}, but the file has {status.st_size}; download it again"
        )
    return tensors


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    """Parse one entry of a header."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise ModelFileError(f"{path.name}: tensor {name!r:.200} has no dtype, shape and data_offsets; it is damaged")
    start, end = offsets
    need = math.prod(shape) * _SIZES.get(dtype, 0)
    if end < start or (dtype in _SIZES and end - start != need):
        raise ModelFileError(f"{path.name}: tensor {name!r} needs {need} bytes but has {end - start}; it is damaged")
    return StoredTensor(name, shape, dtype, path, data_start + start, end - start)


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Return a short list of sizes as a tuple, or None for anything else."""
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        return None
    return tuple(value) if all(type(item) is int and 0 <= item < 2**62 for item in value) else None
