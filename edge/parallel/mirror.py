"""Copies of what slots hold, in this device's memory, so that an engine that takes over need not compute it.

Blocks of the whole model are copied from all ranks: between steps for a small share of what steps take, while nobody
asks freely. Each is known by all tokens up to its end, so that what slots have in common is copied once.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from devices.probe import available_memory
from edge.errors import EdgeError
from edge.llama.llama import Model
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions, resolve
from edge.llm.slot import Slot
from edge.parallel.moving import movable
from edge.prefixes.keys import KEY_BYTES, block_hashes
from partition.errors import CannotSlice, StateError
from partition.model.model import ModelShape
from partition.plan.plan import Range
from partition.state.sequence import KVBlock
from quant.gguf.file import GgufFile

SHARE = 0.02  # of what steps take, at most, that copying takes between them
MOST_SAVED_S = 0.1  # that may be kept for later where all is copied, and that a wait for steps under way is worth
AFTER_S = 1.0  # for what is left when an answer is complete
_MOST_OF_MEMORY = 0.25  # of what is free, or of a budget
_NEVER = sys.maxsize  # as a number of tokens: no more of this sequence can be copied


class Mirror:
    """Copies of keys and values by their tokens. `follow` makes them, `restore` gives them to another engine's slot.

    What was shifted is not copied: its keys and values depend on tokens that are no longer there. Sizes that computed
    them are not told apart: nobody knows those of all ranks, and what runs goes on with whatever was computed.
    """

    def __init__(self, token_bytes: int, max_bytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """token_bytes: of one token's keys and values. max_bytes: that copies may take. clock: seconds."""
        self.active = True  # False where there is nobody whose loss could be made good: nothing is held then
        self.token_bytes, self.max_bytes, self._clock = token_bytes, max_bytes, clock
        self.held_bytes = 0
        self.copied_bytes = 0  # in all
        self.copied_s = 0.0  # that this took
        self.restored_tokens = 0
        self._key = secrets.token_bytes(KEY_BYTES)
        self._blocks: dict[bytes, KVBlock] = {}  # by block hash
        self._allowed_s = 0.0  # that copies between steps may take; below 0 where the last one took more

    def to_json(self) -> dict[str, Any]:
        """Figures: bytes and seconds."""
        names = ("token_bytes", "max_bytes", "held_bytes", "copied_bytes", "copied_s", "restored_tokens")
        return {name: getattr(self, name) for name in names}

    # --- copies ---

    @contextmanager
    def step(self) -> Iterator[None]:
        """While the engine computes a step, or somebody waits for its logits: what it takes allows for copies later."""
        began = self._clock()
        try:
            yield
        finally:
            self._allowed_s += SHARE * (self._clock() - began)

    def follow(
        self,
        engine: TextEngine,
        slots: Sequence[Slot],
        ready: Callable[[], None],
        under_way: int = 0,
        most_s: float | None = None,
    ) -> bool:
        """Copy what slots of an engine hold: whether there may be more. Between steps that takes no more than is
        allowed by then. Where steps are under way, to wait for them is worth it only for many copies. The errors of
        `SequenceStates.read`.

        ready: called before anything is read, where so many steps are under way. most_s: that it may take while nobody
        asks; None: it is between two steps.
        """
        if not self.active:
            self._blocks.clear()
            self.held_bytes = 0
            for slot in slots:
                slot.mirrored = 0
            return False
        if most_s is None and under_way and self._allowed_s < MOST_SAVED_S:
            return True
        left_s = self._allowed_s if most_s is None else most_s
        is_ready = False
        for slot in slots:
            while left_s > 0 and (new := self._next(slot, engine.states.most_read)) is not None:
                began = self._clock()
                if not is_ready:
                    ready()
                    is_ready = True
                positions, block_hash = new
                is_kept = self._copy(engine, slots, slot.sequence, positions, block_hash)
                slot.mirrored = positions.stop if is_kept else _NEVER
                took_s = self._clock() - began
                self.copied_s += took_s
                left_s -= took_s
        if most_s is None:
            self._allowed_s = left_s
        if left_s > 0:  # all is copied
            self._allowed_s = min(self._allowed_s, MOST_SAVED_S)
        return left_s <= 0

    def restore(self, engine: TextEngine, slot: Slot, tokens: Sequence[int]) -> None:
        """Give a slot of another engine what is copied of these tokens, of which it may hold some."""
        start, block = len(slot.tokens), engine.states.most_read
        chain = block_hashes(self._key, tokens, block, slot.namespace)
        there = next((i for i, block_hash in enumerate(chain) if block_hash not in self._blocks), len(chain))
        if there * block <= start or slot.origin.shifted is not None:
            return
        if start % block:  # whole blocks: the rest of the last one is forgotten
            slot.cut(start // block * block)
        for i in range(len(slot.tokens) // block, there):
            try:
                engine.states.write(slot.sequence, self._blocks[chain[i]])
            except EdgeError:
                if engine.failed is not None:
                    raise
                break  # it holds less than the one before: the rest is computed
            slot.submitted(tokens[i * block : (i + 1) * block])
        self.restored_tokens += max(0, len(slot.tokens) - start)

    def _next(self, slot: Slot, block: int) -> tuple[Range, bytes] | None:
        """The first block of a slot that is whole and not copied yet, and its hash."""
        copied, tokens = slot.mirrored // block * block, slot.tokens[: slot.origin.shifted]
        if len(tokens) - copied < block:
            return None
        chain = block_hashes(self._key, tokens, block, slot.namespace)
        while copied // block < len(chain) and chain[copied // block] in self._blocks:
            copied += block
        slot.mirrored = copied
        return (Range(copied, copied + block), chain[copied // block]) if copied // block < len(chain) else None

    def _copy(self, engine: TextEngine, slots: Sequence[Slot], sequence: int, positions: Range, name: bytes) -> bool:
        """Copy a block under its hash. False where no more of a sequence can be copied."""
        n_bytes = len(positions) * self.token_bytes
        if self.held_bytes + n_bytes > self.max_bytes:
            self._drop_unused(slots, len(positions))
        if self.held_bytes + n_bytes > self.max_bytes:
            return False
        try:
            block = engine.states.read(sequence, positions)
        except StateError:  # an attention window has dropped some of it
            return False
        self._blocks[name] = block
        self.held_bytes += block.n_bytes
        self.copied_bytes += block.n_bytes
        return True

    def _drop_unused(self, slots: Sequence[Slot], block: int) -> None:
        """Drop copies of what no slot holds any more."""
        used: set[bytes] = set()
        for slot in slots:
            used.update(block_hashes(self._key, slot.tokens[: slot.origin.shifted], block, slot.namespace))
        self._blocks = {name: copy for name, copy in self._blocks.items() if name in used}
        self.held_bytes = sum(copy.n_bytes for copy in self._blocks.values())


def not_copied(why: str) -> str:
    """Return the reason why there is no copy, for people."""
    return f"keys and values are not copied, but computed again: {why}"


def mirror_of(file: GgufFile, options: EngineOptions, vocabulary: Model, budget: int | None) -> Mirror | str:
    """Return a KV mirror of a model, or why its keys and values cannot be read. Its size is that of a full context, but
    no more than a quarter of the free memory, or of the budget."""
    context = resolve(options, ModelShape.from_gguf(file))[0]
    try:
        token_bytes = movable(file, options, vocabulary).token_bytes
    except CannotSlice as error:
        return str(error)
    return Mirror(token_bytes, min(context * token_bytes, round(_MOST_OF_MEMORY * (budget or available_memory()))))
