"""Slot: one sequence of an engine's KV cache, with the tokens that it holds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.errors import ContextFull, EdgeError, EmptyPrompt
from edge.llm.interface import Outputs, TextEngine
from edge.llm.options import SINKS
from edge.llm.snapshots import SnapshotPlan
from edge.media.media import alike, whole
from edge.prefixes.group import group_start
from edge.weights.adapter import Scales
from edge.weights.elastic.weights import next_size, pass_size


class Former(NamedTuple):
    """State of a slot on an engine that another one replaced."""

    tokens: list[int]
    steps: list[int]
    namespace: str


class Origin(NamedTuple):
    """Origin of the KV cache in a slot."""

    size: int = 0  # size of an elastic model that computed the first token
    # Number of first tokens whose KV cache equals that of one pass over the history in one size; None: all tokens.
    exact: int | None = None

    def cut(self, length: int) -> Origin:
        """Return the origin of the first `length` tokens."""
        return self if self.exact is None or self.exact < length else Origin(self.size)

    def inexact_from(self, start: int) -> Origin:
        """Return the origin if tokens from position `start` on are inexact: shifted, computed in another size, or
        with positions that differ from their places.
        """
        return self._replace(exact=start if self.exact is None else min(start, self.exact))


class Slot:
    """One sequence. `tokens` are the tokens whose KV cache it holds, or will hold after the submitted steps."""

    def __init__(self, engine: TextEngine, sequence: int = 0) -> None:
        self.engine, self.sequence = engine, sequence
        self.tokens: list[int] = []
        self.namespace = ""  # requests in other namespaces must not notice its contents
        self.adapters: Scales | None = None  # adapter scales of its request, as for `Engine.decode`
        self.busy = False  # True while a request uses it
        self.used = 0  # order of the last use; the slot with the lowest number is evicted first
        self.restored = 0  # tokens that the last `begin` read from disk
        self.dropped = 0  # tokens that were dropped in place
        self.computed = 0  # tokens that the last `prefill` computed
        self.origin = Origin()
        self.steps: list[int] = []  # first position of each step that computed the tokens
        self.plan = SnapshotPlan()
        self._n_stored = 0  # tokens whose KV cache is on disk or being written
        self._shifting = False  # True if the next step moves keys

    @property
    def exact(self) -> int | None:
        """Same as `Origin.exact`."""
        return self.origin.exact

    # --- contents for a prompt ---

    def begin(self, history: Sequence[int], *, in_place: bool = False) -> None:
        """Hold as much of a history's beginning as is available here or on disk, and nothing else. The last token is
        left out, because it has to be computed for its logits.

        in_place: if the slot holds the history with additional tokens in the middle, drop these and shift the rest
            instead of computing it. The result is nearly the same. The engine must be able to shift.
        """
        same = common_prefix(self.tokens, history)
        most_read = self.engine.states.most_read if in_place else 0
        self.dropped = dropped_stretch(self.tokens, history, same, most_read) if in_place else 0
        if self.dropped:
            self.drop(same, self.dropped)
            same = common_prefix(self.tokens, history)
        self.cut(min(same, len(history) - 1))
        self.restored = _restore(self, history)
        if self.engine.states.snapshots is not None:
            self.plan = SnapshotPlan(len(history), self.engine.states.block)

    def cut(self, length: int) -> None:
        """Remove all tokens from position `length` on, and a picture that would not be whole.

        If the cache cannot remove exactly these, remove the tokens after the last snapshot before `length`, or all
        tokens.
        """
        length = whole(self.tokens, length)
        # Always remove, because a failed step may have left rows.
        if not self.engine.kv_remove(self.sequence, length, -1):
            length = set_back(self, length)
        del self.tokens[length:]
        del self.steps[bisect_left(self.steps, length) :]
        self._n_stored = min(self._n_stored, length)
        self.origin = self.origin.cut(length)

    def lost(self) -> None:
        """Mark the slot as empty, because another user has the sequence, or the engine was replaced."""
        self.tokens.clear()
        self.steps.clear()
        self._n_stored, self.origin, self._shifting = 0, Origin(), False

    def former(self) -> Former:
        """Return the state of the slot, for an engine that takes over."""
        return Former(list(self.tokens), list(self.steps), self.namespace)

    def copy_from(self, source: Slot) -> None:
        """Hold the contents of another slot of this engine. This takes no additional memory."""
        self.cut(0)
        self.engine.kv_copy(source.sequence, self.sequence, 0, -1)
        self.tokens, self.origin, self.namespace = list(source.tokens), source.origin, source.namespace
        self.steps = list(source.steps)

    def drop(self, start: int, n_tokens: int) -> None:
        """Drop `n_tokens` tokens from position `start` on. Later tokens move up."""
        tokens, self.tokens = self.tokens, []  # after an interruption the contents must not be used
        self._shifting = True
        self.engine.kv_remove(self.sequence, start, start + n_tokens)
        self.engine.kv_shift(self.sequence, start + n_tokens, -1, -n_tokens)
        self.tokens = tokens[:start] + tokens[start + n_tokens :]
        before, behind = bisect_left(self.steps, start), bisect_right(self.steps, start + n_tokens)
        self.steps = [*self.steps[:before], start, *(at - n_tokens for at in self.steps[behind:])]
        self.origin = self.origin.inexact_from(start)
        self._n_stored = min(self._n_stored, start)

    # --- on disk ---

    @property
    def is_kept(self) -> bool:
        """True if all whole blocks of the slot are on disk. They may have been evicted there."""
        states = self.engine.states
        if self._n_stored // states.block < len(self.tokens) // states.block:  # inexact tokens are not kept
            return False
        hashes = block_hashes(self, self.tokens[: self._n_stored])
        return bool(hashes) and states.n_cached(hashes) == len(hashes)

    @property
    def has_new_group(self) -> bool:
        """True if enough blocks for a file were computed since the last `keep`."""
        block = self.engine.states.block
        return group_start(len(self.tokens) // block) > self._n_stored // block

    def keep(self) -> None:
        """Keep the slot's blocks in the prefix cache on disk, if the engine has one, so that later prompts need not
        compute them.

        Inexact tokens are not kept: shifted tokens depend on a longer history, and tokens after a change of size mix
        two models. Recomputing would give another result. No error is raised, because the next step reports a failed
        engine, and keeping is optional.
        """
        self.plan.has_new = False
        states = self.engine.states
        exact = len(self.tokens) if self.exact is None else self.exact
        whole, n_stored = exact // states.block, self._n_stored // states.block
        if not states.keeps or self._shifting or whole <= n_stored:
            return
        first = group_start(n_stored)
        with suppress(EdgeError):
            hashes = block_hashes(self, self.tokens[: whole * states.block])
            states.keep(self.sequence, first * states.block, hashes[first:])
            self._n_stored = whole * states.block

    # --- computing: a scheduler submits steps of many slots itself, and records them here ---

    def submitted(self, tokens: Sequence[int]) -> None:
        """Record the tokens of a submitted step."""
        self._shifting = False
        size, start = pass_size(self.engine.paging), len(self.tokens)
        if not start:
            self.origin = self.origin._replace(size=size)
        elif size != self.origin.size:
            self.origin = self.origin.inexact_from(start)
        if tokens and tokens[0] < 0 and self.engine.model.has_sections:
            # From here on places differ from the positions that reads use.
            self.origin = self.origin.inexact_from(start)
        self.steps.append(start)
        self.tokens.extend(tokens)
        if not self.plan.wants(len(self.tokens)) or self.exact is not None:
            return
        states = self.engine.states
        if states.snapshots is not None:
            with suppress(EdgeError):  # the next step reports an engine that failed
                states.snapshots.make(self.sequence, block_hashes(self, self.tokens)[-1])
                self.plan.has_new = True

    def failed(self) -> None:
        """Record that a step was not submitted, or only in part."""
        if self._shifting:  # keys of some layers may have moved, and would move again
            self.tokens.clear()

    def decode(self, tokens: Sequence[int], outputs: Outputs = "last", *, top: int = 0) -> NDArray[np.float32]:
        """Append tokens in one pass, while no other step is in flight. Return logits as `Engine.decode`."""
        try:
            logits = self.engine.decode(
                tokens, len(self.tokens), sequence=self.sequence, outputs=outputs, top=top, adapters=self.adapters
            )
        except BaseException:
            self.failed()
            raise
        self.submitted(tokens)
        return logits

    def prefill(self, prompt: Sequence[int], *, in_place: bool = False, top: int = 0) -> NDArray[np.float32]:
        """Hold exactly `prompt`, and compute only the tokens that differ. Return the logits [n_vocab] of its last
        token.

        Raises ContextFull if the prompt is empty, or leaves no room for another token.
        """
        check_prompt(prompt, self.engine)
        self.begin(prompt, in_place=in_place)
        self.computed = len(prompt) - len(self.tokens)
        return self._compute(prompt, "last", top)

    def compute_again(self, former: Former, end: int) -> None:
        """Hold the first `end` tokens of a former slot. Missing tokens are computed in the same steps as before,
        because the last bits depend on the rows of a step.
        """
        first = bisect_right(former.steps, len(self.tokens)) - 1
        if former.steps[first] < len(self.tokens) < end:  # the copied part ends inside a step
            self.cut(former.steps[first])
        try:
            for start, stop in pairwise([*former.steps, len(former.tokens)]):
                if len(self.tokens) <= start < end:
                    self.decode(former.tokens[start:stop], "none")
        except BaseException:
            self.lost()  # a replacement engine begins with the first step again
            raise
        if len(self.tokens) > end:
            self.cut(end)
        self.steps = former.steps[: bisect_left(former.steps, len(self.tokens))]

    def forget(self, n_tokens: int) -> None:
        """Remove the last tokens. If the cache cannot do that, compute the remaining tokens again."""
        rest = self.tokens[: len(self.tokens) - n_tokens]
        self.cut(len(rest))
        self._compute(rest, "none", 0)

    def _compute(self, tokens: Sequence[int], outputs: Outputs, top: int) -> NDArray[np.float32]:
        logits = np.empty(0, np.float32)
        chunk = self.engine.chunk(len(tokens) - len(self.tokens))
        while (start := len(self.tokens)) < len(tokens):
            n_rows = alike(tokens, start, self.plan.rows(start, chunk))
            is_last = start + n_rows >= len(tokens)
            logits = self.decode(tokens[start : start + n_rows], outputs if is_last else "none", top=top)
        return logits


def block_hashes(slot: Slot, tokens: Sequence[int]) -> list[bytes]:
    """Return the hashes of the whole blocks of tokens that begin like the slot's contents."""
    size = slot.origin.size
    namespace = f"{slot.namespace}\0size {size}" if size else slot.namespace
    return slot.engine.states.block_hashes(tokens, namespace)


def _restore(slot: Slot, history: Sequence[int]) -> int:
    """Append blocks from disk to the slot. Return the number of tokens read."""
    states = slot.engine.states
    n_cached, whole = len(slot.tokens), (len(history) - 1) // states.block
    if not states.keeps or slot.exact is not None or whole <= n_cached // states.block:
        return 0
    size = next_size(slot.engine.paging)
    if n_cached and size != slot.origin.size:
        return 0
    slot.origin = slot.origin._replace(size=size)
    first = group_start(n_cached // states.block)
    hashes = block_hashes(slot, history[: whole * states.block])[first:]
    hashes = hashes[: states.n_cached(hashes)]
    if (first + len(hashes)) * states.block <= n_cached:
        return 0
    if states.snapshots is not None:
        if states.restore(slot.sequence, first * states.block, hashes) < len(hashes):
            slot.cut(0)
            return 0
        slot.steps.append(n_cached)
        slot.tokens = [*history[: (first + len(hashes)) * states.block]]
        slot._n_stored = len(slot.tokens)
        return slot._n_stored - n_cached
    slot.cut(first * states.block)
    if len(slot.tokens) < first * states.block:  # the cache had to remove all tokens
        return max(0, _restore(slot, history) - n_cached)
    blocks = states.restore(slot.sequence, first * states.block, hashes)
    slot.steps.append(len(slot.tokens))
    slot.tokens.extend(history[first * states.block : (first + blocks) * states.block])
    slot.cut(len(slot.tokens))  # some ranks may have had more blocks than others
    slot._n_stored = max(slot._n_stored, len(slot.tokens))
    return max(0, len(slot.tokens) - n_cached)


def check_prompt(prompt: Sequence[int], engine: TextEngine) -> None:
    """Raise ContextFull if a prompt is empty, or leaves no room for a response."""
    if not prompt:
        raise EmptyPrompt("the prompt is empty: there is nothing to continue")
    if len(prompt) >= engine.context:
        raise ContextFull(
            f"the prompt has {len(prompt)} tokens and the context {engine.context}, which must also hold the answer;"
            f" {_advice(len(prompt), engine.shape.context_length)}"
        )


def _advice(prompt_tokens: int, trained: int) -> str:
    """Return advice for a prompt that does not fit. trained: context length of the training; 0: unknown."""
    if trained and prompt_tokens >= trained:
        return f"use a shorter prompt: the model was trained for {trained} tokens"
    most = f", up to the {trained} that the model was trained for," if trained else ""
    return f"use a larger --context{most} or a shorter prompt"


def full_length(engine: TextEngine) -> int:
    """Return the number of tokens that a slot may hold."""
    window = engine.attention_window
    return engine.context if window is None else SINKS + window


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two histories."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def set_back(slot: Slot, length: int) -> int:
    """Set a slot's sequence back to the last snapshot within its first `length` tokens, or empty it. Return its new
    number of tokens.
    """
    states = slot.engine.states
    if states.snapshots is not None:
        exact = length if slot.exact is None else min(length, slot.exact)
        hashes = block_hashes(slot, slot.tokens[:exact])
        for n_blocks in range(len(hashes), 0, -1):
            end, last = n_blocks * states.block, hashes[n_blocks - 1]
            if states.snapshots.has(last) and states.snapshots.set_back(slot.sequence, end, last):
                return end
    slot.engine.kv_remove(slot.sequence, 0, -1)
    return 0


def dropped_stretch(cached: Sequence[int], prompt: Sequence[int], same: int, least: int) -> int:
    """Return the number of tokens to drop after the first `same` cached ones, so that as much as possible of the
    rest continues the prompt. Return 0 if fewer than `least` tokens would match.
    """
    lengths = matches(prompt[same:], cached[same:])
    most = max(lengths, default=0)
    return lengths.index(most) if most >= least else 0


def matches(pattern: Sequence[int], text: Sequence[int]) -> list[int]:
    """Return, for each position in `text`, how many tokens from there on match the beginning of `pattern` (the Z
    algorithm).
    """
    n_pattern, joined = len(pattern), [*pattern, -1, *text]
    z, start, end = [0] * len(joined), 0, 0  # joined[start:end] is the match that reaches farthest
    for i in range(1, len(joined)):
        length = min(z[i - start], end - i) if i < end else 0
        while i + length < len(joined) and joined[length] == joined[i + length]:
            length += 1
        z[i] = length
        if i + length > end:
            start, end = i, i + length
    return z[n_pattern + 1 :]
