"""An engine that outlives the devices it runs on: where one is lost, another engine takes over, and holds the same."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge.errors import Interrupted
from edge.llama.llama import Model
from edge.llm.engine import Outputs
from edge.llm.interface import SequenceStates, TextEngine
from edge.paging.memory import MemoryNeed
from edge.paging.weights import PagedWeights
from edge.parallel.history import UNKNOWN, History
from partition.model.model import ModelShape
from partition.plan.plan import Range
from partition.state.sequence import KVBlock
from quant.gguf.file import GgufFile

Floats = NDArray[np.float32]
T = TypeVar("T")

MOST_IN_A_ROW = 3  # losses while one thing is done: then something else is wrong


@dataclass(frozen=True)
class _Rows:
    """A decode of any rows, as `submit` takes it."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int_]
    sequences: NDArray[np.int_]
    outputs: NDArray[np.int8]
    top: int

    @property
    def gives(self) -> bool:
        """Whether logits come of it."""
        return bool(self.outputs.any())

    def into(self, history: History) -> None:
        """Do it to a history."""
        for token, position, sequence in zip(self.tokens, self.positions, self.sequences, strict=True):
            history.add(int(sequence), int(position), (int(token),))

    def on(self, engine: TextEngine) -> None:
        """Begin it on an engine."""
        engine.submit(self.tokens, self.positions, self.sequences, self.outputs, top=self.top)


@dataclass(frozen=True)
class _Change:
    """An operation on the KV cache."""

    name: str  # of the method of History; that of TextEngine has "kv_" before it
    arguments: tuple[int, ...] = ()
    gives: bool = False  # logits

    def into(self, history: History) -> None:
        """Do it to a history."""
        getattr(history, self.name)(*self.arguments)

    def on(self, engine: TextEngine) -> Any:
        """Do it to an engine: what that says."""
        return getattr(engine, f"kv_{self.name}")(*self.arguments)


class SurvivingEngine:
    """As `TextEngine`. What it was asked is remembered as tokens; with these another engine can take over at any time.

    Errors of what was asked are raised as ever. Where an engine has failed for good, `recovered` gives the next one,
    which then computes all histories, and what was under way. Who asks sees a pause.
    """

    def __init__(self, engine: TextEngine, model: Model, recovered: Callable[[Exception], TextEngine]) -> None:
        """model: the vocabulary, which outlives all engines. recovered: told why the engine failed, gives another one
        of the same model, context and batch; what it raises is raised."""
        self.current = engine
        self._model, self._recovered = model, recovered
        self._history = History()  # before what follows
        self._log: deque[_Rows | _Change] = deque()  # what was done since the oldest uncollected step
        self._ready: deque[Floats] = deque()  # logits of steps that another engine computed again
        self._is_stopped = False
        self._is_behind = False  # the engine lacks what the history has
        self._states = _RecordedStates(self)
        self.recoveries = 0

    # --- what it is ---

    @property
    def path(self) -> Path:
        """The model's file."""
        return self.current.path

    @property
    def file(self) -> GgufFile:
        """The model's file, read."""
        return self.current.file

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return self.current.shape

    @property
    def context(self) -> int:
        """Tokens."""
        return self.current.context

    @property
    def batch(self) -> int:
        """Rows one decode may have."""
        return self.current.batch

    @property
    def outputs(self) -> int:
        """Rows of one decode that may give logits."""
        return self.current.outputs

    @property
    def threads(self) -> int:
        """Of this device."""
        return self.current.threads

    @property
    def sequences(self) -> int:
        """Independent ones."""
        return self.current.sequences

    @property
    def memory(self) -> MemoryNeed:
        """Of this device."""
        return self.current.memory

    @property
    def stages(self) -> int:
        """Decodes that are under way at once."""
        return self.current.stages

    @property
    def model(self) -> Model:
        """The vocabulary."""
        return self._model

    @property
    def paging(self) -> PagedWeights | None:
        """This device's weights under a budget."""
        return self.current.paging

    @property
    def failed(self) -> Exception | None:
        """Why nothing can be computed any more; None while it can, or another engine may."""
        return None

    @property
    def states(self) -> SequenceStates:
        """The keys and values of sequences."""
        return self._states

    # --- decoding ---

    def decode(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        start: int,
        *,
        sequence: int = 0,
        outputs: Outputs = "last",
        top: int = 0,
    ) -> Floats:
        """As `Engine.decode`."""

        def work(engine: TextEngine) -> Floats:
            return engine.decode(tokens, start, sequence=sequence, outputs=outputs, top=top)

        logits = self._do(work)
        n = len(tokens)
        self._note(_Rows(np.array(tokens), np.arange(start, start + n), np.full(n, sequence), np.zeros(n, np.int8), 0))
        return logits

    def submit(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        positions: NDArray[np.int_],
        sequences: NDArray[np.int_],
        outputs: NDArray[np.int8],
        *,
        top: int = 0,
    ) -> None:
        """As `Engine.submit`."""
        rows = _Rows(np.array(tokens, np.int32), positions.copy(), sequences.copy(), outputs.copy(), top)
        self._do(rows.on)
        self._note(rows)

    def collect(self) -> Floats:
        """As `Engine.collect`."""
        if self._ready:
            logits = self._ready.popleft()
        else:
            logits = self._do(lambda engine: self._ready.popleft() if self._ready else engine.collect())
        self._log.popleft().into(self._history)  # the oldest that gives logits, by which the log begins
        self._fold()
        return logits

    @property
    def uncollected(self) -> int:
        """Submitted steps whose logits wait to be collected."""
        return len(self._ready) + self.current.uncollected

    def chunk(self, n: int) -> int:
        """Tokens of a prompt of `n` that should go into one decode."""
        return self.current.chunk(n)

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
        self.current.answered(step_s)

    # --- the KV cache ---

    def kv_remove(self, sequence: int, start: int, end: int = -1) -> bool:
        """As `Engine.kv_remove`."""
        return bool(self._change(_Change("remove", (sequence, start, end))))

    def kv_copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """As `Engine.kv_copy`."""
        self._change(_Change("copy", (source, target, start, end)))

    def kv_shift(self, sequence: int, start: int, end: int, delta: int) -> None:
        """As `Engine.kv_shift`."""
        self._change(_Change("shift", (sequence, start, end, delta)))

    @property
    def can_shift(self) -> bool:
        """As `Engine.can_shift`."""
        return self.current.can_shift

    def kv_clear(self) -> None:
        """Forget everything."""
        self._change(_Change("clear"))

    def _change(self, change: _Change) -> Any:
        done = self._do(change.on)
        if done is not False:  # a removal that this cache cannot do
            self._note(change)
        return done

    # --- when an engine fails ---

    def _do(self, work: Callable[[TextEngine], T]) -> T:
        """What `work` gives, of this engine or of those that take over."""
        for losses in itertools.count(1):
            try:
                if self._is_behind:
                    self._catch_up()
                return work(self.current)
            except Exception as error:
                if self.current.failed is None or losses > MOST_IN_A_ROW:
                    raise
                if self._is_stopped:
                    raise Interrupted("stopped on request") from error
                self._history.sequences()  # or nobody could catch up
                self.current = self._recovered(error)
                self._is_behind = True
                self.recoveries += 1
        raise AssertionError("counting ends nowhere")

    def _catch_up(self) -> None:
        """Bring the engine to hold what the history has, and to where the log ends."""
        engine = self.current
        engine.kv_clear()
        self._ready.clear()
        done: dict[int, list[int]] = {}
        for sequence, tokens in self._history.sequences().items():
            start, like = max(((_shared(held, tokens), other) for other, held in done.items()), default=(0, 0))
            if start:
                engine.kv_copy(like, sequence, 0, start)
            while start < len(tokens):
                if self._is_stopped:
                    raise Interrupted("stopped on request")
                chunk = tokens[start : start + engine.chunk(len(tokens) - start)]
                engine.decode(chunk, start, sequence=sequence, outputs="none")
                start += len(chunk)
            done[sequence] = tokens
        for event in self._log:
            event.on(engine)
            if event.gives:
                self._ready.append(engine.collect().copy())
        self._is_behind = False

    def _note(self, event: _Rows | _Change) -> None:
        """Remember what was done."""
        self._log.append(event)
        self._fold()

    def _fold(self) -> None:
        """Put what was done before the oldest uncollected step into the history."""
        while self._log and not self._log[0].gives:
            self._log.popleft().into(self._history)


class _RecordedStates:
    """The states of whatever engine there is, with a record of what they brought into sequences."""

    def __init__(self, engine: SurvivingEngine) -> None:
        self._engine = engine
        self._tokens: dict[bytes, list[int]] = {}  # of blocks, by link, of the last prompt

    @property
    def _of(self) -> SequenceStates:
        return self._engine.current.states

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self._of.block

    @property
    def factors(self) -> str:
        """Which factors turn positions."""
        return self._of.factors

    @property
    def keeps(self) -> bool:
        """Whether blocks are kept."""
        return self._of.keeps

    def describe(self) -> str:
        """How much is kept where."""
        return self._of.describe()

    def read(self, sequence: int, positions: Range) -> KVBlock:
        """As `States.read`."""
        return self._engine._do(lambda engine: engine.states.read(sequence, positions))

    def write(self, sequence: int, block: KVBlock) -> None:
        """As `States.write`. Another engine cannot take over then, as nobody knows what was written."""
        self._engine._do(lambda engine: engine.states.write(sequence, block))
        self._engine._history.add(sequence, block.positions.start, [UNKNOWN] * len(block.positions))

    def links(self, tokens: Sequence[int]) -> list[bytes]:
        """As `States.links`."""
        links = self._of.links(tokens)
        blocks = (list(tokens[i : i + self.block]) for i in range(0, len(tokens), self.block))
        self._tokens = dict(zip(links, blocks, strict=False))
        return links

    def keep(self, sequence: int, start: int, links: Sequence[bytes]) -> None:
        """As `States.keep`."""
        self._engine._do(lambda engine: engine.states.keep(sequence, start, links))

    def kept(self, links: Sequence[bytes]) -> int:
        """As `States.kept`."""
        return self._engine._do(lambda engine: engine.states.kept(links))

    def restore(self, sequence: int, start: int, links: Sequence[bytes]) -> int:
        """As `States.restore`."""
        done = self._engine._do(lambda engine: engine.states.restore(sequence, start, links))
        tokens = [token for link in links[:done] for token in self._tokens.get(link, [UNKNOWN] * self.block)]
        self._engine._history.add(sequence, start, tokens)
        return done


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
