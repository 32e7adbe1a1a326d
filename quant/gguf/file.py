"""A GGUF model file, opened and checked, so that native code never sees a broken one.

A model may be split over several files (`name-00001-of-00003.gguf`); all are found, checked and seen as one. What the
metadata mean is judged elsewhere.
"""

import os
import re
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from types import MappingProxyType

from quant.errors import ModelFileError
from quant.gguf.header import Value
from quant.gguf.part import Part, TensorInfo, read_part

__all__ = ["GgufFile", "TensorInfo"]

_SPLIT_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


class GgufFile:
    """A model file, read-only: its metadata and where its tensors lie. Weights are mapped, not read."""

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
    def open(cls, path: str | os.PathLike[str]) -> "GgufFile":
        """Read and check the header of `path`, and of the other parts where the model is split.

        Raises ModelFileError, one line, for everything that is wrong with the container.
        """
        first = read_part(Path(path))
        return cls([first, *_other_parts(first)])

    def with_tensors(self, tensors: Mapping[str, TensorInfo]) -> "GgufFile":
        """Return the same file with another table: where each tensor lies, and its type."""
        other = copy(self)
        other.tensors = dict(tensors)
        return other

    @property
    def architecture(self) -> str:
        """The model family ("llama", "qwen3"), "" if the file does not say."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return all files of the model, in order."""
        return tuple(self._parts)

    def value_type(self, key: str) -> str:
        """Return the stored type of the value of `key`: "u32", "str", "arr[f32]"."""
        return self._parts[self.path].pairs[key].type

    def raw_value(self, key: str) -> bytes:
        """The value of `key` as stored, type id included: what a writer copies behind the key."""
        part = self._parts[self.path]
        pair = part.pairs[key]
        return part.data[pair.start : pair.end]

    def stamp(self, path: Path) -> tuple[int, int]:
        """(bytes, time of the last change in ns) that one of `paths` had when its header was read."""
        part = self._parts[path]
        return len(part.data), part.changed_ns

    def header_bytes(self, path: Path) -> int:
        """Bytes of one of `paths` before its first tensor."""
        part = self._parts[path]
        return min((t.offset for t in part.tensors.values()), default=len(part.data))

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor, mapped from its file (nothing is read until they are touched)."""
        tensor = self.tensors[name]
        view = memoryview(self._parts[tensor.path].data)
        return view[tensor.offset : tensor.offset + tensor.n_bytes]


def _other_parts(first: Part) -> list[Part]:
    """Parts 2 to n of a split model, each checked and in order; nothing for a model in one file."""
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
            f"{name}: the parts hold {len(seen)} tensors, split.tensors.count says {stated} (needs i32)"
        )
    return parts


def _split_number(part: Part, key: str, default: int) -> int:
    """A u16 of the split; llama.cpp aborts where it has another type."""
    pair = part.pairs.get(key)
    if pair is None:
        return default
    if pair.type != "u16" or not isinstance(pair.value, int):
        raise ModelFileError(f"{part.path.name}: {key} is stored as {pair.type}, needed is u16; split the model again")
    return pair.value
