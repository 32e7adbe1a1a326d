"""Leader: rank 0 sends steps to the other ranks, computes its part, and collects the logits.

Changes of the KV cache are steps, too. All ranks apply them in order with decode steps.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llm.engine import check_shift
from edge.parallel import steps
from edge.parallel.follower import feed
from edge.parallel.logits import LogitsQuery
from edge.parallel.shard import Shard
from edge.parallel.step_times import Ints, PendingStep
from edge.parallel.steps import Adapt, CacheStep, Clear, Copy, Decode, End, Remove, SetBack, Shift, Step, output_rows
from edge.text.constraints.constraint import Mask
from edge.weights.adapter_file import CheckedAdapter
from edge.weights.loaded_adapters import EngineAdapters
from partition.model.file import ModelFile
from partition.plan.plan import Range
from partition.slices.rules import has_windows
from transport.collective import Group, Wire
from transport.errors import ProtocolError, TransportError
from transport.frame import Kind

Floats = NDArray[np.float32]
T = TypeVar("T")

ANSWER_TIMEOUT_S = 600.0  # bound on logits of a step from all stages; a lost device is noticed sooner by other means
_ANSWERS_BYTES = 128 << 10  # largest size of logits in flight, which the buffers of a link hold until rank 0 reads
_PAUSE_S = 0.1  # after a longer pause between steps, rank 0 kept the other ranks waiting


class Leader:
    """Steps of all ranks. After an error of a link or a rank, every further step raises it again, because the KV
    caches of the ranks may differ.
    """

    def __init__(
        self,
        file: ModelFile,
        shard: Shard,
        group: Group,
        heads: Mapping[int, Range],
        n_vocab: int,
        algorithm: str,
        wire: Wire | None,
        explain: Callable[[Exception], Exception],
        adapters: Sequence[CheckedAdapter] = (),
    ) -> None:
        """heads: range of tokens whose logits each rank of the last stage computes.
        explain: returns an error with its cause, for example that a device has died.
        """
        self.file = file
        self.shard, self.group = shard, group
        self.heads = heads
        # All ranks receive a change of adapter scales in order with the steps.
        self.adapters = EngineAdapters(adapters, lambda scales: self.on_cache(Adapt(scales)))
        self.pending: deque[PendingStep] = deque()  # steps whose logits have not been collected
        self.failed: Exception | None = None
        self.busy: set[int] = set()  # ids of threads in a step or in another operation of all ranks
        self._logits = np.empty((0, n_vocab), np.float32)
        self._explain = explain
        self._done = -math.inf  # end of the last step, or of the wait for its logits
        self._peers = [group.links[rank] for rank in shard.place.peers]
        self._feeds = [group.links[rank] for rank in shard.place.feeds]
        shard.join(group, algorithm, wire)

    def submit_rows(
        self, n: int, outputs: int, top: int, masks: Sequence[Mask | None], tokens: Ints | None = None
    ) -> None:
        """Submit a decode step of the first `n` rows of the shard, and compute rank 0's part. Call it through
        `guarded`.

        outputs: number of rows with logits.
        tokens: tokens of the rows if a listener gets their hidden states, else None.
        """
        shard = self.shard
        self._make_way()
        query = LogitsQuery.from_masks(top, masks, [*self.heads.values()])
        heard = tokens is not None and (outputs > 0 or shard.place.last)
        step = Decode(n, outputs, query.top, time.perf_counter() - self._done > _PAUSE_S, heard, query.masks)
        shard.begin()
        for link in self._peers:
            link.send(steps.pack(step, shard.rows), Kind.CONTROL)
            steps.send_states(link, shard.rows.embeddings[:n])
            if shard.rows.deep is not None:
                steps.send_states(link, shard.rows.deep)
        shard.compute(n)
        feed(shard, step, self._feeds)
        pending = PendingStep(outputs, query, shard.time_of(n))
        if shard.place.last:
            pending.own = [row.copy() for row in shard.logits(n)]
            if tokens is not None and shard.engine.hidden.listener is not None:
                own = tokens, shard.rows.positions[:n], shard.rows.sequences[:n]
                shard.engine.hidden.listener(*own, shard.engine.hidden.rows(n))
        elif heard and tokens is not None:
            giving = list(output_rows(shard.rows, n))
            pending.rows = tokens[giving], shard.rows.positions[giving], shard.rows.sequences[giving]
        pending.time = shard.end(pending.time)
        if outputs:
            self.pending.append(pending)
        else:
            shard.times.add(pending.time)
        self._done = time.perf_counter()

    def collect(self) -> Floats:
        """Same as `Engine.collect`. The logits are valid until the next call."""
        return self.guarded(self._collect)

    def _collect(self) -> Floats:
        step = self.pending[0]
        logits = self._gathered(step)
        self.pending.popleft()
        self.shard.times.add(step.time)
        self._done = time.perf_counter()
        return logits

    def _make_way(self, most_bytes: int = _ANSWERS_BYTES) -> None:
        """Receive logits in flight if they are large, to prevent a deadlock.

        The last stage could not finish sending them while rank 0 sends a prompt. It would not read the prompt, and both
        would wait.
        """
        n_vocab, n_embd = self._logits.shape[1], self.shard.engine.shape.n_embd
        if sum(step.answer_bytes(n_vocab, n_embd) for step in self.pending) > most_bytes:
            for step in self.pending:
                if step.logits is None:
                    step.logits = self._gathered(step).copy()

    def _gathered(self, step: PendingStep) -> Floats:
        """Return the logits of a step [rows, n_vocab] from the ranks of the last stage, and update the step's time."""
        if step.logits is not None:
            return step.logits
        if len(self._logits) < step.outputs:
            self._logits = np.empty((step.outputs, self._logits.shape[1]), np.float32)
        logits = self._logits[: step.outputs]
        self.shard.begin()
        if step.query.top:
            logits.fill(-np.inf)
        for rank, vocab in self.heads.items():
            for i in range(step.outputs):
                part = logits[i, vocab.start : vocab.stop]
                if rank == 0:
                    part[:] = step.own[i]
                else:
                    step.query.receive(self.group.links[rank], part, i, ANSWER_TIMEOUT_S)
        if step.rows is not None and self.shard.engine.hidden.listener is not None:
            hidden = np.empty((step.outputs, self.shard.engine.shape.n_embd), np.float32)
            steps.receive_states(self.group.links[next(iter(self.heads))], hidden, self.shard.wire)
            self.shard.engine.hidden.listener(*step.rows, hidden)
        step.time = self.shard.end(step.time)
        return logits

    def reports(self, parse: Callable[[Any], T]) -> list[T]:
        """Return the report of each other rank, parsed from its JSON. Raises ProtocolError if it cannot be parsed."""
        reports = []
        for rank, link in sorted(self.group.links.items()):
            try:
                reports.append(parse(json.loads(bytes(link.receive(ANSWER_TIMEOUT_S).payload))))
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise ProtocolError(f"rank {rank} sent an impossible report of its steps: {error}") from error
        return reports

    def kv_remove(self, sequence: int, start: int, end: int = -1) -> bool:
        """Remove positions [start, end) of a sequence. Return False if this cache can only be cleared as a whole."""
        return self.on_cache(Remove(sequence, start, end))

    def kv_copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """Let sequence `target` share positions [start, end) of `source`. This takes no additional memory."""
        self.on_cache(Copy(source, target, start, end))

    def kv_shift(self, sequence: int, start: int, end: int, delta: int) -> None:
        """Add `delta` to positions [start, end) of a sequence. Raises EngineError if this model's cache cannot
        shift.
        """
        check_shift(self.file)
        self.on_cache(Shift(sequence, start, end, delta))

    @property
    def can_shift(self) -> bool:
        """Same as `Engine.can_shift`."""
        return not has_windows(self.file) and self.shard.engine.can_shift

    def kv_clear(self) -> None:
        """Clear the KV cache."""
        self.on_cache(Clear())

    def kv_last(self, sequence: int) -> int:
        """Return the last position of a sequence in the cache; -1 if it is empty."""
        return self.shard.engine.kv_last(sequence)

    def on_cache(self, step: CacheStep) -> bool:
        """Apply an operation to the KV cache of all ranks, after the submitted steps. Return False, as
        `Shard.keep`, if any rank does.
        """
        # Rank 0 goes first. If its cache cannot do the operation, no other cache can, and nothing has changed yet.
        is_done = self.guarded(lambda: self.shard.keep(step), EngineError)
        if isinstance(step, SetBack) and not is_done:
            return False
        asks = isinstance(step, SetBack) or (isinstance(step, Remove) and not self.shard.knows_removals)
        sent = step._replace(removed=is_done, answers=asks) if isinstance(step, Remove) else step

        def others() -> bool:
            if asks:
                self._make_way(0)  # logits in flight arrive before the answers of the ranks
            self.send(sent)
            return not asks or all(self.reports(_truth))

        return self.guarded(others) and is_done

    def ordered(self, step: Step, work: Callable[[], T]) -> T:
        """Let the other ranks carry out a step other than a decode. Return the result of `work`, which is rank 0's
        part.
        """
        if self.pending:
            raise EngineError("steps are under way; collect their logits first")

        def both() -> T:
            self.send(step)
            return work()

        return self.guarded(both)

    def send(self, step: Step) -> None:
        """Send a step to the ranks that receive steps from rank 0."""
        data = steps.pack(step, self.shard.rows)
        for link in (*self._peers, *self._feeds):
            link.send(data, Kind.CONTROL)

    def guarded(self, work: Callable[[], T], *harmless: type[Exception]) -> T:
        """Return the result of `work`. An error is explained and raised again by each later call, unless its type
        is in `harmless`.
        """
        if self.failed is not None:
            raise self.failed
        self.busy.add(threading.get_ident())
        try:
            return work()
        except harmless:
            raise
        except Exception as error:
            self.failed = error
            self.pending.clear()  # their logits will never arrive
            self.failed = self._explain(error)
            raise self.failed from error
        except BaseException:  # second Ctrl-C: this rank left a step that the others complete
            self.pending.clear()
            self.failed = EngineError("a step was interrupted, so the devices no longer hold the same; start again")
            raise
        finally:
            self.busy.discard(threading.get_ident())

    def end(self) -> None:
        """Tell all ranks that no more steps follow. Ranks that cannot be reached are ignored."""
        if self.failed is None:
            self.failed = EngineError("the engine is closed")
            with suppress(TransportError):  # the device is gone; closing the sessions handles it
                self.send(End())


def _truth(said: Any) -> bool:
    if not isinstance(said, bool):
        raise ValueError(f"{said!r:.80} where true or false was expected")
    return said
