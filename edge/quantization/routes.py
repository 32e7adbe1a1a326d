"""Routes: ways to compute a model's predictions of a text.

The first half of a chunk is the prompt, and the predictions of the second half are scored. Each row of logits is
yielded with the number of its chunk and its position among the scored predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llm.interface import TextEngine
from edge.llm.slot import Slot
from edge.quantization.divergence import Chunks

Floats = NDArray[np.float32]
# Chunk, position among its scored predictions, logits [n_vocab] (valid until the next row).
Row = tuple[int, int, Floats]
Predict = Callable[[TextEngine, Chunks], Iterator[Row]]


def at_once(engine: TextEngine, chunks: Chunks) -> Iterator[Row]:
    """Compute the second half like a prompt, with the maximum number of rows with logits in each pass."""
    for i in range(len(chunks)):
        tokens, first = chunks.inputs(i).tolist(), chunks.size // 2
        Slot(engine).prefill(tokens[:first])
        yield from _scored_half(engine, i, tokens)


def _scored_half(engine: TextEngine, i: int, tokens: list[int]) -> Iterator[Row]:
    """Yield the predictions of the second half of chunk `i`."""
    first, end, step = len(tokens) // 2, len(tokens) - 1, min(engine.batch, engine.outputs)
    for at in range(first, end, step):
        logits = engine.decode(tokens[at : min(end, at + step)], at, outputs="all")
        for place, row in enumerate(logits, at - first):
            yield i, place, row


def one_by_one(engine: TextEngine, chunks: Chunks) -> Iterator[Row]:
    """Compute one row per pass."""
    for i in range(len(chunks)):
        tokens, first = chunks.inputs(i).tolist(), chunks.size // 2
        slot = Slot(engine)
        yield i, 0, slot.prefill(tokens[: first + 1])
        for place in range(1, chunks.scored):
            yield i, place, slot.decode([tokens[first + place]])


def drafted(rows: int) -> Predict:
    """Return a route with passes of `rows` rows, as in the verification of drafts.

    The second half of the rows is rejected and removed.
    """

    def predict(engine: TextEngine, chunks: Chunks) -> Iterator[Row]:
        for i in range(len(chunks)):
            tokens, first = chunks.inputs(i).tolist(), chunks.size // 2
            slot = Slot(engine)
            yield i, 0, slot.prefill(tokens[: first + 1])
            place = 1
            while place < chunks.scored:
                accepted = min(rows // 2, chunks.scored - place)
                start = first + place
                rejected = min(rows - accepted, engine.context - start - accepted)
                logits = slot.decode([*tokens[start : start + accepted], *[tokens[first]] * rejected], "all")
                logits_kept = logits[:accepted].copy()  # `forget` calls the engine, which may overwrite its rows
                slot.forget(rejected)
                for row in logits_kept:
                    yield i, place, row
                    place += 1

    return predict


def from_prefix_cache(engine: TextEngine, chunks: Chunks) -> Iterator[Row]:
    """Compute like `at_once`, after a prompt whose KV cache was read from disk.

    Raises EngineError if the prompt was not stored.
    """
    for i in range(len(chunks)):
        tokens, first = chunks.inputs(i).tolist(), chunks.size // 2
        before = Slot(engine)
        before.prefill(tokens[:first])
        before.keep()
        engine.kv_clear()
        slot = Slot(engine)  # a new slot, without tokens in the cache
        slot.prefill(tokens[:first])
        if not slot.restored:
            raise EngineError(
                "the prompt was not stored on disk; check that the disk has room and that the prompt is long enough"
            )
        yield from _scored_half(engine, i, tokens)


def streams(n: int) -> Predict:
    """Return a route that computes the prompts of `n` chunks one by one, then steps with one row of each chunk."""

    def predict(engine: TextEngine, chunks: Chunks) -> Iterator[Row]:
        first = chunks.size // 2
        for begin in range(0, len(chunks), n):
            group = range(begin, min(begin + n, len(chunks)))
            engine.kv_clear()
            tokens = [chunks.inputs(i) for i in group]
            for sequence, i in enumerate(group):
                for start in range(0, first + 1, engine.batch):
                    part = tokens[sequence][start : min(first + 1, start + engine.batch)]
                    last = start + len(part) == first + 1
                    logits = engine.decode(part, start, sequence=sequence, outputs="last" if last else "none")
                yield i, 0, logits
            sequences = np.arange(len(group))
            for place in range(1, chunks.scored):
                rows = np.array([chunk[first + place] for chunk in tokens], np.int32)
                at = np.full(len(group), first + place)
                engine.submit(rows, at, sequences, np.ones(len(group), np.int8))
                for i, row in zip(group, engine.collect(), strict=True):
                    yield i, place, row

    return predict


@dataclass(frozen=True)
class Route:
    """One way to compute predictions."""

    name: str  # name for people
    opened: Callable[[], AbstractContextManager[TextEngine]]
    predict: Predict = at_once
