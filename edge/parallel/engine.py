"""Rank 0: an engine to whoever uses it, and to the other ranks the one that makes the steps.

It has what must not leave the device: the tokens, the token table, the sampler. Others see hidden states and return
logits.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge.constraints.constraint import Mask
from edge.errors import EngineError, Interrupted
from edge.llama import llama
from edge.llm.engine import Outputs, check_room, check_shift, has_windows
from edge.net.relink import LinkState, Order, Relink, Report
from edge.parallel import steps
from edge.parallel.follower import feed
from edge.parallel.link_watch import LinkWatch, expected_s, known
from edge.parallel.logits import LogitsQuery
from edge.parallel.shard import Shard
from edge.parallel.states import SpreadStates
from edge.parallel.step_times import PendingStep, StepTimes, Summary, summaries_of
from edge.parallel.steps import Op, Step
from edge.parallel.token_table import TokenTable
from partition.model.model import ModelShape
from partition.plan.plan import Plan
from quant.gguf.file import GgufFile
from transport.collective import Group, Wire
from transport.errors import ProtocolError, TransportError
from transport.frame import Kind

Floats = NDArray[np.float32]
T = TypeVar("T")

ANSWER_TIMEOUT_S = 600.0  # for a step's logits, from all stages; that a device is gone is noticed sooner, and otherwise
_ANSWERS_BYTES = 128 << 10  # that may be under way: a link's buffers hold them, whoever reads or not
_PAUSE_S = 0.1  # between steps: longer, and it was the person who kept the ranks waiting


class DistributedEngine:
    """A model spread over ranks, with the methods of `Engine`. Not closed by itself: the deployment owns it.

    After an error of a link or a rank every further call raises it again: the KV caches of the ranks may differ.
    """

    def __init__(
        self,
        file: GgufFile,
        model: llama.Model,
        plan: Plan,
        shard: Shard,
        group: Group,
        algorithm: str = "auto",
        wire: Wire | None = None,
        outputs: int | None = None,
        explain: Callable[[Exception], Exception] = lambda error: error,
        relink: Relink | None = None,
        links: Sequence[LinkState] = (),
    ) -> None:
        """model: the vocabulary of `file`. group: links to all ranks, which follow. outputs: as in EngineOptions, of
        the last stage. explain: what is known beyond an error's own words, such as that a device has died. relink: the
        links that may change between answers; links: those of all ranks, as they are."""
        self.path: Path = file.path
        self.file, self.plan, self.model = file, plan, model
        self.shape = ModelShape.from_gguf(file)
        self.context, self.batch = shard.engine.context, shard.engine.batch
        self.memory, self.paging = shard.engine.memory, shard.engine.paging
        self.threads, self.gpu_layers, self.sequences = shard.engine.threads, shard.engine.gpu_layers, shard.sequences
        self.outputs = min(outputs or self.sequences, self.batch)
        self.stages = len(plan.stages)
        self._shard, self._group, self._explain = shard, group, explain
        self._table = TokenTable(file)
        self._heads = {rank: plan.shard(rank).vocab for rank in shard.place.heads}
        self._algorithm, self._wire = algorithm, wire
        self._relink = relink if relink is not None and relink.able else None
        self.link_states = known([links])  # of all ranks, each once
        self.link_watch = LinkWatch(self._expected_s(), [len(stage.shards) for stage in plan.stages])
        self._pending: deque[PendingStep] = deque()
        self._logits = np.empty((0, self.shape.n_vocab), np.float32)
        self._stopped = False
        self.busy = False  # a step, or what belongs to it, is under way
        self._done = -math.inf  # when the last step, or the wait for one, was over
        self._failed: Exception | None = None
        self.states = SpreadStates(file, plan, shard, group, self._ordered, self._answers)
        self._join()

    # --- decoding, as Engine has it ---

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
        """As `Engine.decode`. Logits that `top` and `masks` do not ask for may be -inf."""
        n = len(tokens)
        check_room(n, start, self.batch, self.context)
        if self._pending:
            raise EngineError("logits of submitted steps are still to be collected")
        wanted = np.zeros(n, np.int8)
        wanted[:] = outputs == "all"
        wanted[-1] = outputs != "none"
        self.submit(tokens, np.arange(start, start + n), np.full(n, sequence), wanted, top=top, masks=masks)
        if outputs == "none":
            return np.empty(0, np.float32)
        rows = self.collect()
        return rows if outputs == "all" else rows[0]

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
        """Begin a decode step: it is computed here, and goes on to the other stages. All arrays are [n]. `collect`
        returns its logits, if any, in the order of submission. Interrupted after `stop`."""
        if self._stopped:
            raise Interrupted("stopped on request")
        if self._pending and self.stages == 1:  # its logits would come among the sums of this step
            raise EngineError("the last step's logits are still to be collected")
        n, wanted = len(tokens), int(np.count_nonzero(outputs))
        if not 0 < n <= self.batch:
            raise EngineError(f"a decode takes 1 to {self.batch} tokens, {n} were given")
        if wanted > self.outputs:
            raise EngineError(f"{wanted} rows are to give logits, the engine was made for {self.outputs}; set outputs")
        if n > max(1, wanted) and not self._pending:  # a prompt
            self._between_answers()
        if masks and len(masks) != wanted:
            raise EngineError(f"{len(masks)} masks were given for {wanted} rows that give logits")
        rows = self._shard.rows
        rows.positions[:n], rows.sequences[:n], rows.outputs[:n] = positions, sequences, outputs
        self._table.look_up(tokens, rows.embeddings[:n])
        self._guarded(lambda: self._submit(n, wanted, top, masks))

    def collect(self) -> Floats:
        """Logits [rows, n_vocab] of the oldest step that gives any and was not collected. They hold until the next
        call."""
        return self._guarded(self._collect)

    @property
    def failed(self) -> Exception | None:
        """Why the ranks can compute nothing any more; None while they can."""
        return self._failed

    @property
    def uncollected(self) -> int:
        """Steps whose logits wait to be collected."""
        return len(self._pending)

    def chunk(self, n: int) -> int:
        """Tokens of a prompt of `n` that should go into one step: several chunks keep all stages busy."""
        return steps.chunk_rows(n, self.batch, self.stages)

    def stop(self) -> None:
        """Make later steps raise Interrupted. One that is under way is completed, or the ranks would differ."""
        self._stopped = True

    def resume(self) -> None:
        """Decode again after `stop`."""
        self._stopped = False

    # --- the KV cache, as Engine has it: in order with the steps, on all ranks ---

    def kv_remove(self, sequence: int, start: int, end: int = -1) -> bool:
        """Forget positions [start, end) of a sequence. False where this cache keeps no history and must be cleared."""
        return self._keep(Step(Op.REMOVE, numbers=(sequence, start, end, 0)))

    def kv_copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """Let sequence `target` share positions [start, end) of `source`, at no cost in memory."""
        self._keep(Step(Op.COPY, numbers=(source, target, start, end)))

    def kv_shift(self, sequence: int, start: int, end: int, delta: int) -> None:
        """Add `delta` to positions [start, end) of a sequence. EngineError where this model's cache cannot."""
        check_shift(self.file)
        self._keep(Step(Op.SHIFT, numbers=(sequence, start, end, delta)))

    @property
    def can_shift(self) -> bool:
        """As `Engine.can_shift`."""
        return not has_windows(self.file) and self._shard.engine.can_shift

    def answered(self, step_s: Sequence[float]) -> None:
        """An answer is complete. All ranks wait for each other: their threads are those that shares were made for."""

    def kv_clear(self) -> None:
        """Forget everything."""
        if not self._pending:
            self._between_answers()
        self._keep(Step(Op.CLEAR))

    def kv_last(self, sequence: int) -> int:
        """The last position held for a sequence; -1 if none."""
        return self._shard.engine.kv_last(sequence)

    # --- all ranks ---

    @property
    def links(self) -> dict[int, str]:
        """How this device is linked to each other rank: tcp or grpc."""
        return {rank: link.kind for rank, link in sorted(self._group.links.items())}

    @property
    def logits_cross(self) -> bool:
        """Whether other ranks have logits: then few should be asked for."""
        return list(self._heads) != [0]

    @property
    def own_times(self) -> StepTimes:
        """Step times of this rank."""
        return self._shard.times

    def times(self, *, clear: bool = False, last: int = 0, rows: int = 0) -> list[dict[str, Summary]]:
        """Return the step times of each rank, as `StepTimes.summaries`. clear: begin anew."""
        found = [self._shard.times.summaries(last, rows)]
        found += self._ordered(Step(Op.TIMES, numbers=(int(clear), last, rows, 0)), lambda: self._answers(summaries_of))
        if clear:
            self._shard.times.clear()
        return found

    def end(self) -> None:
        """Tell all ranks that no more steps come; nothing where they cannot be told."""
        if self._failed is None:
            self._failed = EngineError("the engine is closed")
            with suppress(TransportError):  # it has gone; whoever closes the sessions sees to the rest
                self._send(Step(Op.END))

    # --- links, between answers ---

    def _between_answers(self) -> None:
        """Look whether the links do what was measured of them, and change them where they do not."""
        watch = self.link_watch
        if self._relink is not None and self._failed is None and watch.due and not watch.fits(self.link_states):
            self._guarded(self._look_at_links)

    def _look_at_links(self) -> None:
        reports = self._reports(Order.REPORT)
        before = self.link_states = known(report.links for report in reports)
        order = self.link_watch.order([report.compute_s for report in reports], before)
        if order is not Order.REPORT:
            self.link_states = known(report.links for report in self._reports(order))
            self.link_watch.changed(before, self.link_states, self._expected_s())

    def _reports(self, order: Order) -> list[Report]:
        """Return the ranks' reports on their links, after the order is carried out."""
        assert self._relink is not None
        self._send(Step(Op.LINKS, numbers=(order, 0, 0, 0)))
        if order is not Order.REPORT:
            self._relink.again(self._group, order)
            self._join()
        own = Report(self._shard.times.computed_s(), self._relink.states())
        return [own, *self._answers(Report.from_json)]

    def _join(self) -> None:
        """Compute over the links that the group has now."""
        group, place = self._group, self._shard.place
        self._mates = [group.links[rank] for rank in place.mates]
        self._feeds = [group.links[rank] for rank in place.feeds]
        self._shard.join(group, self._algorithm, self._wire)

    def _expected_s(self) -> float:
        return expected_s(self.plan, self.shape.n_embd, self._group, self._algorithm, self._wire)

    # --- pieces ---

    def _submit(self, n: int, wanted: int, top: int, masks: Sequence[Mask | None]) -> None:
        """Make a decode step, do rank 0's part of it, and remember what will come of it."""
        shard, now = self._shard, time.perf_counter()
        self._make_way()
        asked = LogitsQuery.of(top, masks, [*self._heads.values()])
        step = Step(Op.DECODE, now - self._done > _PAUSE_S, (n, wanted, asked.top, len(asked.masks)), masks=asked.masks)
        shard.begin()
        for link in self._mates:
            link.send(steps.pack(step, shard.rows), Kind.CONTROL)
            steps.send_states(link, shard.rows.embeddings[:n])
        shard.compute(n)
        feed(shard, step, self._feeds)
        made = PendingStep(wanted, asked, shard.time_of(n), now, alone=n == 1 and not self._pending)
        for other in self._pending:
            other.alone = False
        if shard.place.last:
            made.own = [row.copy() for row in shard.logits(n)]
        made.time = shard.end(made.time)
        if wanted:
            self._pending.append(made)
        else:
            shard.times.add(made.time)
        self._done = time.perf_counter()

    def _collect(self) -> Floats:
        step = self._pending[0]
        logits = self._gathered(step)
        self._pending.popleft()
        self._shard.times.add(step.time)
        self._done = time.perf_counter()
        if step.alone:
            self.link_watch.token(self._done - step.began, step.time.compute_s)
        return logits

    def _make_way(self) -> None:
        """Take in the answers that are under way where they are large. The last stage could not send them off while
        we send a prompt, would not read it then, and each would wait for the other."""
        if sum(step.asked.n_bytes(step.outputs, self.shape.n_vocab) for step in self._pending) > _ANSWERS_BYTES:
            for step in self._pending:
                if step.logits is None:
                    step.logits = self._gathered(step).copy()

    def _gathered(self, step: PendingStep) -> Floats:
        """The logits of a step [rows, n_vocab], from the ranks of the last stage. Its time is brought up to date."""
        if step.logits is not None:
            return step.logits
        if len(self._logits) < step.outputs:
            self._logits = np.empty((step.outputs, self.shape.n_vocab), np.float32)
        logits = self._logits[: step.outputs]
        self._shard.begin()
        if step.asked.top:
            logits.fill(-np.inf)
        for rank, vocab in self._heads.items():
            for i in range(step.outputs):
                part = logits[i, vocab.start : vocab.stop]
                if rank == 0:
                    part[:] = step.own[i]
                else:
                    step.asked.receive(self._group.links[rank], part, i, ANSWER_TIMEOUT_S)
        step.time = self._shard.end(step.time)
        return logits

    def _answers(self, made: Callable[[Any], T]) -> list[T]:
        """Return what `made` reads from the JSON report of each other rank. ProtocolError if it cannot."""
        found = []
        for rank, link in sorted(self._group.links.items()):
            try:
                found.append(made(json.loads(bytes(link.receive(ANSWER_TIMEOUT_S).payload))))
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise ProtocolError(f"rank {rank} says of its steps what cannot be: {error}") from error
        return found

    def _keep(self, step: Step) -> bool:
        # First here: where this cache cannot do it, no other can, and nothing has changed yet.
        kept = self._guarded(lambda: self._shard.keep(step), EngineError)
        if step.op is Op.REMOVE:
            step = step._replace(numbers=(*step.numbers[:3], int(kept)))
        self._guarded(lambda: self._send(step))
        return kept

    def _ordered(self, step: Step, work: Callable[[], T]) -> T:
        """Have the other ranks do a step that is no decode, and do rank 0's part of it."""
        if self._pending:
            raise EngineError("steps are under way; collect their logits first")

        def both() -> T:
            self._send(step)
            return work()

        return self._guarded(both)

    def _send(self, step: Step) -> None:
        data = steps.pack(step, self._shard.rows)
        for link in (*self._mates, *self._feeds):
            link.send(data, Kind.CONTROL)

    def _guarded(self, work: Callable[[], T], *harmless: type[Exception]) -> T:
        """Do it; what fails is explained, and fails from then on."""
        if self._failed is not None:
            raise self._failed
        self.busy = True
        try:
            return work()
        except harmless:
            raise
        except Exception as error:
            self._failed = error
            self._pending.clear()  # nothing comes of them any more
            self._failed = self._explain(error)
            raise self._failed from error
        except BaseException:  # Ctrl-C twice: this rank left a step that the others go on with
            self._pending.clear()
            self._failed = EngineError("a step was interrupted, so the devices no longer hold the same; start again")
            raise
        finally:
            self.busy = False
