"""Times of the steps of one rank, by kind of work: its own record, and the summary it sends to rank 0."""

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

KEPT = 2048  # steps; older ones are forgotten


class StepTime(NamedTuple):
    """One decode step on one rank."""

    rows: int  # of a decode step, each of another sequence; 0: it has several of one, as a part of a prompt
    compute_s: float = 0.0  # llama.cpp
    communication_s: float = 0.0  # sending, receiving and adding, with the waits for other ranks
    stall_s: float = 0.0  # of that, or before it: waiting for others
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def decode(self) -> bool:
        """True if it is a decode step."""
        return self.rows > 0


@dataclass(frozen=True)
class Figure:
    """Over the steps: the middle one, the one that 99 of 100 stay below, and the one that a tenth stays below."""

    median: float
    p99: float
    p10: float


@dataclass(frozen=True)
class Summary:
    """Steps of one kind on one rank."""

    steps: int
    compute_ms: Figure
    communication_ms: Figure
    stall_ms: Figure
    sent_bytes: Figure
    received_bytes: Figure

    def to_json(self) -> dict[str, Any]:
        """Plain values, by field."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Summary:
        """The summary that `to_json` wrote. ValueError for anything else: it comes from another device."""
        try:
            names = [field.name for field in fields(cls) if field.name != "steps"]
            figures = {
                name: Figure(*(float(values[name][figure_field.name]) for figure_field in fields(Figure)))
                for name in names
            }
            steps = int(values["steps"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"no summary of steps: {error}") from error
        if steps < 1 or not all(0 <= value < math.inf for figure in figures.values() for value in astuple(figure)):
            raise ValueError("a summary of steps with figures that cannot be")
        return cls(steps, **figures)


class StepTimes:
    """The last steps of a rank."""

    def __init__(self) -> None:
        self._steps: deque[StepTime] = deque(maxlen=KEPT)
        self.decoded = 0  # decode steps so far

    def add(self, step: StepTime) -> None:
        """Remember one."""
        self._steps.append(step)
        if step.decode:
            self.decoded += 1

    def clear(self) -> None:
        """Forget all."""
        self._steps.clear()

    def usual_rows(self, last: int) -> tuple[int, int]:
        """Return how many rows most of the last so many decode steps have, and how many steps that are; (0, 0): of
        none."""
        counted = Counter([step.rows for step in self._steps if step.decode][-last:])
        return max(counted.items(), key=lambda item: item[1], default=(0, 0))

    def summaries(self, last: int = 0, rows: int = 0) -> dict[str, Summary]:
        """By kind, those that occurred: "decode" and "prefill". last: of so many steps of each kind; 0: of all.
        rows: of decode steps, only those that have so many; 0: all."""
        kinds = {"decode": [s for s in self._steps if s.decode], "prefill": [s for s in self._steps if not s.decode]}
        chosen = {kind: steps[-last:] for kind, steps in kinds.items()}
        if rows:
            chosen["decode"] = [step for step in chosen["decode"] if step.rows == rows]
        return {kind: _summary(steps) for kind, steps in chosen.items() if steps}


def summaries_of(said: Any) -> dict[str, Summary]:
    """Parse what another rank says of its steps, as `summaries` has it. ValueError, TypeError or AttributeError for
    anything else."""
    kinds = dict(said.items())  # an object, that is
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
    time: StepTime  # so far
    own: list[Floats] = field(default_factory=list)  # of rank 0's rows of the head, where it is in the last stage
    logits: Floats | None = None  # where they came already
    # Tokens, positions and sequences of the rows that give logits, where their hidden states come behind these.
    rows: tuple[Ints, Ints, Ints] | None = None

    def answer_bytes(self, n_vocab: int, n_embd: int) -> int:
        """Bytes of its logits, and of hidden states behind them, on the link; of the latter at most."""
        return self.query.n_bytes(self.outputs, n_vocab) + (4 * self.outputs * n_embd if self.rows else 0)
