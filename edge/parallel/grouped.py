"""Rank 0 as an engine for groups of sequences that all ranks compute by turns.

Where every layer is shared, ranks wait for their partial sums twice a layer. Two groups of requests fill that time: the
ranks compute a layer of one while sums of the other travel. Each group has an engine of its own: a context over the
same weights, a lane of every link, and a thread on each rank, so that its steps, its KV cache and its answers are in
order, whatever the other group does. The threads of a rank compute one at a time (`edge.parallel.shard.Turns`).

Sequence s is number s // n of group s % n. A step has sequences of one group, and a group has one step under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge.adapters.adapter import Scales
from edge.constraints.constraint import Mask
from edge.errors import EngineError, Interrupted
from edge.llama.predicting import HiddenListener
from edge.llm.states import CacheUse
from edge.parallel.engine import DistributedEngine, Floats
from edge.parallel.step_times import Ints, Summary
from partition.plan.plan import Range
from partition.state.sequence import KVBlock

T = TypeVar("T")


class GroupedEngine(DistributedEngine):
    """Engines of several groups as one; `edge.llm.engine.Engine` documents the methods. All that is not here is the
    first group's: plan, sizes, links, step times."""

    def __init__(self, engines: Sequence[DistributedEngine], sequences: int) -> None:
        """engines: one for each group, over lanes of the same links. sequences: in all."""
        self._engines = tuple(engines)
        self.contexts, self.sequences = len(self._engines), sequences
        self._threads = [ThreadPoolExecutor(1, f"group-{i}") for i in range(self.contexts)]
        self._submitted: deque[Future[Floats]] = deque()
        self._stopped = False
        self.listener = None
        self.states = GroupedStates(self)  # type: ignore[assignment]  # as SpreadStates, for sequences of all groups

    def __getattr__(self, name: str) -> Any:
        if name == "_engines":  # before it is there
            raise AttributeError(name)
        return getattr(self.first, name)

    @property
    def first(self) -> DistributedEngine:
        """The engine of the first group."""
        return self._engines[0]

    def on_group(self, group: int, work: Callable[[DistributedEngine], T]) -> T:
        """Return the result of `work` on the engine of a group, behind what that group has under way."""
        return self._threads[group].submit(work, self._engines[group]).result()

    def on_sequence(self, sequence: int, work: Callable[[DistributedEngine, int], T]) -> T:
        """The same for the group of a sequence, which has another number there."""
        group, own = self.place(sequence)
        return self.on_group(group, lambda engine: work(engine, own))

    def place(self, sequence: int) -> tuple[int, int]:
        """Return the group of a sequence, and its number there."""
        own, group = divmod(sequence, self.contexts)
        return group, own

    # --- decoding ---

    def submit(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        positions: NDArray[np.int_],
        sequences: NDArray[np.int_],
        outputs: NDArray[np.int8],
        *,
        top: int = 0,
        masks: Sequence[Mask | None] = (),
        adapters: Scales | None = None,
    ) -> None:
        """Begin a step of sequences of one group, and return. `collect` waits for it, also where it gives no logits.
        Its errors come there; Interrupted after `stop`."""
        if self.failed is not None:
            raise self.failed
        if self._stopped:
            raise Interrupted("stopped on request")
        own, groups = np.divmod(sequences, self.contexts)
        if len(set(groups.tolist())) != 1:
            raise EngineError(f"a step has sequences of one group, not of {sorted(set(groups.tolist()))}")
        gives = bool(np.any(outputs))

        def step(engine: DistributedEngine) -> Floats:
            engine.submit(tokens, positions, own, outputs, top=top, masks=masks, adapters=adapters)
            return engine.collect() if gives else np.empty((0, engine.shape.n_vocab), np.float32)

        group = int(groups[0])
        self._submitted.append(self._threads[group].submit(step, self._engines[group]))

    def collect(self) -> Floats:
        """Logits of the oldest step that was submitted, or its error; of one without logits, none. They hold until the
        next step of its group."""
        step = self._submitted[0]
        try:
            return step.result()
        finally:
            if step.done():  # else this wait was interrupted
                self._submitted.popleft()

    @property
    def uncollected(self) -> int:
        return len(self._submitted)

    def listen(self, listener: HiddenListener) -> None:
        """As `Engine.listen`, of all groups."""
        self.listener = listener
        for group in range(self.contexts):

            def heard(tokens: Ints, positions: Ints, own: Ints, hidden: Floats, group: int = group) -> None:
                listener(tokens, positions, own * self.contexts + group, hidden)

            self.on_group(group, partial(DistributedEngine.listen, listener=heard))

    # --- the KV cache: of each group its own ---

    def kv_remove(self, sequence: int, start: int, end: int = -1) -> bool:
        return self.on_sequence(sequence, lambda engine, own: engine.kv_remove(own, start, end))

    def kv_copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """As `Engine.kv_copy`, for two sequences of one group."""
        (group, own), (other_group, other) = self.place(source), self.place(target)
        if group != other_group:
            raise EngineError(f"sequences {source} and {target} are of different groups, which share no cells")
        self.on_group(group, lambda engine: engine.kv_copy(own, other, start, end))

    def kv_shift(self, sequence: int, start: int, end: int, delta: int) -> None:
        self.on_sequence(sequence, lambda engine, own: engine.kv_shift(own, start, end, delta))

    def kv_clear(self) -> None:
        for group in range(self.contexts):
            self.on_group(group, lambda engine: engine.kv_clear())

    def kv_last(self, sequence: int) -> int:
        return self.on_sequence(sequence, lambda engine, own: engine.kv_last(own))

    # --- all ranks ---

    def times(self, *, clear: bool = False, last: int = 0, rows: int = 0) -> list[dict[str, Summary]]:
        """As `DistributedEngine.times`, of the first group's steps."""
        return self.on_group(0, lambda engine: engine.times(clear=clear, last=last, rows=rows))

    @property
    def failed(self) -> Exception | None:  # type: ignore[override]  # that of any group
        """Error of a group that has failed, after which no group may compute; None while all work."""
        return next((engine.failed for engine in self._engines if engine.failed is not None), None)

    @property
    def busy(self) -> bool:  # type: ignore[override]  # likewise
        """True if a step is under way, or what belongs to it."""
        return any(engine.busy for engine in self._engines)

    def end(self) -> None:
        """As `Leader.end`, of each group."""
        for engine, thread in zip(self._engines, self._threads, strict=True):
            thread.shutdown(wait=False, cancel_futures=True)
            engine.end()

    def wait(self) -> None:
        """Return when no group computes any more, after `end`."""
        for thread in self._threads:
            thread.shutdown()


class GroupedStates:
    """As `SpreadStates`, for sequences of all groups. What is kept is named by tokens, so that a prompt which one group
    computed is there for the others."""

    def __init__(self, engine: GroupedEngine) -> None:
        self.use = CacheUse()
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        if name == "_engine":
            raise AttributeError(name)
        return getattr(self._engine.first.states, name)

    snapshots = None  # a group computes behind the calls for others, and a snapshot is of what is computed

    @property
    def keeps(self) -> bool:
        """As `States.keeps`. Blocks of a model with recurrent layers would be of no use without snapshots."""
        return self._engine.first.states.keeps and not self._engine.model.is_recurrent

    def describe(self) -> str:
        if self._engine.model.is_recurrent:
            return "nothing on disk: groups of requests have no snapshots of recurrent layers"
        return self._engine.first.states.describe()

    def read(self, sequence: int, positions: Range) -> KVBlock:
        return self._engine.on_sequence(sequence, lambda engine, own: engine.states.read(own, positions))

    def begin_read(self, sequence: int, positions: Range) -> Callable[[], list[KVBlock]]:
        return self._engine.on_sequence(sequence, lambda engine, own: engine.states.begin_read(own, positions))

    def write(self, sequence: int, block: KVBlock) -> None:
        self._engine.on_sequence(sequence, lambda engine, own: engine.states.write(own, block))

    def keep(self, sequence: int, start: int, links: Sequence[bytes]) -> None:
        self._engine.on_sequence(sequence, lambda engine, own: engine.states.keep(own, start, links))

    def n_cached(self, links: Sequence[bytes]) -> int:
        return self._engine.on_group(0, lambda engine: engine.states.n_cached(links))

    def restore(self, sequence: int, start: int, links: Sequence[bytes]) -> int:
        return self._engine.on_sequence(sequence, lambda engine, own: engine.states.restore(own, start, links))
