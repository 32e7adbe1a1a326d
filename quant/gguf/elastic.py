"""Elastic files: one GGUF that contains several sizes of a model, each tensor once in every type that a size needs.

For other readers the file is the largest size, whose tensors are in the GGUF's table. Tensors that smaller sizes have
in other types come after the last one, each once, with the usual padding. Key-value pairs describe them, the largest
size first:

    elastic.version     u32       1
    elastic.file_bytes  arr[u64]  bytes of a file that contains this size alone
    elastic.divergence  arr[f32]  divergence of that file from the original model, nats per token
    elastic.tensors     arr[str]  names of the tensors that have several types
    elastic.types       arr[u32]  type ids: of all these tensors at the first size, then at the second, ...
    elastic.offsets     arr[u64]  in the same order, byte offsets from the start of the first tensor
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quant.errors import ModelFileError, UnknownTypeError
from quant.gguf.file import GgufFile, TensorInfo
from quant.gguf.header import GgufArray
from quant.gguf.writer import ALIGNMENT, NewTensor, encoded, header
from quant.types import TensorType, type_by_id
from quant.whole_file import whole_file

PREFIX = "elastic."
MOST_SIZES = 16
_VERSION = 1
_ARRAYS = {"file_bytes": "u64", "divergence": "f32", "tensors": "str", "types": "u32", "offsets": "u64"}


@dataclass(frozen=True)
class ElasticSize:
    """One size of a model, as if it were a file of its own."""

    file_bytes: int  # bytes of a file of this size alone
    divergence: float  # divergence from the original's predictions in nats per token; 0 if unknown
    tensors: Mapping[str, TensorInfo]


def is_elastic(file: GgufFile) -> bool:
    """Return whether a file contains several sizes, according to its metadata."""
    return f"{PREFIX}version" in file.metadata


def elastic_sizes(file: GgufFile) -> tuple[ElasticSize, ...]:
    """Return the sizes in a file, the largest first. A file that is not elastic has one.

    Raises ModelFileError with one line if the sizes are not valid.
    """
    if not is_elastic(file):
        return (ElasticSize(file.size_bytes, 0.0, file.tensors),)
    values = {name: _array(file, name, kind) for name, kind in _ARRAYS.items()}
    if (version := file.metadata[f"{PREFIX}version"]) != _VERSION:
        raise _error(file, f"their version is {version!r:.80}, but {_VERSION} is needed; update edge")
    if len(file.paths) > 1:
        raise _error(file, "a model in several files cannot contain sizes")
    names, sizes = values["tensors"], len(values["file_bytes"])
    if not 0 < sizes <= MOST_SIZES or len(values["divergence"]) != sizes:
        raise _error(
            file, f"{sizes} sizes and {len(values['divergence'])} divergences; needs 1 to {MOST_SIZES} of each"
        )
    for name in ("types", "offsets"):
        if len(values[name]) != sizes * len(names):
            raise _error(file, f"{name} has {len(values[name])} items for {sizes} sizes of {len(names)} tensors")
    if len(set(names)) != len(names):
        raise _error(file, "a tensor is named twice")
    for name in names:
        if name not in file.tensors:
            raise _error(file, f"there is no tensor {name[:80]!r}")
    start, end = file.header_bytes(file.path), file.size_bytes
    result = []
    for k in range(sizes):
        tensors = dict(file.tensors)
        for i, name in enumerate(names, start=k * len(names)):
            tensors[name] = _placed(file, name, values["types"][i], start + values["offsets"][i], end)
            if k == 0 and tensors[name] != file.tensors[name]:
                raise _error(file, f"the largest size has another {name} than the file's own table")
        divergence = values["divergence"][k]
        if not 0 <= divergence < math.inf:
            raise _error(file, f"a divergence is {divergence}, but must be 0 or more")
        result.append(ElasticSize(values["file_bytes"][k], divergence, tensors))
    return tuple(result)


@dataclass(frozen=True)
class ElasticPlan:
    """Layout of an elastic file before it is written."""

    head: bytes
    files: Sequence[GgufFile]  # files that contain one size each
    places: Mapping[tuple[str, int], tuple[GgufFile, int]]  # (source file, offset) by tensor name and type id
    n_bytes: int


def plan_elastic(files: Sequence[GgufFile], divergences: Sequence[float]) -> ElasticPlan:
    """Plan an elastic file from files that contain one size of a model each, the largest first.

    Raises ValueError if the files are not sizes of one model, or are split or elastic themselves.
    """
    first = files[0]
    shapes = {name: tensor.shape for name, tensor in first.tensors.items()}
    for file in files:
        if {name: tensor.shape for name, tensor in file.tensors.items()} != shapes:
            raise ValueError(f"{file.path.name} has other tensors than {first.path.name}")
        if len(file.paths) > 1 or is_elastic(file):
            raise ValueError(f"{file.path.name} is split, or holds several sizes")
    places: dict[tuple[str, int], tuple[GgufFile, int]] = {}
    position = 0
    for file in files:
        for name, tensor in file.tensors.items():
            if (key := (name, tensor.type.id)) not in places:
                places[key] = file, position
                position += -(-tensor.n_bytes // ALIGNMENT) * ALIGNMENT
    pairs = {key: first.raw_value(key) for key in first.metadata if key != "general.alignment"}
    pairs |= elastic_pairs(
        [{name: tensor.type.id for name, tensor in file.tensors.items()} for file in files],
        {key: position for key, (_, position) in places.items()},
        [file.size_bytes for file in files],
        divergences,
    )
    head = header(pairs, [NewTensor(name, tensor.shape, tensor.type) for name, tensor in first.tensors.items()])
    return ElasticPlan(head, files, places, len(head) + position)


def elastic_pairs(
    sizes: Sequence[Mapping[str, int]],
    positions: Mapping[tuple[str, int], int],
    file_bytes: Sequence[int],
    divergences: Sequence[float],
) -> dict[str, bytes]:
    """Return the key-value pairs of the metadata that describe the sizes in an elastic file.

    sizes: type id by tensor name, the largest size first.
    positions: offset in bytes from the start of the first tensor, by tensor name and type id.
    """
    names = [name for name in sizes[0] if len({types[name] for types in sizes}) > 1]
    return {
        f"{PREFIX}version": encoded("u32", _VERSION),
        f"{PREFIX}file_bytes": encoded("arr[u64]", list(file_bytes)),
        f"{PREFIX}divergence": encoded("arr[f32]", list(divergences)),
        f"{PREFIX}tensors": encoded("arr[str]", names),
        f"{PREFIX}types": encoded("arr[u32]", [types[name] for types in sizes for name in names]),
        f"{PREFIX}offsets": encoded("arr[u64]", [positions[name, types[name]] for types in sizes for name in names]),
    }


def write_elastic(plan: ElasticPlan, out: Path) -> None:
    """Write the file, completely or not at all.

    Raises OSError if there is no room, and ModelFileError if files differ in a tensor of the same type.
    """
    for file in plan.files:
        for name, tensor in file.tensors.items():
            other, _ = plan.places[name, tensor.type.id]
            if other is not file and not _same(file.data(name), other.data(name)):
                raise ModelFileError(f"{file.path.name} and {other.path.name} have different values of {name}")
    with whole_file(out, plan.n_bytes) as target:
        target.write(plan.head)
        for (name, _), (file, _) in plan.places.items():
            data = file.data(name)
            target.write(data)
            target.write(bytes(-len(data) % ALIGNMENT))


def _same(a: memoryview, b: memoryview) -> bool:
    chunk = 1 << 20
    return all(bytes(a[i : i + chunk]) == bytes(b[i : i + chunk]) for i in range(0, len(a), chunk))


def _array(file: GgufFile, name: str, kind: str) -> GgufArray:
    value = file.metadata.get(PREFIX + name)
    if not isinstance(value, GgufArray) or value.item_type != kind:
        raise _error(file, f"{name} is not a list of {kind}")
    return value


def _placed(file: GgufFile, name: str, type_id: int, offset: int, end: int) -> TensorInfo:
    """Return a tensor in another type, at another place."""
    own = file.tensors[name]
    try:
        kind: TensorType = type_by_id(type_id)
    except UnknownTypeError as error:
        raise _error(file, f"{name} has an {error}") from None
    if own.shape[0] % kind.block:
        raise _error(
            file, f"{name} has rows of {own.shape[0]} values, but {kind.name} needs a multiple of {kind.block}"
        )
    n_bytes = kind.n_bytes(math.prod(own.shape))
    if offset % ALIGNMENT or offset + n_bytes > end:
        raise _error(file, f"{name} as {kind.name} would be bytes {offset} to {offset + n_bytes} of {end}")
    return replace(own, type=kind, offset=offset, n_bytes=n_bytes)


def _error(file: GgufFile, problem: str) -> ModelFileError:
    return ModelFileError(f"{file.path.name}: its sizes are damaged: {problem}; write it again with edge quantize")
