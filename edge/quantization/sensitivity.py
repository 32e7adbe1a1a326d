"""Measure what each tensor's type costs in quality: put it in the place of the weight, and compare predictions.

The model runs from its file. One tensor, or where time is short a group of like ones, is quantized into memory, and the
weight is pointed there, type and all: what is compared is what a file with that tensor would predict. A middle type is
measured for all tensors first, then others while there is time and the choice still changes with them (`rounds`). What
is not measured follows from the weights' errors.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np

from devices.probe import available_memory
from edge.llama.buffers import Weight
from edge.llama.ggml import Node
from edge.llama.hooks import Hook
from edge.llama.interrupt import interrupt_stops
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.quantization.divergence import (
    CHUNK_TOKENS,
    Chunks,
    Floats,
    Tokens,
    divergence,
    log_probabilities,
    options_for,
)
from edge.quantization.rounds import Damages, measure_rounds
from edge.quantization.tensor_rows import TensorRows
from partition.model.model import ModelShape, block_of
from quant.gguf.file import GgufFile
from quant.mixes import NEED_IMPORTANCE
from quant.sensitivity import Sensitivity
from quant.types import TYPES, TensorType

Progress = Callable[[int, int], None]  # steps done, steps that are planned

# The types that are measured, in this order, where a tensor can have them: from the middle to the ends, and those first
# that weights are quantized to in a moment.
PROBES = ("q4_0", "q3_k", "q6_k", "q2_k", "q5_k", "iq4_xs", "iq3_xxs", "iq2_xs", "q8_0")
MOST_CHUNKS = 8
_MOST_REFERENCE = 512 << 20  # bytes of predictions to compare with
_PROBES_AT_LEAST = 2  # that chunks and groups are chosen for
_MEMORY_SHARE = 4  # a group takes at most this part of what memory is free
_QUANTIZE_S = 30e-9  # that a thread needs for a value in the first types


def measure_errors(
    rows: Mapping[str, TensorRows], kinds: Mapping[str, Iterable[TensorType]], threads: int, progress: Progress
) -> dict[str, dict[str, float]]:
    """The errors of tensors in types, as `TensorRows.errors` has them."""
    pool = ThreadPoolExecutor(threads)
    try:
        jobs = {name: pool.submit(one.errors, list(kinds[name])) for name, one in rows.items()}
        found: dict[str, dict[str, float]] = {}
        for name, job in jobs.items():
            found[name] = job.result()
            progress(len(found), len(jobs))
        return found
    finally:
        pool.shutdown(cancel_futures=True)  # also at Ctrl-C


def measure_damages(
    file: GgufFile,
    text: str,
    rows: Mapping[str, TensorRows],
    errors: Mapping[str, Mapping[str, float]],
    *,
    within_s: float,
    threads: int,
    progress: Callable[[int, int, float], None],
    order: Sequence[str] = PROBES,
    known: Damages | None = None,
    after_round: Callable[[Damages], bool] = lambda damages: False,
) -> Sensitivity:
    """The sensitivities of tensors of a file, in about `within_s`. Of those that no graph uses as they are, none.

    errors: of the types of `probes`, and any others. progress: as `measure_rounds` tells it. order: of the types to
    measure. known: damages that need no measuring. after_round: whether what is known now is enough. TextError where
    the text is too short; what Engine raises; Interrupted after Ctrl-C.
    """
    began = time.monotonic()
    weights: dict[str, list[Weight]] = {}
    shape = ModelShape.from_gguf(file)
    options = options_for(EngineOptions(threads=threads, repack=False, gpu_layers=0), CHUNK_TOKENS, shape.n_vocab)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(file.path, options, [_finds(rows, weights)]))
        stack.enter_context(interrupt_stops(engine))
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        probe = _Probe(engine, Chunks.cut(engine.model, text, most=MOST_CHUNKS))
        names = [name for name in rows if name in weights and any(errors[name].get(probe, 0) for probe in PROBES)]
        values = sum(rows[name].rows * rows[name].columns for name in names)
        left = (within_s - (time.monotonic() - began)) / _PROBES_AT_LEAST - values * _QUANTIZE_S / threads
        probe.use(int(left / max(1, len(names)) / probe.pass_s))
        groups = _groups({name: rows[name] for name in names}, int(left / probe.pass_s))
        damages = {name: dict((known or {}).get(name, {})) for name in names}

        def measure(name: str, group: list[str]) -> None:
            measurable = [one for one in group if errors[one].get(name, 0) > 0]
            if measurable:
                loss = probe.loss({one: (rows[one], weights[one]) for one in measurable}, TYPES[name], pool)
                shares = {one: errors[one][name] * rows[one].rows for one in measurable}
                for one, share in shares.items():
                    damages[one][name] = loss * share / sum(shares.values())

        left_s = measure_rounds(
            order,
            groups,
            damages,
            measure,
            after_round,
            within_s=within_s,
            clock=lambda: time.monotonic() - began,
            progress=progress,
        )
    return Sensitivity(damages, {name: errors[name] for name in names}, within_s, left_s)


def probes(rows: TensorRows) -> list[TensorType]:
    """The types that are measured of a tensor: narrower ones than its own, of whole blocks."""
    kinds = [TYPES[name] for name in PROBES if rows.has_importance or name not in NEED_IMPORTANCE]
    return [k for k in kinds if k.bits_per_weight < rows.type.bits_per_weight and rows.columns % k.block == 0]


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
        room = most_chunks(self._engine.model.n_vocab)
        for i in range(len(self._inputs), max(1, min(n, len(self._chunks), room))):
            self._inputs.append(self._chunks.inputs(i))
            self._reference.append(log_probabilities(self._engine, self._inputs[i]))

    @property
    def pass_s(self) -> float:
        """Seconds of one comparison."""
        return self._chunk_s * len(self._inputs)

    def loss(
        self, changed: Mapping[str, tuple[TensorRows, Sequence[Weight]]], kind: TensorType, pool: ThreadPoolExecutor
    ) -> float:
        """Mean KL divergence, nats, when these tensors have another type."""
        with ExitStack() as stack:
            for rows, weights in changed.values():
                space = rows.quantized(kind, pool)
                stack.callback(space.close)
                for weight in weights:
                    stack.callback(weight.replace(kind.id, space.address))
            sums = [
                divergence(before, log_probabilities(self._engine, tokens)).sum()
                for tokens, before in zip(self._inputs, self._reference, strict=True)
            ]
        return float(np.sum(sums)) / sum(len(one) for one in self._reference)


def most_chunks(n_vocab: int) -> int:
    """Chunks whose predictions may be kept to compare with, one at least."""
    return max(1, min(MOST_CHUNKS, _MOST_REFERENCE // (2 * CHUNK_TOKENS * n_vocab)))


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


def _groups(rows: Mapping[str, TensorRows], most: int) -> list[list[str]]:
    """Each tensor alone, or where those are more than `most`, like ones of neighbouring layers together, as far as they
    have room in memory."""
    room = available_memory() // _MEMORY_SHARE
    size = 1
    while True:
        groups: dict[tuple[str, int, int], list[str]] = {}
        for name, one in rows.items():
            layer = block_of(name)
            kind = name if layer is None else re.sub(r"\d+", "", name, count=1)
            part = 0 if layer is None else layer // min(size, max(1, room // (one.rows * one.columns)))
            groups.setdefault((kind, part, one.type.id), []).append(name)
        if len(groups) <= most or size >= len(rows):
            return list(groups.values())
        size += 1
