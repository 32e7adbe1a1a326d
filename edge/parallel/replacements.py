"""Replacement of the engine of a running model.

After a loss, the scheduler preempts all requests and admits them again from their tokens. A planned move also transfers
the KV cache of the slots, if it can be read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError, Interrupted
from edge.llm.interface import TextEngine
from edge.llm.states import CacheOwner, CacheUse
from edge.parallel.moving import read_states, write_states

Floats = NDArray[np.float32]
T = TypeVar("T")

MOST_IN_A_ROW = 3  # consecutive losses without a token after which the error is raised
_LOOK_S = 0.1  # interval at which a waiting thread checks whether the engine was stopped


class Replacements(CacheUse):
    """The current engine, exclusive access to it, and its replacement.

    A caller that computes without a scheduler starts with `kv_clear`. It cannot fail over, so a loss of its engine is
    an error.
    """

    def __init__(self, engine: TextEngine, recovered: Callable[[Exception], TextEngine]) -> None:
        """recovered: takes the error of the engine and returns another engine with the same model, context and
        batch size; its errors are raised.
        """
        super().__init__()
        self._recovered = recovered
        self.ready: deque[Floats] = deque()  # logits that were collected before `collect` was called
        self.is_stopped = False
        self.is_direct = False  # True while a caller computes without a scheduler
        self._next: Callable[[], TextEngine | None] | None = None
        self._is_gone = False  # True if there is no engine, because a move failed
        self._asked_at = time.monotonic()
        self.recoveries = self.moves = 0
        self.losses_in_a_row = 0  # consecutive losses without a token between them, including the current one
        self._use_engine(engine)

    # --- one user after the other ---

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Same as `CacheUse.alone`. Raises Interrupted after `stop` if another thread uses the engine."""
        self._asked_at = time.monotonic()  # the engine counts as used from now on
        while not self._lock.acquire(timeout=_LOOK_S):
            if self.is_stopped:
                raise Interrupted("stopped on request")
        try:
            yield
        finally:
            self._asked_at = time.monotonic()
            self._lock.release()

    def step(self, owner: CacheOwner, work: Callable[[], T]) -> T:
        return self._with_failover(lambda: CacheUse.step(self, owner, work), self.losses_in_a_row)

    def between_steps(self, work: Callable[[TextEngine], T], engine: TextEngine | None = None) -> T:
        """Same as `CacheUse.between_steps`, on the current engine."""

        def alone() -> T:
            self.take_in()
            return work(self.engine)

        with self.alone():
            return self._with_failover(alone)

    def clear(self) -> None:
        """Clear the cache, for a caller that computes without a scheduler."""
        with self.alone():
            if self.owner is not None:
                self.owner.yield_engine()
            self.is_direct = False
            self._with_failover(lambda: self.engine.kv_clear())

    def check(self) -> None:
        """Raise EngineError if there is no engine."""
        if self._is_gone:
            raise EngineError("the move to another engine was cancelled")

    @property
    def quiet_s(self) -> float:
        """Seconds since the engine was last used; 0 while logits have not been collected."""
        return 0.0 if self.uncollected else time.monotonic() - self._asked_at

    @property
    def uncollected(self) -> int:
        """Number of submitted steps whose logits have not been collected."""
        return 0 if self._is_gone or self.engine.failed is not None else len(self.ready) + self.engine.uncollected

    def take_in(self) -> None:
        """Wait for the logits of all steps in flight."""
        while self.engine.uncollected:
            self.ready.append(self.engine.collect().copy())

    def _clear(self, owner: CacheOwner) -> None:
        self.is_direct = False
        self.engine.kv_clear()

    # --- after a loss ---

    def _with_failover(self, work: Callable[[], T], losses: int = 0) -> T:
        """Return the result of `work` on this engine or its replacements.

        losses: consecutive losses before this call.
        """
        self.losses_in_a_row = losses
        while True:
            try:
                self.check()
                if self._next is not None and not self.is_stopped and not self.is_direct:
                    self._move()
                return work()
            except Exception as error:
                is_lost = self._is_gone or self.engine.failed is not None
                if not is_lost or self.is_direct:
                    raise
                if self.losses_in_a_row == MOST_IN_A_ROW:
                    self.losses_in_a_row = 0  # the next call may succeed
                    raise
                if self.is_stopped:
                    raise Interrupted("stopped on request") from error
                self.losses_in_a_row += 1
                self._begin_again()
                self._use_engine(self._recovered(error), self.engine)
                self._is_gone = False
                self.recoveries += 1

    def _begin_again(self) -> None:
        self.ready.clear()
        if self.owner is not None:
            self.owner.preempt_all()

    def _use_engine(self, engine: TextEngine, before: TextEngine | None = None) -> None:
        engine.states.use = self
        self.engine = engine
        if self.owner is not None:
            self.owner.follow_engine()
        if before is not None and before.listener is not None:
            engine.listen(before.listener)
        if self.is_stopped:
            engine.stop()

    # --- a planned move, while this engine still computes ---

    @property
    def is_moving(self) -> bool:
        """True if another engine takes over before the next step."""
        return self._next is not None

    def switch_to(self, another: Callable[[], TextEngine | None]) -> None:
        """Use the engine that `another` returns, from the next step or `switch_now` on.

        another: called in the thread of that step; it ends the current engine, or returns None to keep it.
        """
        self._next = another

    def switch_now(self) -> None:
        """Switch now to the engine of `switch_to`, so that no request has to wait for the switch later."""
        with self.alone():
            self._with_failover(lambda: None)

    def wait_for_move(self, timeout_s: float) -> None:
        """Return when no move is in progress, or after `timeout_s` seconds."""
        if self._lock.acquire(timeout=timeout_s):
            self._lock.release()

    def _move(self) -> None:
        """Move to the next engine. The KV cache is transferred if it can be read and fits; otherwise it is
        recomputed from tokens.
        """
        another, self._next = self._next, None
        assert another is not None
        self.take_in()
        states = read_states(self.engine, self.slots)
        self._is_gone = True  # until there is another engine
        engine = another()
        self._is_gone = False
        if engine is None:
            return
        self._use_engine(engine, self.engine)
        self.moves += 1
        if states is None or not write_states(engine, states):
            self._begin_again()
