"""A GGUF model file, opened and checked, so that native code never reads a damaged one.

A model may be split over several files (`name-00001-of-00003.gguf`). All are found, checked and presented as one. Other
modules interpret the metadata.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from quant.errors import ModelFileError
from quant.gguf.header import Value
from quant.gguf.part import Part, TensorInfo, read_part

__all__ = ["GgufFile", "TensorInfo"]

File = TypeVar("File", bound="GgufFile")

_SPLIT_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


class GgufFile:
    """A model file, read-only: its metadata and the location of its tensors. Weights are mapped, not read."""

    def __init__(self, parts: list[Part]) -> None:
        first = parts[0]
        self._parts = {part.path: part for part in parts}
        self.path = first.path
        self.version = first.version
        self.alignment = first.alignment
        self.size_bytes = sum(len(part.data) for part in parts)
        self.metadata: Mapping[str, Value] = MappingProxyType({k: p.value for k, p in first.pairs.items()})
        self.tensors: dict[str, TensorInfo] = {name: t for part in parts for name, t in part.tensors.items()}

    @classmethod
    def open(cls: type[File], path: str | os.PathLike[str]) -> File:
        """Read and check the header of `path` and, if the model is split, of its other parts.

        Raises ModelFileError with one line if the container is not valid.
        """
        first = read_part(Path(path))
        return cls([first, *_other_parts(first)])

    @classmethod
    def open_header(cls: type[File], path: str | os.PathLike[str]) -> File:
        """Read and check the header of a model in one file. The file may end after its header. Raises ModelFileError
        as `open` does.
        """
        return cls([read_part(Path(path), has_weights=False)])

    def with_tensors(self, tensors: Mapping[str, TensorInfo]) -> "GgufFile":
        """Return the same file with another table of tensors: their locations and types."""
        other = GgufFile(list(self._parts.values()))
        other.tensors = dict(tensors)
        return other

    @property
    def architecture(self) -> str:
        """The model family, such as "llama" or "qwen3"; "" if the file does not state it."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files of the model, in order."""
        return tuple(self._parts)

    def value_type(self, key: str) -> str:
        """Return the stored type of the value of `key`: "u32", "str", "arr[f32]"."""
        return self._parts[self.path].pairs[key].type

    def raw_value(self, key: str) -> bytes:
        """Return the value of `key` as stored, with its type id, for copying into another file."""
        part = self._parts[self.path]
        pair = part.pairs[key]
        return part.data[pair.start : pair.end]

    def stamp(self, path: Path) -> tuple[int, int]:
        """Return (bytes, time of the last change in ns) of one of `paths` at the time when its header was read."""
        part = self._parts[path]
        return len(part.data), part.changed_ns

    def header_bytes(self, path: Path) -> int:
        """Return the number of bytes of one of `paths` before its first tensor."""
        part = self._parts[path]
        return min((t.offset for t in part.tensors.values()), default=len(part.data))

    def data(self, name: str) -> memoryview:
        """Return the bytes of a tensor, mapped from its file. Nothing is read until they are used."""
        tensor = self.tensors[name]
        view = memoryview(self._parts[tensor.path].data)
        return view[tensor.offset : tensor.offset + tensor.n_bytes]


def _other_parts(first: Part) -> list[Part]:
    """Return parts 2 to n of a split model, checked and in order, or [] for a model in one file."""
    name = first.path.name
    count = _split_number(first, "split.count", 0)
    if count < 2:
        return []
    number = _split_number(first, "split.no", 0)
    match = _SPLIT_NAME.fullmatch(name)
    if match is None or (int(match["number"]), int(match["count"])) != (number + 1, count):
        raise ModelFileError(
            f"{name}: this is part {number + 1} of {count}, so its name must end in "
            f"-{number + 1:05d}-of-{count:05d}.gguf; give the file its old name back"
        )
    names = [f"{match['prefix']}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    if number != 0:
        raise ModelFileError(f"{name}: this is part {number + 1} of {count}; open {names[0]}, which finds the others")
    missing = [n for n in names if not first.path.with_name(n).exists()]
    if missing:
        raise ModelFileError(
            f"{name}: {len(missing)} of {count} parts are missing: {', '.join(missing[:3])}"
            f"{' ...' if len(missing) > 3 else ''}; put all parts in one directory"
        )
    parts = [read_part(first.path.with_name(n)) for n in names[1:]]
    seen = dict.fromkeys(first.tensors, name)
    for i, part in enumerate(parts, start=1):
        if _split_number(part, "split.no", -1) != i:
            raise ModelFileError(f"{part.path.name}: its split.no is not {i}; this is not part {i + 1} of {name}")
        for tensor in part.tensors:
            if tensor in seen:
                raise ModelFileError(f"{part.path.name}: tensor {tensor!r} is also in {seen[tensor]}")
            seen[tensor] = part.path.name
    total = first.pairs.get("split.tensors.count")
    if total is None or total.type != "i32" or total.value != len(seen):
        stated = "nothing" if total is None else f"{total.type} {total.value!r}"
        raise ModelFileError(
            f"{name}: the parts contain {len(seen)} tensors, but split.tensors.count has {stated} (needs i32)"
        )
    return parts


def _split_number(part: Part, key: str, default: int) -> int:
    """Return a u16 of the split. llama.cpp aborts if it has another type."""
    pair = part.pairs.get(key)
    if pair is None:
        return default
    if pair.type != "u16" or not isinstance(pair.value, int):
        raise ModelFileError(
            f"{part.path.name}: {key} is stored as {pair.type}, but must be u16; split the model again"
        )
    return pair.value
