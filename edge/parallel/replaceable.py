"""The engine of a model that continues on another engine after a loss, or after a planned move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from edge.llama.llama import Model
from edge.llama.predicting import HiddenListener
from edge.llm.interface import Outputs, TextEngine
from edge.parallel.replacements import Floats, Replacements
from edge.parallel.steps import chunk_rows
from edge.text.constraints.constraint import Mask
from edge.weights.adapter import Scales

Tokens = Sequence[int] | NDArray[np.int32]
T = TypeVar("T")


def _current(read: Callable[[TextEngine], T]) -> T:
    """Return a property of `ReplaceableEngine` that reads an attribute of the current engine."""
    return cast(T, property(lambda self: read(self.replacements.engine)))


class CurrentAttributes:
    """The attributes of a `TextEngine`, read from the current engine."""

    path = _current(lambda engine: engine.path)
    file = _current(lambda engine: engine.file)
    shape = _current(lambda engine: engine.shape)
    context = _current(lambda engine: engine.context)
    batch = _current(lambda engine: engine.batch)
    outputs = _current(lambda engine: engine.outputs)
    sequences = _current(lambda engine: engine.sequences)
    attention_window = _current(lambda engine: engine.attention_window)
    threads = _current(lambda engine: engine.threads)
    gpu_layers = _current(lambda engine: engine.gpu_layers)
    memory = _current(lambda engine: engine.memory)
    paging = _current(lambda engine: engine.paging)
    stages = _current(lambda engine: engine.stages)
    microbatches = _current(lambda engine: engine.microbatches)
    adapters = _current(lambda engine: engine.adapters)
    states = _current(lambda engine: engine.states)
    logits_cross = _current(lambda engine: engine.logits_cross)
    rollback = _current(lambda engine: engine.rollback)
    can_shift = _current(lambda engine: engine.can_shift)
    media_problem = _current(lambda engine: engine.media_problem)


class ReplaceableEngine(CurrentAttributes):
    """A `TextEngine` that computes on the current engine of `replacements`."""

    failed: Exception | None = None  # another engine may take over, so this one never fails

    def __init__(self, engine: TextEngine, model: Model, replacements: Replacements) -> None:
        """engine: the first engine. model: the vocabulary, which outlives all engines."""
        self.model, self.replacements = model, replacements
        self._stages = engine.stages

    # --- decoding ---

    @property
    def uncollected(self) -> int:
        return self.replacements.uncollected

    def decode(
        self,
        tokens: Tokens,
        start: int,
        *,
        sequence: int = 0,
        outputs: Outputs = "last",
        top: int = 0,
        masks: Sequence[Mask | None] = (),
        adapters: Scales | None = None,
    ) -> Floats:
        with self._step() as engine:
            return engine.decode(
                tokens, start, sequence=sequence, outputs=outputs, top=top, masks=masks, adapters=adapters
            )

    def submit(
        self,
        tokens: Tokens,
        positions: NDArray[np.int_],
        sequences: NDArray[np.int_],
        outputs: NDArray[np.int8],
        *,
        top: int = 0,
        masks: Sequence[Mask | None] = (),
        adapters: Scales | None = None,
    ) -> None:
        with self._step() as engine:
            if (
                engine.stages == 1
            ):  # this engine computes one step at a time, but an earlier engine may have more steps in flight
                self.replacements.take_in()
            engine.submit(tokens, positions, sequences, outputs, top=top, masks=masks, adapters=adapters)

    def collect(self) -> Floats:
        now = self.replacements
        with self._engine() as engine:
            logits = now.ready.popleft() if now.ready else engine.collect()
            now.losses_in_a_row = 0
            # `between_steps` collects the logits of steps in flight into the same array.
            return logits.copy() if now.uncollected else logits

    @contextmanager
    def _engine(self) -> Iterator[TextEngine]:
        """Yield the current engine for one call. Raise EngineError if there is no engine."""
        with self.replacements.alone():
            self.replacements.check()
            yield self.replacements.engine

    @contextmanager
    def _step(self) -> Iterator[TextEngine]:
        """Yield the current engine for a call that computes rows."""
        now = self.replacements
        with self._engine() as engine:
            now.is_direct = now.is_direct or now.owner is None
            yield engine

    def chunk(self, n: int) -> int:
        """Same as `Engine.chunk`. If steps must be the same as before a loss, use the stages of the first engine."""
        engine = self.replacements.engine
        return chunk_rows(n, engine.batch, self._stages) if self.replacements.exact else engine.chunk(n)

    def stop(self) -> None:
        self.replacements.is_stopped = True
        self.replacements.engine.stop()

    def resume(self) -> None:
        self.replacements.is_stopped = False
        self.replacements.engine.resume()

    @property
    def listener(self) -> HiddenListener | None:
        return self.replacements.engine.listener

    def listen(self, listener: HiddenListener) -> None:
        self.replacements.engine.listen(listener)

    # --- the KV cache ---

    def kv_remove(self, sequence: int, start: int, end: int = -1) -> bool:
        with self._engine() as engine:
            return engine.kv_remove(sequence, start, end)

    def kv_copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        with self._engine() as engine:
            engine.kv_copy(source, target, start, end)

    def kv_shift(self, sequence: int, start: int, end: int, delta: int) -> None:
        with self._engine() as engine:
            engine.kv_shift(sequence, start, end, delta)

    def kv_clear(self) -> None:
        """Same as `Engine.kv_clear`. Another engine may take over here for a caller without a scheduler."""
        self.replacements.clear()
