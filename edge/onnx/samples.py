"""Samples for calibration and comparison of an ONNX model, read from files or random."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from edge.errors import EdgeError, NotEnoughMemory
from quant.errors import ModelFileError

Array = npt.NDArray[Any]
Feeds = dict[str, Array]  # arrays by name of the input

# Types of number tensors: ONNX Runtime's name to numpy's.
TYPES = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16", "tensor(bool)": "bool"}
TYPES |= {f"tensor({u}int{bits})": f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)}
_DTYPES = {name: np.dtype(numpy_name) for name, numpy_name in TYPES.items()}

# Types of other readable outputs.
_READ_BY_RUN = re.compile(r"tensor\(string\)|seq\(map\((string|int64),tensor\(float\)\)\)")

ANY_SHAPE = ("...",)  # shape of a tensor that a model declares without a shape


class SamplesError(ModelFileError):
    """The samples do not fit the model (missing inputs, wrong shapes or types), or a file holds no samples."""


@dataclass(frozen=True)
class _Declared:
    """Declaration of an input or an output."""

    name: str
    type: str  # ONNX Runtime's name, such as "tensor(float)"
    shape: tuple[int | str, ...]  # name or "?" for an open dimension; ANY_SHAPE if no shape is declared

    @property
    def dtype(self) -> np.dtype[Any]:
        return _DTYPES[self.type]

    @property
    def concrete_shape(self) -> tuple[int, ...]:
        """The shape, with 1 for every open dimension."""
        return tuple(dim if isinstance(dim, int) else 1 for dim in self.shape)


class Input(_Declared):
    """An input of a model."""


class Output(_Declared):
    """An output of a model. Its open dimensions depend on the inputs."""


_Kind = TypeVar("_Kind", bound=_Declared)


def inputs_of(session: Any, shapeless: Collection[str] = ()) -> tuple[Input, ...]:
    """Return the inputs of a session.

    shapeless: names of inputs that the model declares without a shape; the session reports them as scalars

    Raises SamplesError if an input is not a tensor of numbers, such as text or a sequence.
    """
    inputs = _declared(Input, session.get_inputs(), shapeless)
    for input_ in inputs:
        if input_.type not in TYPES:
            raise SamplesError(
                f"input {input_.name!r} is a {input_.type}; only inputs that are tensors of numbers are supported"
            )
    return inputs


def outputs_of(session: Any, shapeless: Collection[str], names: Collection[str] = ()) -> tuple[Output, ...]:
    """Return the outputs of a session that can be read as arrays: tensors, also of text, and sequences of maps.

    shapeless: names of outputs that the model declares without a shape; the session infers the shape of some
    names: names of the outputs to return; empty: all readable outputs

    Raises ModelFileError if the model has no output of that name, or if no output can be read.
    """
    outputs = _declared(Output, session.get_outputs(), shapeless)
    if unknown := sorted(set(names) - {output.name for output in outputs}):
        there = ", ".join(repr(output.name) for output in outputs)
        raise ModelFileError(f"the model has no output {unknown[0]!r}; it has {there}")
    chosen = [output for output in outputs if not names or output.name in names]
    readable = tuple(output for output in chosen if output.type in TYPES or _READ_BY_RUN.match(output.type))
    if not readable or (names and len(readable) < len(chosen)):
        bad = next(output for output in chosen if output not in readable)
        raise ModelFileError(f"output {bad.name!r} is a {bad.type}, which cannot be read as an array")
    return readable


def as_array(value: Any) -> Array:
    """Return an output of ONNX Runtime as an array.

    Text becomes numpy text. The maps of a ZipMap become rows of a matrix; its columns are the keys of the first map.
    """
    if isinstance(value, list):
        keys = list(value[0]) if value else []
        return np.array([[row.get(key, 0.0) for key in keys] for row in value], np.float32).reshape(len(value), -1)
    array = np.asarray(value)
    return array.astype(np.str_) if array.dtype == object else array


def _declared(kind: type[_Kind], values: Iterable[Any], shapeless: Collection[str]) -> tuple[_Kind, ...]:
    """Return the declared inputs or outputs of a session, with a name or "?" for open dimensions."""

    def shape_of(value: Any) -> tuple[int | str, ...]:
        if not value.shape and value.name in shapeless:
            return ANY_SHAPE
        return tuple(dim if isinstance(dim, int) and dim >= 0 else str(dim or "?") for dim in value.shape)

    return tuple(kind(value.name, value.type, shape_of(value)) for value in values)


def declared_shape(value: Any) -> tuple[int | str, ...]:
    """Return the shape that a model file declares for an input, in the form of `Input.shape`."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return ANY_SHAPE
    return tuple(
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param or "?"
        for dim in tensor.shape.dim
    )


def shape_text(shape: Iterable[int | str]) -> str:
    """Return a shape as text for people, such as "(batch, 3, 224, 224)"."""
    return f"({', '.join(map(str, shape))})"


def random_feeds(inputs: tuple[Input, ...], n: int) -> Iterator[Feeds]:
    """Yield `n` random feeds, with 1 for open dimensions.

    Floats are normally distributed and bytes have any value. Other integers are 0 or 1, which are valid rows of any
    table.
    """
    rng = np.random.default_rng(0)
    for _ in range(n):
        feeds: Feeds = {}
        for input_ in inputs:
            if input_.dtype.kind == "f":
                values: Array = rng.standard_normal(input_.concrete_shape)
            else:
                values = rng.integers(0, 256 if input_.dtype == np.uint8 else 2, input_.concrete_shape)
            feeds[input_.name] = values.astype(input_.dtype)
        yield feeds


@contextmanager
def opened_arrays(path: Path, advice: str) -> Iterator[Any]:
    """Yield the array of a .npy file, or the archive of a .npz file, which may be read inside the block.

    Raises OSError if the file cannot be read, and SamplesError if it is damaged or another kind of file. Raises
    NotEnoughMemory, with `advice`, if memory runs out.
    """
    try:
        with path.open("rb") as file:
            yield np.load(file, allow_pickle=False)
    except (OSError, EdgeError):
        raise
    except MemoryError as exc:
        raise NotEnoughMemory(f"{path} does not fit into memory; {advice}") from exc
    except Exception as exc:  # damaged files make numpy and zipfile raise exceptions of many classes
        raise SamplesError(f"{path} is not a .npz file of numbers, or is cut off; numpy.savez writes one") from exc


class Samples:
    """Samples of a .npz file, or of all .npz files of a folder in the order of names. One file is in memory at a time.

    A file has an array for each input, under the input's name; its first axis counts samples. An array with as many
    axes as the input is split along the first axis: one row per run, or as many rows as the model's fixed batch. An
    array with one more axis holds one complete input per entry of its first axis. Other arrays are ignored.
    """

    def __init__(self, path: Path, inputs: tuple[Input, ...]) -> None:
        """Raises OSError if the path cannot be read, and SamplesError if a folder has no .npz files."""
        self.path, self._inputs = path, inputs
        self._files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not self._files:
            raise SamplesError(f"{path} holds no .npz file; save one there with numpy.savez, an array for each input")

    def __iter__(self) -> Iterator[Feeds]:
        """Yield the feeds of one run at a time. Raises OSError, or SamplesError if the samples do not fit the model."""
        for path in self._files:
            runs = {input_.name: self._runs(path, input_, array) for input_, array in self._arrays(path)}
            counts = {name: len(parts) for name, parts in runs.items()}
            if len(set(counts.values())) > 1:
                raise SamplesError(f"{path}: every input needs as many samples as the others; there are {counts}")
            n = next(iter(counts.values()), 0)
            if n == 0:
                raise SamplesError(f"{path} holds no whole sample; the first axis of each array counts them")
            for i in range(n):
                yield {name: parts[i : i + 1].reshape(parts.shape[1:]) for name, parts in runs.items()}

    def _arrays(self, path: Path) -> Iterator[tuple[Input, Array]]:
        """Yield every input with its array."""
        with opened_arrays(path, "put fewer samples into each file") as archive:
            if isinstance(archive, np.ndarray):
                raise SamplesError(f"{path} holds one array without a name; numpy.savez writes names with them")
            lacking = [input_.name for input_ in self._inputs if input_.name not in archive.files]
            if lacking:
                raise SamplesError(
                    f"{path} needs an array for each input; {', '.join(map(repr, lacking))} are missing; it has"
                    f" {', '.join(map(repr, archive.files)) or 'nothing'}"
                )
            for input_ in self._inputs:
                yield input_, archive[input_.name]

    def _runs(self, path: Path, input_: Input, array: Array) -> Array:
        """Return the array with runs along its first axis."""
        dtype = input_.dtype
        what = f"{path}: {input_.name!r}"
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise SamplesError(f"{what} has values of type {array.dtype}; the model takes {dtype}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise SamplesError(
                f"{what} has values that are infinite or not a number; ranges cannot be measured with them"
            )
        rank = len(input_.shape)
        if array.ndim == rank and rank > 0:
            rows = input_.shape[0] if isinstance(input_.shape[0], int) else 1
            if rows == 0:
                raise SamplesError(f"{what}: the model takes no values there")
            runs = len(array) // rows
            array = array[: runs * rows].reshape(runs, rows, *array.shape[1:])
        elif array.ndim != rank + 1:
            raise SamplesError(
                f"{what} has the shape {array.shape}; the model takes {shape_text(input_.shape)} of each sample"
            )
        fits = all(isinstance(dim, str) or dim == have for dim, have in zip(input_.shape, array.shape[1:], strict=True))
        if not fits or math.prod(array.shape[1:]) == 0:
            raise SamplesError(
                f"{what} has samples of shape {array.shape[1:]}; the model takes {shape_text(input_.shape)}"
            )
        return array.astype(dtype)


def open_dims(inputs: tuple[Input, ...]) -> Mapping[str, tuple[str, ...]]:
    """Return the open dimensions of each input that has any."""
    open_by_input = {input_.name: tuple(dim for dim in input_.shape if isinstance(dim, str)) for input_ in inputs}
    return {name: dims for name, dims in open_by_input.items() if dims}
