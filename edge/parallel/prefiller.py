"""Prompts computed on another placement of the model, whose keys and values move to the one that generates.

Prefill is bound by arithmetic, decode by memory and round trips: the devices that are best for one are not for the
other ("prefill/decode disaggregation"). Here one thread computes prompts chunk by chunk, and another takes in the keys
and values of a chunk while the next one is computed. The scheduler writes them to the engine that generates, in order,
between its steps, and has that engine compute the last token of a prompt, so that all logits come from there.

The hand-over has two phases. A sequence stays in this placement's cache until `RemotePrompt.release`, which the
scheduler calls when logits have come from behind its blocks. If the engine that generates is lost, the prefill
placement still has the blocks. If the prefill placement is lost, the engine that generates has every block that was
written, and computes the rest of the prompt. So at least one of the two placements holds each block.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait

from edge.closing import Closing
from edge.errors import EngineError
from edge.llm.interface import TextEngine
from edge.llm.slot import Slot, common_prefix
from edge.llm.slots import Slots
from edge.weights.adapter import Scales
from partition.errors import StateError
from partition.plan.plan import Range
from partition.state.sequence import KVBlock

BREAK_S = 0.5  # seconds that a running prompt has to end by itself, before its links are broken off
END_S = 30.0  # seconds that the thread has to end after that


class RemotePrompt:
    """A prompt that is computed here for a request elsewhere."""

    def __init__(self, tokens: Sequence[int], n_held: int, namespace: str, adapters: Scales, keep: bool) -> None:
        """n_held: tokens that the generating placement has already. adapters: adapter scales. keep: True if later
        prompts may start from these keys and values, as for `Slots`."""
        self.tokens, self.n_held, self.namespace, self.keep = list(tokens), n_held, namespace, keep
        self.adapters = adapters
        self.is_released = self.is_over = False
        self._blocks: list[KVBlock] = []
        self._changed = threading.Condition()

    def take(self) -> tuple[list[KVBlock], bool]:
        """Return the blocks that came since the last call, in order; and True if no more blocks come."""
        with self._changed:
            blocks, self._blocks = self._blocks, []
            return blocks, self.is_over

    def wait(self, timeout_s: float) -> bool:
        """Wait until `take` has something new. Return False if it has nothing after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._blocks) or self.is_over, timeout_s)

    def release(self) -> None:
        """Allow this placement to forget the keys and values, because the request has them or needs them no more."""
        self.is_released = True
        self.end()

    def add(self, blocks: Sequence[KVBlock]) -> None:
        """Add blocks for `take`."""
        with self._changed:
            if not self.is_over:
                self._blocks += blocks
                self._changed.notify_all()

    def end(self) -> None:
        """Note that no more blocks come."""
        with self._changed:
            self.is_over = True
            self._changed.notify_all()


class PrefillPlacement(Closing):
    """Computes prompts on an engine of its own, one after the other. `close()` it before its engine."""

    def __init__(
        self,
        engine: TextEngine,
        least: int,
        lost: Callable[[Exception], None] = lambda error: None,
        break_off: Callable[[], None] = lambda: None,
    ) -> None:
        """least: the fewest new tokens of a prompt that is computed here. lost: is called with the error after which no
        more prompts are computed, in the thread that computes. break_off: ends the engine's waiting from another
        thread."""
        self._engine, self._least, self._lost, self._break_off = engine, least, lost, break_off
        self._slots = Slots(engine, keep=True)
        self._in_use: list[tuple[RemotePrompt, Slot]] = []
        self._prompts: queue.SimpleQueue[RemotePrompt | None] = queue.SimpleQueue()
        self._open: list[RemotePrompt] = []  # prompts that have not ended
        self._lock = threading.Lock()
        self.failed: Exception | None = None  # the error after which no more prompts are computed
        self._thread = threading.Thread(target=self._compute_all, name="prefill", daemon=True)
        self._thread.start()

    def begin(
        self, tokens: Sequence[int], n_held: int, namespace: str, adapters: Scales, *, keep: bool
    ) -> RemotePrompt | None:
        """Begin to compute a prompt without its last token. Return None if the prompt has too few new tokens.

        The generating placement holds the first `n_held` tokens already. Tokens among them that this placement lacks
        are computed here as well, and raise the number of new tokens that is needed. A prompt that this placement holds
        as a whole is always handed over. keep: later prompts of this namespace may start from its keys and values.
        """
        cached = (slot.tokens for slot in self._slots.all if slot.namespace == namespace)
        here = max((common_prefix(own, tokens) for own in cached), default=0)
        least = 2 if here >= len(tokens) - 1 else max(2, self._least + max(0, n_held - here))
        if len(tokens) - n_held < least:
            return None
        prompt = RemotePrompt(tokens, n_held, namespace, adapters, keep)
        with self._lock:
            if self.failed is not None:
                return None
            self._open.append(prompt)
        self._prompts.put(prompt)
        return prompt

    def close(self) -> None:
        """Stop computing, and release the engine."""
        is_under_way = self._fail(EngineError("the placement of prompts was closed"))
        self._prompts.put(None)
        self._thread.join(BREAK_S if is_under_way else END_S)
        if self._thread.is_alive():
            self._break_off()
            self._thread.join(END_S)

    def _fail(self, error: Exception) -> bool:
        """Compute nothing more. Return True if a prompt was under way."""
        with self._lock:
            self.failed = self.failed or error
            ended, self._open = self._open, []
        for prompt in ended:
            prompt.end()
        return bool(ended)

    # --- the thread that computes ---

    def _compute_all(self) -> None:
        with ThreadPoolExecutor(1, "prefill reads") as receiver:
            while (prompt := self._prompts.get()) is not None:
                if self.failed is not None:
                    continue
                try:
                    self._compute(prompt, receiver)
                except Exception as error:
                    # A block that an attention window has dropped concerns this prompt alone.
                    is_harmless = isinstance(error, StateError) and self._engine.failed is None
                    if self.failed is None and not is_harmless:
                        self._fail(error)
                        self._lost(error)
                with self._lock:
                    if prompt in self._open:
                        self._open.remove(prompt)
                prompt.end()

    def _compute(self, prompt: RemotePrompt, receiver: Executor) -> None:
        self._forget_released()
        placement = self._slots.place(prompt.tokens, 0, prompt.namespace)
        if placement is None:  # sequences that are being handed over fill the cache
            return
        slot = self._slots.admit(placement, adapters=prompt.adapters)
        self._in_use.append((prompt, slot))
        n_submitted, stop = prompt.n_held, len(prompt.tokens) - 1
        chunk = self._engine.chunk(stop - len(slot.tokens))
        reads: list[Future[None]] = []
        try:
            while not prompt.is_released and self.failed is None:
                n_computed = len(slot.tokens)
                if n_computed > n_submitted:  # the receiver reads these blocks while the next chunk is computed
                    blocks = self._engine.states.begin_read(slot.sequence, Range(n_submitted, n_computed))
                    reads.append(receiver.submit(lambda blocks=blocks: prompt.add(blocks())))  # type: ignore[misc]
                    n_submitted = n_computed
                if n_computed >= stop:
                    break
                slot.decode(prompt.tokens[n_computed : min(n_computed + chunk, stop)], "none")
        finally:
            wait(reads)  # the next prompt's steps use the same links
        for read in reads:
            read.result()

    def _forget_released(self) -> None:
        """Free the slots of prompts that were handed over."""
        for prompt, slot in [pair for pair in self._in_use if pair[0].is_released]:
            self._in_use.remove((prompt, slot))
            self._slots.leave(slot, keep=False)
            if not prompt.keep:
                slot.cut(0)
