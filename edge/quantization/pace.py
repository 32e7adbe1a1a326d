"""Pace: expected time to quantize to each type, at the speed that this device has shown until now."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edge.quantization.tensor_rows import TensorRows
from quant.gguf.file import GgufFile
from quant.types import TYPES, TensorType

# Usual nanoseconds of one thread to quantize a value by importance. The types left out only copy or round.
_VALUE_NS = {
    "iq1_s": 4000.0, "iq1_m": 8000.0, "iq2_xxs": 650.0, "iq2_xs": 800.0, "iq2_s": 650.0, "q2_k": 170.0,
    "iq3_xxs": 690.0, "iq3_s": 480.0, "q3_k": 60.0, "iq4_xs": 320.0, "iq4_nl": 350.0, "q4_0": 36.0, "q4_k": 150.0,
    "q4_1": 160.0, "q5_0": 36.0, "q5_k": 160.0, "q5_1": 150.0, "q6_k": 40.0,
}  # fmt: skip
_ROUNDED_NS = 5.0
_MEASURED, _MEASURED_S, _TENSORS = "q4_0", 0.5, 8  # type, seconds and tensors to measure the pace
# Usual seconds in which a process prepares the tables of a type, in one thread.
_TABLES_S = {"iq1_s": 1.0, "iq1_m": 1.0, "iq2_xxs": 1.4, "iq2_xs": 3.0, "iq2_s": 6.0, "iq3_xxs": 0.2, "iq3_s": 0.4}


def is_slow(kind: TensorType) -> bool:
    """Return whether quantizing to a type takes more than twice the time of q4_0."""
    return _VALUE_NS.get(kind.name, _ROUNDED_NS) > 2 * _VALUE_NS[_MEASURED]


class Pace:
    """The ratio of the time that quantizing takes on this device to its usual time."""

    def __init__(self, threads: int, start_s: float = 0.0) -> None:
        """start_s: seconds that a process of the quantizer takes to start"""
        self.threads, self._start_s = threads, start_s
        self._usual_s = self._measured_s = 0.0

    def add(self, kind: TensorType, values: int, seconds: float) -> None:
        """Add a measurement: quantizing `values` values to a type took `seconds`."""
        self._usual_s += self._values_s(kind, values)
        self._measured_s += seconds

    def seconds(self, values: Mapping[TensorType, int]) -> float:
        """Return the expected seconds to quantize these numbers of values to types."""
        return self._ratio * sum(self._values_s(kind, n) for kind, n in values.items())

    def file_s(self, values: Mapping[TensorType, int]) -> float:
        """Return the expected seconds to write a file: two processes start, for a dry run and for the file."""
        tables_s = sum(_TABLES_S.get(kind.name, 0.0) for kind in values)
        return 2 * self._start_s + self._ratio * tables_s + self.seconds(values)

    @property
    def _ratio(self) -> float:
        return self._measured_s / self._usual_s if self._usual_s else 1.0

    def _values_s(self, kind: TensorType, values: int) -> float:
        return values * 1e-9 * _VALUE_NS.get(kind.name, _ROUNDED_NS) / self.threads


def measure_pace(pace: Pace, file: GgufFile, names: Sequence[str], clock: Callable[[], float]) -> None:
    """Quantize some of the tensors `names`. The first one only warms up."""
    kind = TYPES[_MEASURED]
    fitting = [name for name in names if file.tensors[name].shape[0] % kind.block == 0]
    fitting.sort(key=lambda name: file.tensors[name].n_values)
    end = clock() + _MEASURED_S
    with ThreadPoolExecutor(pace.threads) as pool:
        for i, name in enumerate(fitting[len(fitting) // 2 :][: 1 + _TENSORS]):
            columns, _, *more = file.tensors[name].shape
            rows = TensorRows(file, name, np.ones(math.prod((columns, *more)), np.float32))
            began = clock()
            rows.quantized(kind, pool).close()
            if i:
                pace.add(kind, file.tensors[name].n_values, clock() - began)
            if i and clock() > end:
                break
