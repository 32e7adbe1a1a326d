"""Kernel speeds: how fast this device computes with each quantization type. File sizes do not determine the speed."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devices.paths import cache_folder
from devices.probe import available_memory
from devices.remembered import Remembered
from edge.llama import llama
from edge.llama.address_space import AddressSpace
from edge.llama.ggml import quantize_rows
from edge.llama.library import PINNED_VERSION
from edge.llama.products import Products, loose_weight
from partition.predict.hysteresis import KERNEL, clearly_faster
from quant.mixes import MIXES, Mix
from quant.types import TYPES, TensorType

# Types for quantized weights. With narrower types, models lose most of their knowledge.
KINDS = (
    "iq2_xxs", "iq2_xs", "q2_k", "iq3_xxs", "iq3_s", "q3_k", "iq4_xs", "iq4_nl", "q4_0", "q4_k", "q4_1", "q5_0",
    "q5_k", "q5_1", "q6_k", "q8_0",
)  # fmt: skip
COLUMNS = 2048  # columns of the timed matrices
# Bytes of one type's matrix; all matrices together exceed the caches, so each is read from memory.
_MATRIX_BYTES = 16 << 20
_MEMORY_SHARE = 4  # all matrices together take at most 1/4 of free memory
_PATTERN_ROWS = 32
_PROMPT_ROWS = 32
# Rounds over all types; the fastest round of each type counts, because other work only slows products down.
_ROUNDS = 25
_PROMPT_ROUNDS = 3
_DEFAULTS = ("q4_k_m", "iq4_nl", "q4_0")  # mixes of about 4.5 bits per weight, the least damage first
_NEARLY = 0.9  # rates from this fraction of the fastest rate on count as equally fast


@dataclass(frozen=True)
class KernelSpeed:
    """Speed of one quantization type on this device."""

    type: TensorType
    decode: float  # 1e9 weights per second, with one row
    prefill: float | None  # 1e9 weights times rows per second, with many rows; None if not measured
    repacked: bool  # whether the weights were in this CPU's own layout

    def to_json(self) -> dict[str, Any]:
        """Return plain values in the format of docs/cli/quantize.md."""
        return {
            "type": self.type.name,
            "bits_per_weight": self.type.bits_per_weight,
            "decode_gweights_per_s": self.decode,
            "prefill_gweights_per_s": self.prefill,
            "repacked": self.repacked,
        }


def measure_kernels(
    kinds: Sequence[TensorType],
    columns: int,
    threads: int,
    *,
    prompts: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[KernelSpeed]:
    """Return the speeds of products with matrices in the layout that an engine would use.

    columns: columns of the matrices; the types' blocks must divide them
    prompts: measure prefill, too
    progress: called with (rounds done, rounds in total)
    """
    size = min(_MATRIX_BYTES, available_memory() // (_MEMORY_SHARE * len(kinds)))
    products = Products(threads)
    matrices = [_Matrix(kind, columns, size, products) for kind in kinds]
    rows = [1] * _ROUNDS + [_PROMPT_ROWS] * (_PROMPT_ROUNDS if prompts else 0)
    fastest: dict[int, NDArray[np.float64]] = {}
    try:
        for done, n in enumerate(rows, start=1):
            times = np.array([matrix.time(n) for matrix in matrices])
            fastest[n] = np.minimum(times, fastest.get(n, times))
            progress(done, len(rows))
        rates = {
            n: [float(n * shape.values / t / 1e9) for shape, t in zip(matrices, fastest[n], strict=True)]
            for n in fastest
        }
        return [
            KernelSpeed(shape.kind, rates[1][i], rates[_PROMPT_ROWS][i] if prompts else None, shape.repacked)
            for i, shape in enumerate(matrices)
        ]
    finally:
        for matrix in matrices:
            matrix.close()
        products.close()


def known_kernels(threads: int, kinds: Sequence[TensorType] | None = None, *, again: bool = False) -> list[KernelSpeed]:
    """Return the decode speeds of types on this device.

    The speeds are measured once for each number of threads and then remembered, so that a repeated command chooses
    among the same types.

    kinds: the types; None: KINDS
    again: measure again
    """
    kinds = kinds or [TYPES[name] for name in KINDS]
    remembered = Remembered("kernels", cache_folder())
    key = hashlib.sha256(f"{PINNED_VERSION} {llama.system_info()} {threads}".encode()).hexdigest()[:32]
    entry = None if again else remembered.get(key, math.inf)
    known = entry[0] if entry and isinstance(entry[0], dict) else {}
    with suppress(KeyError, ValueError, TypeError):
        return [KernelSpeed(kind, float(known[kind.name]), None, False) for kind in kinds]
    speeds = measure_kernels(kinds, COLUMNS, threads)
    remembered.put(key, {**known, **{speed.type.name: speed.decode for speed in speeds}})
    return speeds


def slow_kinds(speeds: Sequence[KernelSpeed]) -> dict[str, str]:
    """Return each type that decodes slower than a larger type. The value is the fastest larger type."""
    slow = {}
    for speed in speeds:
        larger = [other for other in speeds if other.type.bits_per_weight > speed.type.bits_per_weight]
        best = max(larger, key=lambda other: other.decode, default=None)
        if best is not None and clearly_faster(best.decode, speed.decode, by=KERNEL):
            slow[speed.type.name] = best.type.name
    return slow


def default_mix(threads: int, *, again: bool = False) -> Mix:
    """Return the default mix on this device.

    Of the usual mixes that are about as fast as the fastest one, it has the least damage. The speeds are those of
    `known_kernels`.
    """
    mixes = [MIXES[name] for name in _DEFAULTS]
    speeds = known_kernels(threads, [mix.type for mix in mixes], again=again)
    decode = {speed.type.name: speed.decode for speed in speeds}
    fastest = max(decode[mix.type.name] for mix in mixes)
    return next(mix for mix in mixes if decode[mix.type.name] >= _NEARLY * fastest)


class _Matrix:
    """A matrix in memory that repeats a pattern of rows."""

    def __init__(self, kind: TensorType, columns: int, n_bytes: int, products: Products) -> None:
        self.kind, self._products, self._columns = kind, products, columns
        row_bytes = kind.n_bytes(columns)
        self._rows = max(_PATTERN_ROWS, n_bytes // row_bytes // _PATTERN_ROWS * _PATTERN_ROWS)
        self.values = self._rows * columns
        self._space = AddressSpace(self._rows * row_bytes)
        rng = np.random.default_rng(0)
        values = rng.standard_normal((_PATTERN_ROWS, columns), np.float32)
        pattern = values.view(np.uint8) if kind.name == "f32" else None
        if pattern is None:
            pattern = quantize_rows(values, kind.id, np.ones(columns, np.float32))
        memory = np.frombuffer(self._space.view(0, self._rows * row_bytes), np.uint8)
        memory.reshape(-1, _PATTERN_ROWS, row_bytes)[:] = pattern
        self._x = rng.standard_normal((_PROMPT_ROWS, columns), np.float32)
        self._out = np.empty((_PROMPT_ROWS, self._rows), np.float32)
        with loose_weight(kind.id, columns, self._rows) as weight:
            self.repacked = weight.repacks

    def time(self, n: int) -> float:
        """Return the seconds of a product with `n` rows."""
        with loose_weight(self.kind.id, self._columns, self._rows) as weight:
            began = time.perf_counter()
            self._products.multiply(
                weight,
                self._space.address,
                self._rows,
                self.repacked,
                self._x.ctypes.data,
                n,
                self._out.ctypes.data,
                4 * self._rows,
            )
            return time.perf_counter() - began

    def close(self) -> None:
        self._space.close()
