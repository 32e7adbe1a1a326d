"""Samples to calibrate and compare an ONNX model with: read from files, or random."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge.errors import NotEnoughMemory
from quant.errors import ModelFileError

Array = npt.NDArray[Any]
Feeds = dict[str, Array]  # by name of the input

# Types of tensors of numbers that numpy has, too: ONNX Runtime's name to numpy's.
TYPES = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16", "tensor(bool)": "bool"}
TYPES |= {f"tensor({u}int{bits})": f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)}


ANY_SHAPE = ("...",)  # of a tensor that a model declares without a shape


class SamplesError(ModelFileError):
    """Samples do not fit the model (missing inputs, other shapes or types), or a file holds none."""


@dataclass(frozen=True)
class Input:
    """An input of a model."""

    name: str
    type: str  # as ONNX Runtime names it: "tensor(float)"
    shape: tuple[int | str, ...]  # a name or "?" for open dimensions; ANY_SHAPE if all are

    @property
    def concrete_shape(self) -> tuple[int, ...]:
        """The shape with 1 for every open dimension."""
        return tuple(dim if isinstance(dim, int) else 1 for dim in self.shape)


def inputs_of(session: Any, shapeless: Collection[str] = ()) -> tuple[Input, ...]:
    """Return the inputs of a session. shapeless: names of those without a shape, which a session calls scalars.
    SamplesError for one that is no tensor of numbers, such as text or a sequence."""
    inputs = tuple(
        Input(value.name, value.type, ANY_SHAPE if value.name in shapeless else shape_of_session(value.shape))
        for value in session.get_inputs()
    )
    for input_ in inputs:
        if input_.type not in TYPES:
            raise SamplesError(
                f"input {input_.name!r} is a {input_.type}; values can be given to tensors of numbers only"
            )
    return inputs


def declared_shape(value: Any) -> tuple[int | str, ...]:
    """Return the shape that a model's file declares for an input, as that of an `Input`."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return ANY_SHAPE
    return tuple(
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param or "?"
        for dim in tensor.shape.dim
    )


def shape_of_session(shape: Iterable[Any]) -> tuple[int | str, ...]:
    """Return a session's shape with a name or "?" for open dimensions."""
    return tuple(dim if isinstance(dim, int) and dim >= 0 else str(dim or "?") for dim in shape)


def shape_text(shape: Iterable[int | str]) -> str:
    """Return a shape for people: "(batch, 3, 224, 224)"."""
    return f"({', '.join(map(str, shape))})"


def random_feeds(inputs: tuple[Input, ...], n: int) -> Iterator[Feeds]:
    """Yield `n` random feeds: normal floats; bytes of any value; other whole numbers 0 or 1, which are rows of any
    table.

    Open dimensions are 1.
    """
    rng = np.random.default_rng(0)
    for _ in range(n):
        feeds: Feeds = {}
        for input_ in inputs:
            dtype = np.dtype(TYPES[input_.type])
            if dtype.kind == "f":
                feeds[input_.name] = rng.standard_normal(input_.concrete_shape).astype(dtype)
            else:
                most = 256 if dtype == np.uint8 else 2
                feeds[input_.name] = rng.integers(0, most, input_.concrete_shape).astype(dtype)
        yield feeds


class Samples:
    """Samples of a .npz file, or of all .npz files of a folder in the order of names, one file in memory at a time.

    An array for each input, under its name; the first axis counts samples. An array with as many axes as the input is
    cut along the first one: one row each, or as many as the model's fixed batch. With one axis more, each of its
    parts is an input as it is. Other arrays are ignored.
    """

    def __init__(self, path: Path, inputs: tuple[Input, ...]) -> None:
        """OSError if there is nothing to read; SamplesError for a folder without .npz files."""
        self.path, self._inputs = path, inputs
        self._files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not self._files:
            raise SamplesError(f"{path} holds no .npz file; save one there with numpy.savez, an array for each input")

    def __iter__(self) -> Iterator[Feeds]:
        """Yield the feeds of one run each. OSError; SamplesError, which says what is needed and what was there."""
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
        try:
            with path.open("rb") as file:
                archive = np.load(file, allow_pickle=False)
                if isinstance(archive, np.ndarray):
                    raise SamplesError(f"{path} holds one array without a name; numpy.savez writes names with them")
                lacking = [input_.name for input_ in self._inputs if input_.name not in archive.files]
                if lacking:
                    raise SamplesError(
                        f"{path} needs an array for each input; {', '.join(map(repr, lacking))} not there, only"
                        f" {', '.join(map(repr, archive.files)) or 'nothing'}"
                    )
                for input_ in self._inputs:
                    yield input_, archive[input_.name]
        except MemoryError as exc:
            raise NotEnoughMemory(f"{path} does not fit into memory; put fewer samples into each file") from exc
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as exc:
            raise SamplesError(f"{path} is not a .npz file of numbers, or is cut off; numpy.savez writes one") from exc

    def _runs(self, path: Path, input_: Input, array: Array) -> Array:
        """Return the array with one run along its first axis."""
        dtype = np.dtype(TYPES[input_.type])
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
    """Return the open dimensions by input, without inputs that have none."""
    open_by_input = {input_.name: tuple(dim for dim in input_.shape if isinstance(dim, str)) for input_ in inputs}
    return {name: dims for name, dims in open_by_input.items() if dims}
