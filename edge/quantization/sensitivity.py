"""Sensitivity: measures the loss of quality from each tensor's type, by replacing the weight and comparing predictions.

The model runs from its file. One tensor is quantized into memory, or a group of similar tensors if time is short. The
engine's weight is redirected to it, so the model predicts like a file with that tensor. A middle type is measured first
for all tensors. Other types follow while there is time and they still change the choice (`rounds`). Damages that were
not measured are derived from the weights' errors.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise, zip_longest

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
from edge.quantization.pace import Pace
from edge.quantization.rounds import Damages, measure_rounds
from edge.quantization.tensor_rows import TensorRows
from partition.model.file import ModelFile
from partition.model.model import block_of
from quant.fit import Choice
from quant.mixes import NEED_IMPORTANCE
from quant.sensitivity import Sensitivity
from quant.types import TYPES, TensorType

Progress = Callable[[int, int], None]  # arguments: steps done, steps planned

# Types to measure, in this order, if a tensor can have them. The order goes from the middle to the ends, and types that
# are fast to quantize to come first.
PROBES = ("q4_0", "q3_k", "q6_k", "q2_k", "q5_k", "iq4_xs", "iq3_xxs", "iq2_xs", "q8_0")
MOST_CHUNKS = 8
_MOST_REFERENCE = 512 << 20  # bytes of stored predictions of the reference
_PROBES_AT_LEAST = 2  # number of rounds that chunks and groups are sized for
_MEMORY_SHARE = 4  # a group takes at most 1/4 of free memory
# Tokens of a chunk; shorter chunks are used if time is short.
_SIZES = (CHUNK_TOKENS, CHUNK_TOKENS // 2, CHUNK_TOKENS // 4)


def measure_errors(
    rows: Mapping[str, TensorRows],
    kinds: Mapping[str, Iterable[TensorType]],
    threads: int,
    progress: Progress,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[str, dict[str, float]]:
    """Return the errors of tensors in types, as in `TensorRows.errors`.

    is_over: returns whether the time is up

    When the time is up, a tensor gets the errors of the similar tensor in the previous layer, because relative errors
    differ little between layers. One tensor of each kind is always read.
    """
    similar: dict[object, list[str]] = {}
    for name in rows:
        similar.setdefault((_kind(name), frozenset(kinds[name])), []).append(name)
    order = [name for turn in zip_longest(*similar.values()) for name in turn if name is not None]
    errors: dict[str, dict[str, float]] = {}
    pool = ThreadPoolExecutor(threads)
    try:
        for start in range(0, len(order), threads):
            if start >= len(similar) and is_over():
                break
            names = order[start : start + threads]
            jobs = [pool.submit(rows[name].errors, list(kinds[name]), is_over) for name in names]
            errors |= {name: job.result() for name, job in zip(names, jobs, strict=True)}
            progress(len(errors), len(order))
    finally:
        pool.shutdown(cancel_futures=True)  # this also runs at Ctrl-C
    for names in similar.values():
        for before, name in pairwise(names):
            errors.setdefault(name, errors[before])
    return {name: errors[name] for name in rows}


def measure_damages(
    file: ModelFile,
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
    whole: Callable[[Damages], Sequence[Mapping[str, Choice]]] = lambda damages: (),
    whole_left_s: Callable[[], float] = lambda: 0.0,
    left_s: Callable[[], float] = lambda: math.inf,
    pace: Pace | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Sensitivity:
    """Measure the sensitivities of a file's tensors. Tensors that no graph uses directly get none.

    errors: errors of the types in `probes`, and possibly of others
    within_s: approximate time of the measurement in seconds
    progress: as in `measure_rounds`
    order: types to measure, in this order
    known: damages that need no measurement
    after_round: returns whether the damages measured so far are enough
    whole: returns choices for all tensors; each choice is measured as a whole while `whole_left_s` leaves time
    left_s: returns the seconds left to measure and to check the file
    pace: time to quantize, which this function corrects
    clock: returns seconds

    Nothing more is measured if `left_s` is needed to check the file. Tensors that were not measured by then
    get the mean damage of the others, in proportion to their errors.

    Raises TextError if the text is too short. Raises the errors of Engine, and Interrupted after Ctrl-C.
    """
    began = clock()
    weights: dict[str, list[Weight]] = {}
    options = options_for(EngineOptions(threads=threads, repack=False, gpu_layers=0), CHUNK_TOKENS, file.shape.n_vocab)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(file, options, [_finds(rows, weights)]))
        stack.enter_context(interrupt_stops(engine))
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        loaded_s = clock() - began
        pace = pace or Pace(threads)
        probe = _Probe(engine, text, pace, clock)
        names = [name for name in rows if name in weights and any(errors[name].get(probe, 0) for probe in PROBES)]
        values = sum(rows[name].rows * rows[name].columns for name in names)
        left = (within_s - (clock() - began)) / _PROBES_AT_LEAST - pace.seconds({TYPES[PROBES[0]]: values})
        probe.use_within(left / max(1, len(names)))
        groups = _groups({name: rows[name] for name in names}, int(left / probe.pass_s))
        damages = {name: dict((known or {}).get(name, {})) for name in names}

        def measure(name: str, group: list[str]) -> None:
            measurable = [change for change in group if errors[change].get(name, 0) > 0]
            if measurable:
                loss = probe.loss({change: (rows[change], weights[change], TYPES[name]) for change in measurable}, pool)
                shares = {change: errors[change][name] * rows[change].rows for change in measurable}
                for change, share in shares.items():
                    damages[change][name] = loss * share / sum(shares.values())

        def spare_s() -> float:
            """Return the seconds that checking the file will leave."""
            return left_s() - 2 * (loaded_s + probe.chunk_s)

        stopped_s = measure_rounds(
            order,
            groups,
            damages,
            measure,
            after_round,
            within_s=within_s,
            clock=lambda: clock() - began,
            progress=progress,
            is_over=lambda: spare_s() <= 0,
        )
        _complete(damages, errors, rows)
        wholes = []
        for choices in whole(damages) if values <= available_memory() // _MEMORY_SHARE else ():
            changed = {n: (rows[n], weights[n], c.type) for n, c in choices.items() if n in damages}
            changed = {n: change for n, change in changed.items() if change[2].id != rows[n].type.id}
            quantize_s = pace.seconds(value_counts(file, {name: kind for name, (_, _, kind) in changed.items()}))
            left = min(whole_left_s(), spare_s()) - quantize_s
            if changed and left > 0 and left > 2 * probe.use_within(left / 3):  # one pass is for the reference
                wholes.append((sum(choice.damage for choice in choices.values()), probe.loss(changed, pool)))
    return Sensitivity(damages, {name: errors[name] for name in names}, within_s, stopped_s, tuple(wholes))


def _complete(
    damages: dict[str, dict[str, float]],
    errors: Mapping[str, Mapping[str, float]],
    rows: Mapping[str, TensorRows],
) -> None:
    """Add a damage for each tensor that has none: the mean of the measured tensors, in proportion to the errors."""
    kinds = Counter(kind for row in damages.values() for kind in row)
    for kind, _ in kinds.most_common(1):
        measured = [name for name in damages if kind in damages[name]]
        of_one = sum(damages[name][kind] for name in measured) / sum(errors[n][kind] * rows[n].rows for n in measured)
        for name, row in damages.items():
            if not row and errors[name].get(kind, 0) > 0:
                row[kind] = of_one * errors[name][kind] * rows[name].rows


def value_counts(file: ModelFile, types: Mapping[str, TensorType]) -> Counter[TensorType]:
    """Return the number of values in each type if tensors have these types."""
    counts = Counter[TensorType]()
    for name, kind in types.items():
        counts[kind] += file.tensors[name].n_values
    return counts


def probes(rows: TensorRows) -> list[TensorType]:
    """Return the types to measure for a tensor: narrower types whose blocks divide its rows."""
    kinds = [TYPES[name] for name in PROBES if rows.has_importance or name not in NEED_IMPORTANCE]
    return [k for k in kinds if k.bits_per_weight < rows.type.bits_per_weight and rows.columns % k.block == 0]


class _Probe:
    """The model with unchanged weights, and its predictions as reference."""

    def __init__(self, engine: Engine, text: str, pace: Pace, clock: Callable[[], float]) -> None:
        self._engine, self._text, self._pace, self._clock = engine, text, pace, clock
        self._inputs: list[Tokens] = []
        self._reference: list[Floats] = []
        self._cut(CHUNK_TOKENS)  # raises TextError if the text is too short
        self._cut(_SIZES[-1])
        began = clock()
        self.use(1)
        self._token_s = (clock() - began) / _SIZES[-1]

    def _cut(self, size: int) -> None:
        self._chunks = Chunks.cut(self._engine.model, self._text, size, MOST_CHUNKS)
        self._inputs, self._reference = [], []

    def use(self, n: int) -> None:
        """Compare `n` chunks, limited by the text and by memory, but at least one."""
        room = most_chunks(self._engine.model.n_vocab)
        for i in range(len(self._inputs), max(1, min(n, len(self._chunks), room))):
            self._inputs.append(self._chunks.inputs(i))
            self._reference.append(log_probabilities(self._engine, self._inputs[i]))

    def use_within(self, pass_s: float) -> float:
        """Choose the amount of text that takes about `pass_s` seconds: several chunks, or one shorter chunk.

        Return the expected seconds.
        """
        size = next((n for n in _SIZES if n * self._token_s <= pass_s), _SIZES[-1])
        if size != self._chunks.size:
            self._cut(size)
        self.use(int(pass_s / size / self._token_s) if self._token_s else MOST_CHUNKS)
        return self.pass_s

    @property
    def chunk_s(self) -> float:
        """Seconds to compute the longest chunk."""
        return self._token_s * CHUNK_TOKENS

    @property
    def pass_s(self) -> float:
        """Seconds of one comparison."""
        return self._token_s * sum(map(len, self._inputs))

    def loss(
        self, changed: Mapping[str, tuple[TensorRows, Sequence[Weight], TensorType]], pool: ThreadPoolExecutor
    ) -> float:
        """Return the mean KL divergence in nats if these tensors have other types."""
        with ExitStack() as stack:
            for rows, weights, kind in changed.values():
                began = self._clock()
                space = rows.quantized(kind, pool)
                stack.callback(space.close)
                self._pace.add(kind, rows.rows * rows.columns, self._clock() - began)
                for weight in weights:
                    stack.callback(weight.replace(kind.id, space.address))
            sums = [
                divergence(before, log_probabilities(self._engine, tokens)).sum()
                for tokens, before in zip(self._inputs, self._reference, strict=True)
            ]
        return float(np.sum(sums)) / sum(map(len, self._reference))


def most_chunks(n_vocab: int) -> int:
    """Return the number of chunks, at least one, whose reference predictions may be stored."""
    return max(1, min(MOST_CHUNKS, _MOST_REFERENCE // (2 * CHUNK_TOKENS * n_vocab)))


def _finds(names: Mapping[str, object], weights: dict[str, list[Weight]]) -> Hook:
    """Return a hook that collects the structs of these weights when graph nodes use them."""
    seen: set[int] = set()

    def wants(node: Node) -> bool:
        for address in node.sources:
            if address and address not in seen:
                seen.add(address)
                name = Node(address).name
                if name in names:
                    weights.setdefault(name, []).append(Weight(address))
        return False

    return Hook(wants, lambda node: None)


def _groups(rows: Mapping[str, TensorRows], most: int) -> list[list[str]]:
    """Return groups of tensors, at most `most` if possible.

    If there are more tensors than that, a group contains similar tensors of neighbouring layers that fit into memory.
    """
    room = available_memory() // _MEMORY_SHARE
    size = 1
    while True:
        groups: dict[tuple[str, int, int], list[str]] = {}
        for name, row in rows.items():
            layer, kind = block_of(name), _kind(name)
            part = 0 if layer is None else layer // min(size, max(1, room // (row.rows * row.columns)))
            groups.setdefault((kind, part, row.type.id), []).append(name)
        if len(groups) <= most or size >= len(rows):
            return list(groups.values())
        size += 1


def _kind(name: str) -> str:
    """Return the name of a tensor without its layer number."""
    return name if block_of(name) is None else re.sub(r"\d+", "", name, count=1)
