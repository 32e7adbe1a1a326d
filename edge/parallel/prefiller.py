"""Prefill-decode disaggregation: another placement of the model prefills prompts, and their KV cache moves to the
decode placement.

Prefill is limited by arithmetic, and decode by memory bandwidth and round trips, so different devices suit them best.
One thread prefills prompts chunk by chunk. Another thread receives the KV cache of a chunk while the next chunk is
computed. Between steps the scheduler writes the KV cache to the decode engine, in order. The decode engine computes the
last token of each prompt, so all logits come from there.

The handover has two phases. A sequence stays in the cache of the prefill placement until the scheduler calls
`RemotePrompt.release`. It does so when logits based on the moved blocks have arrived. If the decode engine is lost, the
prefill placement still has the blocks. If the prefill placement is lost, the decode engine has every written block and
prefills the rest. So at least one placement holds each block.
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

BREAK_S = 0.5  # seconds for a prompt in progress to end by itself before its links are closed
END_S = 30.0  # further seconds for the thread to end


class RemotePrompt:
    """A prompt that the prefill placement computes for a request."""

    def __init__(self, tokens: Sequence[int], n_held: int, namespace: str, adapters: Scales, keep: bool) -> None:
        """n_held: prompt tokens that the decode placement already holds.
        adapters: adapter scales.
        keep: True if later prompts may reuse this KV cache, as for `Slots`.
        """
        self.tokens, self.n_held, self.namespace, self.keep = list(tokens), n_held, namespace, keep
        self.adapters = adapters
        self.is_released = self.is_over = False
        self._blocks: list[KVBlock] = []
        self._changed = threading.Condition()

    def take(self) -> tuple[list[KVBlock], bool]:
        """Return (blocks that arrived since the last call, in order; True if no more blocks follow)."""
        with self._changed:
            blocks, self._blocks = self._blocks, []
            return blocks, self.is_over

    def wait(self, timeout_s: float) -> bool:
        """Wait until `take` has something new. Return False if it has nothing after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._blocks) or self.is_over, timeout_s)

    def release(self) -> None:
        """Allow the prefill placement to drop the KV cache, because the request has it or no longer needs it."""
        self.is_released = True
        self.end()

    def add(self, blocks: Sequence[KVBlock]) -> None:
        """Add blocks for `take`."""
        with self._changed:
            if not self.is_over:
                self._blocks += blocks
                self._changed.notify_all()

    def end(self) -> None:
        """Mark that no more blocks follow."""
        with self._changed:
            self.is_over = True
            self._changed.notify_all()


class PrefillPlacement(Closing):
    """Prefills prompts on its own engine, one after the other. Close it before its engine."""

    def __init__(
        self,
        engine: TextEngine,
        least: int,
        lost: Callable[[Exception], None] = lambda error: None,
        break_off: Callable[[], None] = lambda: None,
    ) -> None:
        """least: minimum number of new tokens of a prompt that is computed here.
        lost: called in the computing thread with the error after which no more prompts are computed.
        break_off: called from another thread to end the engine's waiting.
        """
        self._engine, self._least, self._lost, self._break_off = engine, least, lost, break_off
        self._slots = Slots(engine, keep=True)
        self._in_use: list[tuple[RemotePrompt, Slot]] = []
        self._prompts: queue.SimpleQueue[RemotePrompt | None] = queue.SimpleQueue()
        self._open: list[RemotePrompt] = []  # prompts in progress
        self._lock = threading.Lock()
        self.failed: Exception | None = None  # error after which no more prompts are computed
        self._thread = threading.Thread(target=self._compute_all, name="prefill", daemon=True)
        self._thread.start()

    def begin(
        self, tokens: Sequence[int], n_held: int, namespace: str, adapters: Scales, *, keep: bool
    ) -> RemotePrompt | None:
        """Start to prefill a prompt without its last token. Return None if it has too few new tokens.

        The decode placement already holds the first `n_held` tokens. If the prefill placement lacks some of them, it
        computes them as well, and the required number of new tokens grows accordingly. A prompt that the prefill
        placement holds completely is always handed over.

        keep: later prompts of this namespace may reuse the KV cache.
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
        """Stop computing. Return True if a prompt was in progress."""
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
                    # A block that an attention window has dropped affects this prompt only.
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
        if placement is None:  # sequences in handover fill the cache
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
            wait(reads)  # the steps of the next prompt use the same links
        for read in reads:
            read.result()

    def _forget_released(self) -> None:
        """Free the slots of prompts whose handover is complete."""
        for prompt, slot in [pair for pair in self._in_use if pair[0].is_released]:
            self._in_use.remove((prompt, slot))
            self._slots.leave(slot, keep=False)
            if not prompt.keep:
                slot.cut(0)
