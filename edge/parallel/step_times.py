"""Step times of one rank by kind of step: the rank's own record, and the summary that it sends to rank 0."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.parallel.logits import LogitsQuery

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

KEPT = 2048  # number of remembered steps


class StepTime(NamedTuple):
    """Times of one step on one rank."""

    rows: int  # rows of a decode step, each of another sequence; 0: a prefill step with several rows of a sequence
    compute_s: float = 0.0  # time in llama.cpp
    communication_s: float = 0.0  # time for sending, receiving and adding, including waits for other ranks
    stall_s: float = 0.0  # time of waiting for other ranks, before or during communication
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def decode(self) -> bool:
        """True for a decode step."""
        return self.rows > 0


@dataclass(frozen=True)
class Figure:
    """Median and percentiles over steps."""

    median: float
    p99: float
    p10: float


@dataclass(frozen=True)
class Summary:
    """Summary of the steps of one kind on one rank."""

    steps: int
    compute_ms: Figure
    communication_ms: Figure
    stall_ms: Figure
    sent_bytes: Figure
    received_bytes: Figure

    def to_json(self) -> dict[str, Any]:
        """Return plain values by field."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Summary:
        """Read the values that `to_json` wrote. Raises ValueError for other values, because they come from another
        device.
        """
        try:
            names = [field.name for field in fields(cls) if field.name != "steps"]
            figures = {
                name: Figure(*(float(values[name][figure_field.name]) for figure_field in fields(Figure)))
                for name in names
            }
            steps = int(values["steps"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"not a summary of steps: {error}") from error
        if steps < 1 or not all(0 <= value < math.inf for figure in figures.values() for value in astuple(figure)):
            raise ValueError("a summary of steps has impossible figures")
        return cls(steps, **figures)


class StepTimes:
    """Times of the most recent steps of a rank."""

    def __init__(self) -> None:
        self._steps: deque[StepTime] = deque(maxlen=KEPT)
        self.decoded = 0  # number of decode steps so far

    def add(self, step: StepTime) -> None:
        """Record a step."""
        self._steps.append(step)
        if step.decode:
            self.decoded += 1

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    def usual_rows(self, last: int) -> tuple[int, int]:
        """Return (most frequent number of rows among the last decode steps, number of such steps); (0, 0) without
        steps.
        """
        counted = Counter([step.rows for step in self._steps if step.decode][-last:])
        return max(counted.items(), key=lambda item: item[1], default=(0, 0))

    def summaries(self, last: int = 0, rows: int = 0) -> dict[str, Summary]:
        """Return summaries by kind of step, "decode" and "prefill", if such steps occurred.

        last: number of most recent steps of each kind; 0: all.
        rows: only decode steps with this many rows; 0: all.
        """
        kinds = {"decode": [s for s in self._steps if s.decode], "prefill": [s for s in self._steps if not s.decode]}
        chosen = {kind: steps[-last:] for kind, steps in kinds.items()}
        if rows:
            chosen["decode"] = [step for step in chosen["decode"] if step.rows == rows]
        return {kind: _summary(steps) for kind, steps in chosen.items() if steps}


def summaries_of(said: Any) -> dict[str, Summary]:
    """Parse the summaries that another rank sent. Raises ValueError, TypeError or AttributeError for other values."""
    kinds = dict(said.items())  # fails for anything but a JSON object
    return {kind: Summary.from_json(kinds[kind]) for kind in ("decode", "prefill") if kind in kinds}


def _summary(steps: list[StepTime]) -> Summary:
    return Summary(
        len(steps),
        _figure([1e3 * s.compute_s for s in steps]),
        _figure([1e3 * s.communication_s for s in steps]),
        _figure([1e3 * s.stall_s for s in steps]),
        _figure([s.sent_bytes for s in steps]),
        _figure([s.received_bytes for s in steps]),
    )


def _figure(values: list[float]) -> Figure:
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, int(part * len(ordered)))] for part in (0.99, 0.1)]
    return Figure(statistics.median(ordered), *at)


@dataclass
class PendingStep:
    """A decode step whose logits have not been collected."""

    outputs: int
    query: LogitsQuery
    time: StepTime  # times so far
    own: list[Floats] = field(default_factory=list)  # rank 0's logits if it is in the last stage
    logits: Floats | None = None  # logits if they have arrived
    # Tokens, positions and sequences of rows with logits, if their hidden states follow the logits.
    rows: tuple[Ints, Ints, Ints] | None = None

    def answer_bytes(self, n_vocab: int, n_embd: int) -> int:
        """Return the bytes of the logits on the link, plus an upper bound for hidden states that follow them."""
        return self.query.n_bytes(self.outputs, n_vocab) + (4 * self.outputs * n_embd if self.rows else 0)
