"""What generation, conversations and benchmarks need of an engine, whether it is one device's or spread over many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge.llama.llama import Model
from edge.llm.engine import Outputs
from edge.paging.memory import MemoryNeed
from edge.paging.weights import PagedWeights
from partition.model.model import ModelShape
from quant.gguf.file import GgufFile


class TextEngine(Protocol):
    """`edge.llm.engine.Engine` and `edge.parallel.engine.DistributedEngine`; the former documents the methods."""

    path: Path
    file: GgufFile
    shape: ModelShape
    context: int  # tokens
    batch: int  # rows one decode may have
    threads: int  # of this device
    sequences: int
    memory: MemoryNeed  # of this device
    stages: int  # decodes that are under way at once where there are as many microbatches

    @property
    def model(self) -> Model:
        """The vocabulary."""

    @property
    def paging(self) -> PagedWeights | None:
        """This device's weights under a budget; None without one."""

    @property
    def uncollected(self) -> int:
        """Submitted steps whose logits wait to be collected."""

    def decode(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        start: int,
        *,
        sequence: int = 0,
        outputs: Outputs = "last",
        top: int = 0,
    ) -> NDArray[np.float32]:
        """Compute tokens of one sequence, and keep their keys and values."""

    def submit(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        positions: NDArray[np.int_],
        sequences: NDArray[np.int_],
        outputs: NDArray[np.int8],
        *,
        top: int = 0,
    ) -> None:
        """Begin a decode of any rows; `collect` returns the logits in the order of submission."""

    def collect(self) -> NDArray[np.float32]:
        """Logits [rows, n_vocab] of the oldest step that gives any."""

    def chunk(self, n: int) -> int:
        """Tokens of a prompt of `n` that should go into one decode."""

    def stop(self) -> None:
        """Make a decode that runs in another thread, and later ones, raise Interrupted."""

    def resume(self) -> None:
        """Decode again after `stop`."""

    def kv_remove(self, sequence: int, start: int, end: int = -1) -> bool:
        """Forget positions [start, end) of a sequence; False where everything must be."""

    def kv_copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """Let `target` share positions of `source`."""

    def answered(self, step_s: Sequence[float]) -> None:
        """An answer is complete, whose tokens took so many seconds."""

    def kv_clear(self) -> None:
        """Forget everything."""
