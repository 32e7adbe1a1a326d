"""An engine that outlives the devices it runs on: where one is lost, another engine takes over, and holds the same."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge.constraints.constraint import Mask
from edge.errors import EdgeError, EngineError, Interrupted
from edge.llama.llama import Model
from edge.llm.engine import Outputs
from edge.llm.interface import SequenceStates, TextEngine
from edge.paging.gpu_layers import GpuLayers
from edge.paging.memory import MemoryNeed
from edge.paging.weights import PagedWeights
from edge.parallel.catching_up import compute, read_states, write_states
from edge.parallel.history import Change, History, Rows
from edge.parallel.mirror import AFTER_S
from edge.parallel.recorded_states import RecordedStates
from edge.parallel.steps import chunk_rows

Floats = NDArray[np.float32]
T = TypeVar("T")

MOST_IN_A_ROW = 3  # losses while one thing is done: then something else is wrong
_ONE_COPY_S = 1e-6  # less than a copy takes
_LOOK_S = 0.1  # how soon who waits for a move hears that it is to stop


class SurvivingEngine:
    """As `TextEngine`. What it was asked is remembered as tokens; with these another engine can take over at any time.

    Errors of what was asked are raised as ever. Where an engine has failed for good, `recovered` gives the next one,
    which then computes all histories, and what was under way. Who asks sees a pause.
    """

    def __init__(
        self,
        engine: TextEngine,
        model: Model,
        recovered: Callable[[Exception], TextEngine],
        history: History | None = None,
    ) -> None:
        """model: the vocabulary, which outlives all engines. recovered: told why the engine failed, gives another one
        of the same model, context and batch; what it raises is raised. history: an empty one; None: of tokens alone."""
        self.current = engine
        self.model, self._recovered = model, recovered
        # The same of every engine.
        self.path, self.file, self.shape = engine.path, engine.file, engine.shape
        self.context, self.batch, self.outputs = engine.context, engine.batch, engine.outputs
        self.sequences = engine.sequences
        self.failed: Exception | None = None  # as long as another engine may take over
        self._history = history or History()  # before what follows
        self._log: deque[Rows | Change] = deque()  # what was done since the oldest uncollected step
        self._ready: deque[Floats] = deque()  # logits of steps that another engine computed again
        self._is_stopped = False
        self._is_behind = False  # the engine lacks what the history has
        self._in_prompt = False  # the last step gives no logits: other ranks may still compute it, and more follow
        self.states: SequenceStates = RecordedStates(lambda: self.current, self._do, self._alone, self._history)
        self._next: Callable[[], TextEngine | None] | None = None
        self._lock = threading.RLock()
        self._is_gone = False  # there is no engine, as a move failed
        self._asked_at = time.monotonic()
        self.recoveries = self.moves = 0
        self.exact = False  # a loss is made good in the very steps there were; prompts come in the first engine's
        self._stages = engine.stages
        self.losses_in_a_row = 0  # while one thing was done, the one that another engine is asked for included
        self.computed_again = 0  # tokens, where other engines took over

    # --- what it is ---

    @property
    def threads(self) -> int:
        """Threads used on this device."""
        return self.current.threads

    @property
    def gpu_layers(self) -> GpuLayers | None:
        """Layers of this device's part that are on its GPU."""
        return self.current.gpu_layers

    @property
    def memory(self) -> MemoryNeed:
        """Memory of this device."""
        return self.current.memory

    @property
    def stages(self) -> int:
        """Decodes that are under way at once."""
        return self.current.stages

    @property
    def logits_cross(self) -> bool:
        """Whether logits come from other devices."""
        return self.current.logits_cross

    @property
    def paging(self) -> PagedWeights | None:
        """This device's weights under a budget."""
        return self.current.paging

    # --- decoding ---

    def decode(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        start: int,
        *,
        sequence: int = 0,
        outputs: Outputs = "last",
        top: int = 0,
        masks: Sequence[Mask | None] = (),
    ) -> Floats:
        """As `Engine.decode`."""

        def work(engine: TextEngine) -> Floats:
            return engine.decode(tokens, start, sequence=sequence, outputs=outputs, top=top, masks=masks)

        with self._alone():
            self._follow()
            with self._history.step():
                logits = self._do(work)
            self._in_prompt = outputs == "none"
            n = len(tokens)
            rows = np.arange(start, start + n), np.full(n, sequence), np.zeros(n, np.int8)
            self._note(Rows(np.array(tokens), *rows, 0))
        return logits

    def submit(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        positions: NDArray[np.int_],
        sequences: NDArray[np.int_],
        outputs: NDArray[np.int8],
        *,
        top: int = 0,
        masks: Sequence[Mask | None] = (),
    ) -> None:
        """As `Engine.submit`."""
        rows = Rows(np.array(tokens, np.int32), positions.copy(), sequences.copy(), outputs.copy(), top, masks)

        def work(engine: TextEngine) -> None:
            if engine.stages == 1:  # it has one step at a time under way, and an engine before it may have had more
                self._take_in(engine)
            rows.on(engine)

        with self._alone():
            self._follow()
            with self._history.step():
                self._do(work)
            self._in_prompt = not rows.gives
            self._note(rows)

    def collect(self) -> Floats:
        """As `Engine.collect`."""
        with self._alone():
            with self._history.step():
                logits = self._do(lambda engine: self._ready.popleft() if self._ready else engine.collect())
            self._log.popleft().into(self._history)  # the oldest that gives logits, by which the log begins
            self._fold()
            # Whoever looks between two steps takes in those under way, into the same array.
            return logits.copy() if self._log else logits

    @property
    def uncollected(self) -> int:
        """Submitted steps whose logits wait to be collected."""
        return sum(event.gives for event in self._log)

    def chunk(self, n: int) -> int:
        """Tokens of a prompt of `n` that should go into one decode."""
        return chunk_rows(n, self.batch, self._stages) if self.exact else self.current.chunk(n)

    def stop(self) -> None:
        """Make later steps raise Interrupted."""
        self._is_stopped = True
        self.current.stop()

    def resume(self) -> None:
        """Decode again after `stop`."""
        self._is_stopped = False
        self.current.resume()

    def answered(self, step_s: Sequence[float]) -> None:
        """An answer is complete."""
        with self._alone():
            self.current.answered(step_s)
            self._follow(AFTER_S)

    # --- the KV cache ---

    def kv_remove(self, sequence: int, start: int, end: int = -1) -> bool:
        """As `Engine.kv_remove`."""
        return bool(self._change(Change("remove", (sequence, start, end))))

    def kv_copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """As `Engine.kv_copy`."""
        self._change(Change("copy", (source, target, start, end)))

    def kv_shift(self, sequence: int, start: int, end: int, delta: int) -> None:
        """As `Engine.kv_shift`."""
        self._change(Change("shift", (sequence, start, end, delta)))

    @property
    def can_shift(self) -> bool:
        """As `Engine.can_shift`."""
        return self.current.can_shift

    def kv_clear(self) -> None:
        """Forget everything."""
        self._change(Change("clear"))

    def _change(self, change: Change) -> Any:
        with self._alone():
            done = self._do(change.on)
            if done is not False:  # a removal that this cache cannot do
                self._note(change)
        return done

    # --- when an engine fails ---

    def _do(self, work: Callable[[TextEngine], T]) -> T:
        """Return the result of `work` on this engine, or on those that take over."""
        with self._alone():
            try:
                return self._done(work)
            except BaseException:
                if self._is_gone or self._is_behind or self.current.failed is not None:
                    self._drop()
                raise

    def _done(self, work: Callable[[TextEngine], T]) -> T:
        for losses in itertools.count(1):
            try:
                if self._is_gone:
                    raise EngineError("the move to another engine was given up")
                if self._next is not None and not self._is_stopped:
                    self._move()
                if self._is_behind:
                    self._catch_up()
                return work(self.current)
            except Exception as error:
                if (not self._is_gone and self.current.failed is None) or losses > MOST_IN_A_ROW:
                    raise
                if self._is_stopped:
                    raise Interrupted("stopped on request") from error
                self._history.sequences()  # or nobody could catch up
                self.losses_in_a_row = losses
                self.current = self._recovered(error)
                self._is_gone, self._is_behind = False, True
                self.recoveries += 1
        raise AssertionError("counting ends nowhere")

    def _drop(self) -> None:
        """Nothing comes of the steps under way: whoever asked for them is told so, and who asks next must not get
        their logits."""
        self._ready.clear()
        while self._log:
            self._log.popleft().into(self._history)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Whoever asks, and what moves in the background, one after the other. Interrupted after `stop`."""
        self._asked_at = time.monotonic()  # from now on it is not quiet
        while not self._lock.acquire(timeout=_LOOK_S):
            if self._is_stopped:
                raise Interrupted("stopped on request")
        try:
            yield
        finally:
            self._asked_at = time.monotonic()
            self._lock.release()

    def _catch_up(self) -> None:
        """Bring the engine to hold what the history has, and to where the log ends."""
        engine = self.current
        engine.kv_clear()
        self._ready.clear()
        self.computed_again += compute(engine, self._history.sequences(), self._check, self._history, self.exact)
        for event in self._log:
            event.on(engine)
            if event.gives:
                self._ready.append(engine.collect().copy())
        self._is_behind = False

    def _check(self) -> None:
        if self._is_stopped:
            raise Interrupted("stopped on request")

    # --- going on with another engine, while the one there is still computes ---

    @property
    def quiet_s(self) -> float:
        """Seconds since anything was asked; 0 while logits wait to be collected."""
        return 0.0 if self._log else time.monotonic() - self._asked_at

    @property
    def is_moving(self) -> bool:
        """Whether another engine takes over before the next step."""
        return self._next is not None

    def go_on_with(self, another: Callable[[], TextEngine | None]) -> None:
        """Before the next step, or by `settle`, go on with the engine that `another` gives. Called in the thread that
        asks; it ends the engine there is. None: that one is to stay."""
        self._next = another

    def settle(self) -> None:
        """Do now what `go_on_with` was told, so that nobody has to wait for it later."""
        self._do(lambda engine: None)

    def wait_for_move(self, timeout_s: float) -> None:
        """Return when no move is under way, or after so many seconds."""
        if self._lock.acquire(timeout=timeout_s):
            self._lock.release()

    def between_steps(self, work: Callable[[TextEngine], T]) -> T:
        """Return the result of `work` on the current engine, while nobody else uses it and no step is in flight."""

        def alone(engine: TextEngine) -> T:
            self._take_in(engine)
            return work(engine)

        return self._do(alone)

    def _move(self) -> None:
        """To the next engine, with keys and values where they can be read and have room, else by tokens."""
        another, self._next = self._next, None
        assert another is not None
        old, after = self.current, self._history.copied()
        self._take_in(old)
        for event in self._log:
            event.into(after)
        try:
            sequences = after.sequences()
        except EngineError:  # what it holds is not known: it stays, for as long as it can
            return
        held = read_states(old, sequences)
        self._is_gone = True  # until there is another
        found = another()
        self._is_gone = False
        if found is None:
            return
        self.current, self._is_behind = found, True  # until what follows is done
        self.moves += 1
        found.kv_clear()
        if held is None or not write_states(found, held):
            self.computed_again += compute(found, sequences, self._check, self._history, self.exact)
        self._is_behind = False

    def _take_in(self, engine: TextEngine) -> None:
        """Wait for the logits of all steps that are under way."""
        while engine.uncollected:
            self._ready.append(engine.collect().copy())

    def copy_while_quiet(self, is_quiet: Callable[[], bool]) -> None:
        """Let the history see to what is left. Who asks meanwhile waits for one copy at most: the lock is let go after
        each, and `is_quiet` is asked before the next."""
        is_more = True
        while is_more and self._lock.acquire(blocking=False):
            try:
                is_more = is_quiet() and self._follow(_ONE_COPY_S)
            finally:
                self._lock.release()

    def _follow(self, most_s: float | None = None) -> bool:
        """Let the history see to keys and values, for so long at most: whether there may be more. Logits that were
        collected hold no longer."""
        if self._is_behind or self._is_gone or any(isinstance(event, Change) for event in self._log):
            return False  # what sequences hold now is not what the history says
        if most_s is None and self._in_prompt:
            return False  # a read would wait for its steps, and stages would wait for each other
        with suppress(EdgeError):  # where the engine has failed, the next step says so
            engine = self.current
            return self._history.follow(engine, lambda: self._take_in(engine), engine.uncollected, most_s)
        return False

    def _note(self, event: Rows | Change) -> None:
        """Remember what was done."""
        self._log.append(event)
        self._fold()

    def _fold(self) -> None:
        """Put what was done before the oldest uncollected step into the history."""
        while self._log and not self._log[0].gives:
            self._log.popleft().into(self._history)
