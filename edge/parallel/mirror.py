"""What sequences hold, copied to this device's memory, so that an engine that takes over need not compute it.

Blocks of the whole model are copied from all ranks: between steps for a small share of what steps take, while nobody
asks freely. Each is known by all tokens up to its end, so that what sequences have in common is copied once.
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
from edge.parallel.history import UNKNOWN, History
from edge.prefixes.keys import KEY_BYTES, links
from partition.errors import CannotSlice, StateError
from partition.model.model import ModelShape
from partition.plan.plan import Range
from partition.slices.source import Source
from partition.state.sequence import KVBlock
from partition.state.shape import StateShape
from quant.gguf.file import GgufFile

SHARE = 0.02  # of what steps take, at most, that copying takes between them
MOST_SAVED_S = 0.1  # that may be kept for later where all is copied, and that a wait for steps under way is worth
AFTER_S = 1.0  # for what is left when an answer is complete
_MOST_OF_MEMORY = 0.25  # of what is free, or of a budget
_NEVER = sys.maxsize  # as a number of tokens: no more of this sequence can be copied


class MirroredHistory(History):
    """A history with keys and values beside its tokens. `follow` copies them, `restore` gives them to another engine.

    What was shifted is not copied: its keys and values depend on tokens that are no longer there.
    """

    def __init__(self, token_bytes: int, max_bytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """token_bytes: of one token's keys and values. max_bytes: that copies may take. clock: seconds."""
        super().__init__()
        self.active = True  # False where there is nobody whose loss could be made good: nothing is held then
        self.token_bytes, self.max_bytes, self._clock = token_bytes, max_bytes, clock
        self.held_bytes = 0
        self.copied_bytes = 0  # in all
        self.copied_s = 0.0  # that this took
        self.restored_tokens = 0
        self._key = secrets.token_bytes(KEY_BYTES)
        self._blocks: dict[bytes, KVBlock] = {}  # by link
        self._copied: dict[int, int] = {}  # tokens of each sequence that were seen to
        self._shifted: dict[int, int] = {}  # the first position of a sequence that was shifted
        self._allowed_s = 0.0  # that copies between steps may take; below 0 where the last one took more

    @classmethod
    def of(cls, file: GgufFile, options: EngineOptions, vocabulary: Model, budget: int | None) -> MirroredHistory:
        """For a model. Its size is that of a full context, but no more than a quarter of the free memory, or of the
        budget. CannotSlice where the model's keys and values cannot be read."""
        if vocabulary.is_recurrent:
            raise CannotSlice(f"{file.architecture} models are recurrent: they hold nothing of each token")
        context, _, kv = resolve(options, ModelShape.from_gguf(file))
        token_bytes = StateShape.of_model(Source.from_file(file), kv).token_bytes
        return cls(token_bytes, min(context * token_bytes, round(_MOST_OF_MEMORY * (budget or available_memory()))))

    def to_json(self) -> dict[str, Any]:
        """Figures: bytes and seconds."""
        names = ("token_bytes", "max_bytes", "held_bytes", "copied_bytes", "copied_s", "restored_tokens")
        return {name: getattr(self, name) for name in names}

    # --- what changes a history ---

    def remove(self, sequence: int, start: int, end: int = -1) -> None:
        """As `History.remove`."""
        super().remove(sequence, start, end)
        self._changed(sequence, start)
        if end < 0 and start <= self._shifted.get(sequence, _NEVER):
            self._shifted.pop(sequence, None)

    def copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """As `History.copy`."""
        super().copy(source, target, start, end)
        self._changed(target, start)
        if source in self._shifted:
            self._shifted[target] = min(self._shifted[source], self._shifted.get(target, _NEVER))

    def shift(self, sequence: int, start: int, end: int, delta: int) -> None:
        """As `History.shift`."""
        super().shift(sequence, start, end, delta)
        first = min(start, start + delta)
        self._changed(sequence, first)
        self._shifted[sequence] = min(first, self._shifted.get(sequence, _NEVER))

    def clear(self) -> None:
        """As `History.clear`."""
        super().clear()
        self._copied.clear()
        self._shifted.clear()

    def _changed(self, sequence: int, start: int) -> None:
        self._copied[sequence] = min(start, self._copied.get(sequence, 0))

    # --- copies ---

    @contextmanager
    def step(self) -> Iterator[None]:
        """As `History.step`: what it takes allows for copies later."""
        began = self._clock()
        try:
            yield
        finally:
            self._allowed_s += SHARE * (self._clock() - began)

    def follow(
        self, engine: TextEngine, ready: Callable[[], None], under_way: int = 0, most_s: float | None = None
    ) -> bool:
        """As `History.follow`. Between steps copies take no more than is allowed by then. Where steps are under way, to
        wait for them is worth it only for many copies. The errors of `SequenceStates.read`."""
        if not self.active:
            self._blocks.clear()
            self._copied.clear()
            self.held_bytes = 0
            return False
        if most_s is None and under_way and self._allowed_s < MOST_SAVED_S:
            return True
        left_s = self._allowed_s if most_s is None else most_s
        is_ready = False
        for sequence in list(self._tokens):
            while left_s > 0 and (new := self._next(sequence, engine.states.most_read)) is not None:
                began = self._clock()
                if not is_ready:
                    ready()
                    is_ready = True
                start, link = new
                is_kept = self._copy(engine, sequence, start, link)
                self._copied[sequence] = start + engine.states.most_read if is_kept else _NEVER
                took_s = self._clock() - began
                self.copied_s += took_s
                left_s -= took_s
        if most_s is None:
            self._allowed_s = left_s
        if left_s > 0:  # all is copied
            self._allowed_s = min(self._allowed_s, MOST_SAVED_S)
        return left_s <= 0

    def restore(self, engine: TextEngine, sequence: int, tokens: Sequence[int], start: int) -> int:
        """As `History.restore`."""
        block = engine.states.most_read
        chain = links(self._key, tokens, block)
        there = next((i for i, link in enumerate(chain) if link not in self._blocks), len(chain))
        if there * block <= start:
            return start
        held = start // block * block  # whole blocks: the rest of the last one is forgotten
        if held < start:
            engine.kv_remove(sequence, held)
        for link in chain[held // block : there]:
            try:
                engine.states.write(sequence, self._blocks[link])
            except EdgeError:
                if engine.failed is not None:
                    raise
                break  # it holds less than the one before: the rest is computed
            held += block
        self.restored_tokens += max(0, held - start)
        return held

    def _next(self, sequence: int, block: int) -> tuple[int, bytes] | None:
        """Where the first block of a sequence begins that is whole and not copied yet, and its link."""
        copied = self._copied.get(sequence, 0) // block * block
        if len(self._tokens[sequence]) - copied < block:
            return None
        chain = links(self._key, self._exact(sequence), block)
        while copied // block < len(chain) and chain[copied // block] in self._blocks:
            copied += block
        self._copied[sequence] = copied
        return (copied, chain[copied // block]) if copied // block < len(chain) else None

    def _exact(self, sequence: int) -> list[int]:
        """The first tokens of a sequence, as far as they say all that its keys and values depend on."""
        held = self._tokens[sequence]
        tokens = [held.get(at, UNKNOWN) for at in range(min(len(held), self._shifted.get(sequence, _NEVER)))]
        return tokens[: tokens.index(UNKNOWN)] if UNKNOWN in tokens else tokens

    def _copy(self, engine: TextEngine, sequence: int, start: int, link: bytes) -> bool:
        """False where no more of a sequence can be copied."""
        positions = Range(start, start + engine.states.most_read)
        n_bytes = len(positions) * self.token_bytes
        if self.held_bytes + n_bytes > self.max_bytes:
            self._drop_unused(engine.states.most_read)
        if self.held_bytes + n_bytes > self.max_bytes:
            return False
        try:
            block = engine.states.read(sequence, positions)
        except StateError:  # an attention window has dropped some of it
            return False
        self._blocks[link] = block
        self.held_bytes += block.n_bytes
        self.copied_bytes += block.n_bytes
        return True

    def _drop_unused(self, block: int) -> None:
        """Drop copies of what no sequence holds any more."""
        used = {link for sequence in self._tokens for link in links(self._key, self._exact(sequence), block)}
        self._blocks = {link: held for link, held in self._blocks.items() if link in used}
        self.held_bytes = sum(held.n_bytes for held in self._blocks.values())


def not_copied(why: str) -> str:
    """Return the reason why there is no copy, for people."""
    return f"keys and values are not copied, but computed again: {why}"


def mirror_of(file: GgufFile, options: EngineOptions, vocabulary: Model, budget: int | None) -> MirroredHistory | str:
    """As `MirroredHistory.of`, or why there is none."""
    try:
        return MirroredHistory.of(file, options, vocabulary, budget)
    except CannotSlice as error:
        return str(error)
