"""Comparison of a quantized ONNX model with its float model: the error of each output, and the time of a run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edge.onnx.runtime import refusals
from edge.onnx.samples import Feeds

_LEAST_ROUNDS, _MOST_ROUNDS = 5, 100
_TIMING_S = 1.0  # seconds of timing for both models together, unless the minimum number of rounds takes longer

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class OutputError:
    """Error of one output relative to the float model, over all samples. Undefined figures are None."""

    name: str
    max_abs: float | None  # maximum difference of a value; None if shapes differ or values are not finite
    relative_l2: float | None  # norm of the difference divided by the norm of the float output; None if that norm is 0
    cosine: float | None  # cosine of the angle between the two outputs
    top1: float | None  # fraction of rows with the same largest value; None if the output is not (n, classes)


@dataclass(frozen=True)
class Comparison:
    """Errors and times of two models on the same inputs."""

    samples: int
    outputs: tuple[OutputError, ...]
    float_ms: float  # median time of a run; runs of both models alternate
    quantized_ms: float
    rounds: int

    @property
    def slower(self) -> bool:
        """True if the quantized model is slower by more than the variation of such measurements."""
        return self.quantized_ms > 1.05 * self.float_ms


def compare(reference: Any, quantized: Any, feeds: Iterable[Feeds]) -> Comparison:
    """Run two sessions with the same inputs on each of `feeds`, then time both on the first feed.

    At least one feed is needed. Raises EngineError if a session does not run.
    """
    names = [output.name for output in reference.get_outputs()]
    sums = [_Sums() for _ in names]
    samples, first = 0, None
    for feed in feeds:
        expected = _run(reference, names, feed, "the float model")
        actual = _run(quantized, names, feed, "the quantized model")
        for total, a, b in zip(sums, expected, actual, strict=True):
            total.add(a, b)
        samples += 1
        first = first or feed
    assert first is not None, "nothing to compare with"
    float_ms, quantized_ms, rounds = _times(reference, quantized, first)
    outputs = tuple(total.error(name) for name, total in zip(names, sums, strict=True))
    return Comparison(samples, outputs, float_ms, quantized_ms, rounds)


def errors(expected: Feeds, actual: Feeds) -> tuple[OutputError, ...]:
    """Return the error of each output in `actual` relative to `expected`. Both contain arrays by name."""
    results = []
    for name, array in expected.items():
        sums = _Sums()
        sums.add(array, actual[name])
        results.append(sums.error(name))
    return tuple(results)


def differ(a: object, b: object) -> bool:
    """Return whether two outputs of a model differ."""
    return not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b))


class _Sums:
    """Sums over all samples, which give the figures of one output."""

    def __init__(self) -> None:
        self._comparable = True
        self._max = self._difference = self._a = self._b = self._product = 0.0
        self._rows = self._same = 0

    def add(self, expected: object, actual: object) -> None:
        """Add one sample's output of both models."""
        a, b = _numbers(expected), _numbers(actual)
        if a is None or b is None or a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
            self._comparable = False
            return
        rows = _rows_of_classes(a)
        if rows:
            same = a.reshape(rows, -1).argmax(1) == b.reshape(rows, -1).argmax(1)
            self._rows, self._same = self._rows + rows, self._same + int(same.sum())
        a, b = a.ravel(), b.ravel()
        self._max = max(self._max, float(np.abs(a - b).max(initial=0.0)))
        self._difference += float(np.square(a - b).sum())
        self._a += float(a @ a)
        self._b += float(b @ b)
        self._product += float(a @ b)

    def error(self, name: str) -> OutputError:
        """Return the figures of all samples."""
        if not self._comparable:
            return OutputError(name, None, None, None, None)
        relative = math.sqrt(self._difference / self._a) if self._a else None
        cosine = self._product / math.sqrt(self._a * self._b) if self._a and self._b else None
        return OutputError(name, self._max, relative, cosine, self._same / self._rows if self._rows else None)


def _numbers(output: object) -> Array | None:
    """Return an output as float64; None if it is text, a sequence or a map."""
    if not isinstance(output, np.ndarray) or output.dtype.kind not in "fiub":
        return None
    return output.astype(np.float64)


def _rows_of_classes(output: Array) -> int:
    """Return the number of rows of an output of shape (n, classes), possibly with more axes of 1; 0 for other
    shapes."""
    shape = output.shape
    if len(shape) < 2 or shape[1] < 2 or any(dim != 1 for dim in shape[2:]):
        return 0
    return int(shape[0])


def _run(session: Any, names: list[str], feed: Feeds, who: str) -> list[object]:
    with refusals(f"run {who}"):
        outputs: list[object] = session.run(names, feed)
        return outputs


def _times(reference: Any, quantized: Any, feed: Feeds) -> tuple[float, float, int]:
    """Return the median milliseconds of a run of each model, and the number of timed runs of each.

    Runs of both models alternate, after an untimed run of each.
    """
    times_ms: tuple[list[float], list[float]] = ([], [])
    for session in (reference, quantized):
        session.run(None, feed)
    end_s = time.perf_counter() + _TIMING_S
    while len(times_ms[0]) < _LEAST_ROUNDS or (len(times_ms[0]) < _MOST_ROUNDS and time.perf_counter() < end_s):
        for session, own_ms in zip((reference, quantized), times_ms, strict=True):
            start_s = time.perf_counter()
            session.run(None, feed)
            own_ms.append(1e3 * (time.perf_counter() - start_s))
    return statistics.median(times_ms[0]), statistics.median(times_ms[1]), len(times_ms[0])
