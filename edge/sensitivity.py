"""Measure what each tensor's type costs in quality: put it in the place of the weight, and compare predictions.

The model runs from its file. One tensor, or where time is short a group of like ones, is quantized into memory, and the
weight is pointed there, type and all: what is compared is what a file with that tensor would predict. A middle type is
measured for all tensors first, then others while there is time. What is not measured follows from the weights' errors.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np

from edge.divergence import CHUNK_TOKENS, Chunks, Floats, Tokens, divergence, log_probabilities, options_for
from edge.engine import Engine
from edge.engine_options import EngineOptions
from edge.ggml import Node
from edge.ggml_weights import Weight
from edge.hooks import Hook
from edge.interrupt import interrupt_stops
from edge.tensor_rows import TensorRows
from partition.model import ModelShape, block_of
from quant.gguf_file import GgufFile
from quant.sensitivity import Sensitivity
from quant.types import TensorType

Progress = Callable[[int, int], None]  # passes done, passes that are planned

_LEVELS = (4.5, 2.6, 3.4, 6.5, 5.5, 8.5, 2.1, 4.3)  # bits a weight: the types near these are measured, in this order
MOST_CHUNKS = 8
_MOST_REFERENCE = 512 << 20  # bytes of predictions to compare with
_LEAST_LEVELS = 2  # that chunks and groups are chosen for


def measure(
    file: GgufFile,
    text: str,
    candidates: Mapping[str, Sequence[TensorType]],
    importance: Mapping[str, Floats],
    *,
    within_s: float,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """The sensitivities of the tensors in `candidates`, to the types that each may have, in about `within_s`.

    TextError where the text is too short; what Engine raises; Interrupted after Ctrl-C.
    """
    began = time.monotonic()
    found: dict[str, list[Weight]] = {}
    shape = ModelShape.from_gguf(file)
    options = options_for(EngineOptions(threads=threads, repack=False, gpu_layers=0), CHUNK_TOKENS, shape.n_vocab)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(file.path, options, [_finds(candidates, found)]))
        stack.enter_context(interrupt_stops(engine))
        pool = stack.enter_context(ThreadPoolExecutor(engine.threads))
        probe = _Probe(engine, Chunks.cut(engine.model, text, most=MOST_CHUNKS))
        rows = {name: TensorRows(file, name, importance.get(name)) for name in candidates}
        errors = dict(zip(rows, pool.map(lambda name: rows[name].errors(candidates[name]), rows), strict=True))
        left = within_s - (time.monotonic() - began)
        probe.use(int(left / (_LEAST_LEVELS * len(candidates)) / probe.pass_s))
        groups = _groups(candidates, int(left / probe.pass_s / _LEAST_LEVELS))
        damages: dict[str, dict[str, float]] = {name: {} for name in candidates}
        done = 0
        for n_level, level in enumerate(_LEVELS):
            if n_level and time.monotonic() - began + len(groups) * probe.pass_s > within_s:
                break
            for group in groups:
                kinds = {name: _nearest(candidates[name], level, errors[name]) for name in group}
                done += 1
                if any(kind.name in damages[name] or errors[name][kind.name] == 0 for name, kind in kinds.items()):
                    continue
                loss = probe.loss({name: (rows[name], found[name], kinds[name]) for name in group}, pool)
                total = sum(errors[name][kinds[name].name] * rows[name].rows for name in group)
                for name, kind in kinds.items():
                    damages[name][kind.name] = loss * errors[name][kind.name] * rows[name].rows / total
                if progress:
                    left = within_s - (time.monotonic() - began)
                    progress(done, _planned(done, len(groups), left / probe.pass_s))
        return Sensitivity(damages, errors, probe.tokens)


class _Probe:
    """The model with all its weights as they are, and what it predicts."""

    def __init__(self, engine: Engine, chunks: Chunks) -> None:
        self._engine, self._chunks = engine, chunks
        self._inputs: list[Tokens] = []
        self._reference: list[Floats] = []
        began = time.monotonic()
        self.use(1)
        self._chunk_s = time.monotonic() - began

    def use(self, n: int) -> None:
        """Compare so many chunks: as many as there are, and have room, and one at least."""
        room = _MOST_REFERENCE // (4 * self._chunks.scored * self._engine.model.n_vocab)
        for i in range(len(self._inputs), max(1, min(n, len(self._chunks), room))):
            self._inputs.append(self._chunks.inputs(i))
            self._reference.append(log_probabilities(self._engine, self._inputs[i]))

    @property
    def pass_s(self) -> float:
        """Seconds of one comparison."""
        return self._chunk_s * len(self._inputs)

    @property
    def tokens(self) -> int:
        """Predictions that are compared."""
        return sum(len(one) for one in self._reference)

    def loss(
        self, changed: Mapping[str, tuple[TensorRows, Sequence[Weight], TensorType]], pool: ThreadPoolExecutor
    ) -> float:
        """Mean KL divergence, nats, when these tensors have these types."""
        with ExitStack() as stack:
            for rows, weights, kind in changed.values():
                space = rows.quantized(kind, pool)
                stack.callback(space.close)
                for weight in weights:
                    stack.callback(weight.replace(kind.id, space.address))
            sums = [
                divergence(before, log_probabilities(self._engine, tokens)).sum()
                for tokens, before in zip(self._inputs, self._reference, strict=True)
            ]
        return float(np.sum(sums)) / self.tokens


def _finds(names: Mapping[str, object], found: dict[str, list[Weight]]) -> Hook:
    """A hook that notes the structs of these weights, as the nodes of graphs name them."""
    seen: set[int] = set()

    def wants(node: Node) -> bool:
        for address in node.sources:
            if address and address not in seen:
                seen.add(address)
                name = Node(address).name
                if name in names:
                    found.setdefault(name, []).append(Weight(address))
        return False

    return Hook(wants, lambda node: None)


def _nearest(kinds: Sequence[TensorType], bits: float, errors: Mapping[str, float]) -> TensorType:
    """The type nearest to so many bits a weight; of several, that with the least error."""
    return min(kinds, key=lambda kind: (abs(kind.bits_per_weight - bits), errors[kind.name]))


def _groups(names: Mapping[str, object], most: int) -> list[list[str]]:
    """Each tensor alone, or where those are more than `most`, like ones of neighbouring layers together."""
    size = 1
    while True:
        groups: dict[tuple[str, int], list[str]] = {}
        for name in names:
            layer = block_of(name)
            key = (name, -1) if layer is None else (re.sub(r"\d+", "", name, count=1), layer // size)
            groups.setdefault(key, []).append(name)
        if len(groups) <= most or size > len(names):
            return list(groups.values())
        size += 1


def _planned(done: int, groups: int, more: float) -> int:
    """Passes in all, where there is time for so many more: a level that has begun is completed."""
    begun = -(-done // groups)
    whole = int((more - (begun * groups - done)) // groups)
    return groups * min(len(_LEVELS), begun + max(0, whole))
