"""Prompts computed on another placement of the model, whose keys and values move to the one that generates.

Prefill is bound by arithmetic, decode by memory and round trips: the devices that are best for one are not for the
other ("prefill/decode disaggregation"). Here one thread computes prompts chunk by chunk, and another takes in the keys
and values of a chunk while the next one is computed. The scheduler writes them to the engine that generates, in order,
between its steps, and has that engine compute the last token of a prompt, so that all logits come from there.

The hand-over has two phases. A sequence stays in this placement's cache until `RemotePrompt.release`, which the
scheduler calls when logits have come from behind its blocks. So where the engine that generates is lost, what was
computed is still here; where this placement is lost, the other one has every block that was written, and computes what
follows from there. No block is ever held by neither.

Requests are answered here, too, while the placement that generates has no room for them, or is clearly slower
(`partition/predict/migration.py`). One that goes on there is a prompt that this placement has computed already.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait

from edge.adapters.adapter import Scales
from edge.closing import Closing
from edge.errors import EngineError
from edge.llm.in_flight import InFlight, Rows
from edge.llm.interface import TextEngine
from edge.llm.requests import Event, RemoteAnswer
from edge.llm.slot import Slot, common_prefix
from edge.llm.slots import Slots
from edge.llm.step_budget import StepBudget
from partition.errors import StateError
from partition.plan.plan import Range
from partition.predict.migration import HEADROOM, PlacementLoad
from partition.state.sequence import KVBlock

BREAK_S = 0.5  # for what is under way to end by itself, before links are broken off
END_S = 30.0  # for it to end then
_REMEMBERED = 16  # chunks


class RemotePrompt:
    """A prompt that is computed here for a request elsewhere."""

    def __init__(self, tokens: Sequence[int], n_held: int, namespace: str, adapters: Scales, keep: bool) -> None:
        """n_held: tokens that the placement that generates has already. adapters: their scales. keep: as of `Slots`."""
        self.tokens, self.n_held, self.namespace, self.keep = list(tokens), n_held, namespace, keep
        self.adapters = adapters
        self.is_released = self.is_over = False
        self._blocks: list[KVBlock] = []
        self._changed = threading.Condition()

    def take(self) -> tuple[list[KVBlock], bool]:
        """Blocks that came since the last call, in order; and whether no more come."""
        with self._changed:
            blocks, self._blocks = self._blocks, []
            return blocks, self.is_over

    def wait(self, timeout_s: float) -> bool:
        """Wait until `take` has something new; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._blocks) or self.is_over, timeout_s)

    def release(self) -> None:
        """Its request has its keys and values, or needs them no more: they may be forgotten here."""
        self.is_released = True
        self.end()

    def add(self, blocks: Sequence[KVBlock]) -> None:
        """Blocks have come."""
        with self._changed:
            if not self.is_over:
                self._blocks += blocks
                self._changed.notify_all()

    def end(self) -> None:
        """No more blocks come."""
        with self._changed:
            self.is_over = True
            self._changed.notify_all()


class Answering:
    """The requests that are answered, in steps that have all of them. For the thread of their placement."""

    def __init__(self, engine: TextEngine, slots: Slots) -> None:
        self._engine, self._slots = engine, slots
        self.changed = threading.Condition(threading.RLock())  # as of RemoteAnswer
        self._budget = StepBudget(engine.batch, time.perf_counter)
        self.in_flight = InFlight(self._budget, engine, 1)
        self._answers: list[tuple[RemoteAnswer, Slot]] = []

    @property
    def last(self) -> RemoteAnswer | None:
        """The request that was admitted last, of those that are answered; None where there is none."""
        return self._answers[-1][0] if self._answers else None

    def rows(self, chunk: int) -> int:
        """Return how many tokens of a prompt go into one step: a chunk, or fewer where answers wait for it."""
        return min(chunk, self._budget.prompt_rows(len(self._answers))) if self._answers else chunk

    def admit(self, answer: RemoteAnswer) -> None:
        """Give a request a slot, which then holds what there is of its history. It is over where there is no room."""
        own = answer.own
        with self.changed:
            tokens = list(own.tokens)
        self.leave()
        placement = None if answer.is_over else self._slots.place(tokens, HEADROOM, own.namespace)
        if placement is None:
            answer.end()
            return
        own.slot = slot = self._slots.admit(placement, adapters=own.adapters)
        self._answers.append((answer, slot))
        self.in_flight.pace.clear()
        self._slots.write(slot, tokens, answer.blocks)  # what cannot be taken is computed by the next steps
        answer.blocks = ()

    def leave(self) -> None:
        """Let others have the slots of requests that are over. What they hold stays until it is needed."""
        for answer, slot in [pair for pair in self._answers if pair[0].is_over]:
            self._answers.remove((answer, slot))
            self._slots.leave(slot, keep=False)

    def step(self) -> None:
        """Compute the next token of each request, or a part of what its slot lacks: one step for each set of
        adapters. Where the cache is full the last request ends."""
        self.leave()
        for adapters in {answer.own.adapters: None for answer, _ in self._answers}:
            answers = [answer for answer, _ in self._answers if answer.own.adapters == adapters]
            with self.changed:
                rows = self._rows([answer for answer in answers if not answer.is_over])
            if rows:
                self._compute(rows)

    def _rows(self, answers: Sequence[RemoteAnswer]) -> list[Rows]:
        """The rows of a step that has these requests."""
        rows: list[Rows] = []
        left = self._engine.batch - len(answers)
        for answer in answers:
            n_rows = min(self.rows(self._engine.chunk(answer.own.pending)), 1 + left)
            own = Rows.pending(answer.own, n_rows)
            left -= len(own.tokens) - 1
            if not self._slots.make_room(sum(len(other.tokens) for other in (*rows, own))):
                answer.end()
                self.in_flight.pace.clear()
                continue
            rows.append(own)
        return rows

    def _compute(self, rows: Sequence[Rows]) -> None:
        by_request = {answer.own: answer for answer, _ in self._answers}
        began = self._budget.clock()
        self.in_flight.submit(self._engine, rows)
        self.in_flight.took(self._engine, rows, began)
        if not any(own.logits for own in rows):
            return
        collected = self.in_flight.collect(self._engine)
        assert collected is not None, "the step gives logits"
        logits, step = collected
        end = 0
        for own in step.rows:
            begin, end = end, end + own.logits
            answer = by_request[own.running]
            with self.changed:
                if not answer.is_over:
                    events: list[Event] = []
                    self.in_flight.verify(own, logits[begin:end], 0, False, events)
                    answer.add(events)


class PrefillPlacement(Closing):
    """Computes prompts on an engine that nobody else uses, one after the other. `close()` it before its engine."""

    def __init__(
        self,
        engine: TextEngine,
        least: int,
        lost: Callable[[Exception], None] = lambda error: None,
        break_off: Callable[[], None] = lambda: None,
    ) -> None:
        """least: new tokens of a prompt from which it is computed here. lost: told, in a thread of its own, why no more
        prompts are. break_off: ends what the engine is waiting for, from another thread."""
        self._engine, self._least, self._lost, self._break_off = engine, least, lost, break_off
        self._slots = Slots(engine, keep=True)
        self._in_use: list[tuple[RemotePrompt, Slot]] = []
        self._answering = Answering(engine, self._slots)
        self.changed = self._answering.changed
        self._arrivals: queue.SimpleQueue[RemotePrompt | RemoteAnswer | None] = queue.SimpleQueue()
        self._open: list[RemotePrompt | RemoteAnswer] = []  # those that have not ended
        self._chunks_s: deque[float] = deque(maxlen=_REMEMBERED)  # that the last chunks of prompts took
        self.copy_token_s: float | None = None  # that reading took of the last keys and values, for each token
        self._lock = threading.Lock()
        self.failed: Exception | None = None  # why no more prompts are computed here
        self._thread = threading.Thread(target=self._compute_all, name="prefill", daemon=True)
        self._thread.start()

    def begin(
        self, tokens: Sequence[int], n_held: int, namespace: str, adapters: Scales, *, keep: bool
    ) -> RemotePrompt | None:
        """Compute a prompt, all but its last token, of which the placement that generates holds the first `n_held`.
        None where it has too few new tokens. What is held there and not here has to be computed here as well, and so
        counts against it; a prompt that is here as a whole always pays. keep: later prompts of this namespace may find
        here what it leaves.
        """
        here = self.n_held(tokens, namespace)
        least = 2 if here >= len(tokens) - 1 else max(2, self._least + max(0, n_held - here))
        if len(tokens) - n_held < least:
            return None
        prompt = RemotePrompt(tokens, n_held, namespace, adapters, keep)
        return prompt if self._enqueue(prompt) else None

    def answer(self, answer: RemoteAnswer) -> bool:
        """Answer a request until it is over; whether that was begun."""
        return self._enqueue(answer)

    def _enqueue(self, arrival: RemotePrompt | RemoteAnswer) -> bool:
        with self._lock:
            if self.failed is None:
                self._open.append(arrival)
                self._arrivals.put(arrival)
            return self.failed is None

    def n_held(self, tokens: Sequence[int], namespace: str) -> int:
        """Return how many tokens of a history are in this placement's cache."""
        own = (slot.tokens for slot in self._slots.all if slot.namespace == namespace)
        return max((common_prefix(cached, tokens) for cached in own), default=0)

    def load(self) -> PlacementLoad:
        """Return the load by requests that are answered here. A slot is left to prompts. Before an answer was measured,
        a token takes as long as the shortest chunk of a prompt, at most."""
        with self._lock:
            is_open = [arrival for arrival in self._open if not arrival.is_over]
        admitted = [each for each in is_open if isinstance(each, RemoteAnswer) and each.own.slot is not None]
        released = [slot for prompt, slot in [*self._in_use] if prompt.is_released]
        busy = [len(slot.tokens) + HEADROOM for slot in self._slots.all if slot.busy and slot not in released]
        has_slot = self.failed is None and len(busy) + 1 < len(self._slots.all)
        token_s = self._answering.in_flight.pace.token_s or (None if admitted else min(self._chunks_s, default=None))
        room = self._engine.context - sum(busy) if has_slot else 0
        return PlacementLoad(len(admitted), token_s, room, len(is_open) - len(admitted))

    def close(self) -> None:
        """Compute no more, and let go of the engine."""
        is_under_way = self._fail(EngineError("the placement of prompts was closed"))
        self._arrivals.put(None)
        self._thread.join(BREAK_S if is_under_way else END_S)
        if self._thread.is_alive():
            self._break_off()
            self._thread.join(END_S)

    def _fail(self, error: Exception) -> bool:
        """Compute nothing more; whether anything was under way."""
        with self._lock:
            self.failed = self.failed or error
            ended, self._open = self._open, []
        for arrival in ended:
            arrival.end()
        return bool(ended)

    # --- the thread that computes ---

    def _compute_all(self) -> None:
        with ThreadPoolExecutor(1, "prefill reads") as receiver:
            while (arrival := self._next()) is not None:
                if self.failed is not None:
                    continue
                try:
                    if isinstance(arrival, RemotePrompt):
                        self._compute(arrival, receiver)
                    elif not arrival.is_over and arrival.own.slot is None:
                        self._forget_released()
                        self._answering.admit(arrival)
                    self._answering.step()
                except Exception as error:
                    # A block that a window has dropped is of this prompt alone.
                    is_harmless = isinstance(error, StateError) and self._engine.failed is None
                    if self.failed is None and not is_harmless:
                        self._fail(error)
                        self._lost(error)
                if isinstance(arrival, RemotePrompt):
                    arrival.end()
                with self._lock:
                    self._open = [arrival for arrival in self._open if not arrival.is_over]

    def _next(self) -> RemotePrompt | RemoteAnswer | None:
        """Return what is to be computed next: what came, or an answer that goes on. None: nothing more."""
        answer = self._answering.last if self.failed is None else None
        try:
            return self._arrivals.get(block=answer is None)
        except queue.Empty:
            return answer

    def _compute(self, prompt: RemotePrompt, receiver: Executor) -> None:
        self._forget_released()
        self._answering.leave()
        placement = self._slots.place(prompt.tokens, 0, prompt.namespace)
        if placement is None:  # requests that are being handed over fill the cache
            return
        slot = self._slots.admit(placement, adapters=prompt.adapters)
        self._in_use.append((prompt, slot))
        n_submitted, stop = prompt.n_held, len(prompt.tokens) - 1
        chunk = self._engine.chunk(stop - len(slot.tokens))
        reads: list[Future[None]] = []
        try:
            while not prompt.is_released and self.failed is None:
                there = len(slot.tokens)
                if there > n_submitted:  # it comes while the next chunk is computed
                    reads.append(self._begin_read(prompt, slot, Range(n_submitted, there), receiver))
                    n_submitted = there
                if there >= stop:
                    break
                if self._answering.last is not None:
                    wait(reads)  # answers come on the same links
                    self._answering.step()
                began = time.perf_counter()
                slot.decode(prompt.tokens[there : min(there + self._answering.rows(chunk), stop)], "none")
                self._chunks_s.append(time.perf_counter() - began)
        finally:
            wait(reads)  # other steps may have answers on the same links
        for read in reads:
            read.result()

    def _begin_read(self, prompt: RemotePrompt, slot: Slot, positions: Range, receiver: Executor) -> Future[None]:
        """Have keys and values read while the next chunk is computed."""
        began = time.perf_counter()
        blocks = self._engine.states.begin_read(slot.sequence, positions)

        def receive() -> None:
            prompt.add(blocks())
            self.copy_token_s = (time.perf_counter() - began) / len(positions)

        return receiver.submit(receive)

    def _forget_released(self) -> None:
        """Let others have the slots of prompts that were handed over."""
        for prompt, slot in [pair for pair in self._in_use if pair[0].is_released]:
            self._in_use.remove((prompt, slot))
            self._slots.leave(slot, keep=False)
            if not prompt.keep:
                slot.cut(0)
