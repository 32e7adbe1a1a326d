"""Rows of a model file's tensors, as floats and quantized to other types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from edge.llama.address_space import AddressSpace
from edge.llama.ggml import dequantize_rows, quantize_rows
from quant.gguf.file import GgufFile, TensorInfo
from quant.sensitivity import EXACT
from quant.types import TensorType

Floats = NDArray[np.float32]

_CHUNK_VALUES = 1 << 18  # values that a thread quantizes at a time: 1 MiB of floats
_SAMPLE_VALUES = 1 << 16  # values sampled from a whole tensor


class TensorRows:
    """One tensor of a file, and the importance of its columns."""

    def __init__(self, file: GgufFile, name: str, importance: Floats | None) -> None:
        """importance: float32 [experts * columns], or None if all columns have the same importance"""
        tensor: TensorInfo = file.tensors[name]
        self.name, self.type = name, tensor.type
        self.columns, self._rows_of_one = tensor.shape[0], tensor.shape[1]
        self.matrices = math.prod(tensor.shape[2:])
        self.rows = self._rows_of_one * self.matrices
        self._bytes = np.frombuffer(file.data(name), np.uint8).reshape(self.rows, -1)
        self._importance = None if importance is None else importance.reshape(self.matrices, self.columns)

    @property
    def has_importance(self) -> bool:
        """True if its columns have importance weights, which some types need."""
        return self._importance is not None

    def values(self, first: int, last: int) -> Floats:
        """Return rows [first, last) as float32 [rows, columns]."""
        out = np.empty((last - first, self.columns), np.float32)
        dequantize_rows(self._bytes[first:last], self.type.id, out)
        return out

    def quantized(self, kind: TensorType, pool: ThreadPoolExecutor) -> AddressSpace:
        """Return the whole tensor in another type, in the layout of a file. The caller must `close` the result."""
        row_bytes = kind.n_bytes(self.columns)
        space = AddressSpace(self.rows * row_bytes)
        out = np.frombuffer(space.view(0, self.rows * row_bytes), np.uint8).reshape(self.rows, row_bytes)

        def fill(part: tuple[int, int]) -> None:
            out[part[0] : part[1]] = quantize_rows(self.values(*part), kind.id, self._weights(part[0]))

        list(pool.map(fill, self._parts(_CHUNK_VALUES)))
        return space

    def errors(self, kinds: Iterable[TensorType], is_over: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Return the relative squared error of the weights by type, weighted by importance.

        The errors come from a sample. If a type stores the sample without loss, its error comes from all values.

        is_over: returns whether the time is up; then the values so far count
        """
        parts = list(self._parts(_CHUNK_VALUES // 16))
        step = max(1, len(parts) * (_CHUNK_VALUES // 16) // _SAMPLE_VALUES)
        sampled = self._errors(kinds, parts[::step], is_over)
        exact = [kind for kind in kinds if sampled[kind.name] <= EXACT and kind.block > 1 and kind.id != self.type.id]
        needs_all = exact and step > 1 and not is_over()
        return {**sampled, **(self._errors(exact, parts, is_over) if needs_all else {})}

    def _errors(
        self, kinds: Iterable[TensorType], parts: Iterable[tuple[int, int]], is_over: Callable[[], bool]
    ) -> dict[str, float]:
        """Return the errors of some rows, at least those of the first part."""
        sums = dict.fromkeys((kind.name for kind in kinds), 0.0)
        total = 0.0
        for part in parts:
            if total and is_over():
                break
            values, weights = self.values(*part), self._weights(part[0])
            total += _weighed(values, weights)
            for kind in kinds:
                if kind.id == self.type.id:
                    continue
                back = np.empty_like(values)
                dequantize_rows(quantize_rows(values, kind.id, weights), kind.id, back)
                back -= values
                sums[kind.name] += _weighed(back, weights)
        return {name: error / total if total else 0.0 for name, error in sums.items()}

    def _weights(self, row: int) -> Floats | None:
        return None if self._importance is None else self._importance[row // self._rows_of_one]

    def _parts(self, values: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows of one matrix, each with about `values` values."""
        step = max(1, values // self.columns)
        for start in range(0, self.rows, self._rows_of_one):
            end = start + self._rows_of_one
            for first in range(start, end, step):
                yield first, min(end, first + step)


def _weighed(values: Floats, weights: Floats | None) -> float:
    """Return the sum of squares, each multiplied by its column's weight."""
    squares = np.einsum("ij,ij->j", values, values, dtype=np.float64)
    return float(squares.sum() if weights is None else squares @ weights)
