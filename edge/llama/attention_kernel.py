"""Attention kernel of an engine: flash attention, or products and a softmax, whichever decodes faster at its length.

llama.cpp fixes the kernel of a context when it makes one. Where the other kernel is faster, another context over the
same weights takes over the keys and values, and the one before is freed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from devices.probe import available_memory
from devices.remembered import Remembered
from edge.errors import EdgeError, EngineError
from edge.llama.llama import Batch, Context, ContextSizes
from edge.microbenchmark import TimedTask, best_of, sample_s
from partition.architectures.table import has_flash
from partition.errors import CannotSlice
from partition.model.model import ModelShape
from partition.plan.plan import Range
from partition.predict.hysteresis import ATTENTION, clearly_better
from partition.state.sequence import KVBlock, LayerRows
from partition.state.shape import StateShape
from quant.text import age_text, bytes_text
from quant.types import CacheType, TensorType

LENGTHS = (256, 1024, 4096)  # tokens in the cache that are timed
_LEAST_CACHE = 16 << 20  # bytes: attention over a smaller cache is a small part of a token
_RANDOM = 4099  # numbers; a prime, so that rows differ
_ROOM = 4  # times the cache: two contexts, a state, and what is encoded of it


@dataclass(frozen=True)
class AttentionTimes:
    """Seconds of a token with flash attention and without, by tokens in the cache."""

    points: tuple[tuple[int, float, float], ...]  # (tokens, with, without)
    age_s: float = 0.0

    def is_flash_faster(self, tokens: int, current: bool) -> bool:
        """Return whether flash attention is to be used with so many tokens in the cache. The current kernel stays
        unless the other one is clearly faster."""
        lengths, with_s, without_s = zip(*self.points, strict=True)
        seconds = {True: np.interp(tokens, lengths, with_s), False: np.interp(tokens, lengths, without_s)}
        other_is_better = clearly_better(float(seconds[not current]), float(seconds[current]), by=ATTENTION)
        return current != other_is_better

    def describe(self) -> str:
        """Describe it for people, in one line."""
        parts = [
            f"{tokens:,} tokens {1e3 * with_s:.1f} ms with it and {1e3 * without_s:.1f} without"
            for tokens, with_s, without_s in self.points
        ]
        return f"a token after {', '.join(parts)}, measured {age_text(self.age_s)}"


class StoredStates(Protocol):
    """The part of `edge.llm.states.States` that a kernel needs."""

    kv: CacheType

    @property
    def shape(self) -> StateShape:
        """Shape of the keys and values of a token."""

    def read(self, sequence: int, positions: Range) -> KVBlock:
        """Keys and values at these positions."""

    def write_to(self, context: Context, block: KVBlock) -> None:
        """Add a block to sequence 0 of another context over the same weights."""


class AttentionKernel:
    """The kernel that an engine uses now, and why."""

    def __init__(
        self,
        states: StoredStates,
        context: Context,
        sizes: ContextSizes,
        shape: ModelShape,
        threads: Callable[[], int],
        key: Callable[[list[int]], str],
        *,
        why: str,
        window: int | None,
    ) -> None:
        """sizes: of the context. threads: that it uses. key: of what is remembered of this model, with what was timed.
        why: the kernel stays whatever the other takes; "": it may change. window: as `EngineOptions.attention_window`.
        """
        self._states, self._context, self._sizes, self._threads = states, context, sizes, threads
        self.window = window
        self.flash = sizes.flash_attention != "off" and has_flash(context.model.architecture)
        self.times: AttentionTimes | None = None  # None: the kernel stays
        self.why = why or _reason_to_stay(context, sizes, shape)
        if not self.why:
            try:
                self.times = measured(states, context, sizes, threads(), key)
            except (EdgeError, CannotSlice) as error:
                self.why = f"not measured: {error}"

    def before(self, tokens: int) -> None:
        """Use the faster kernel for a step whose last row is the `tokens`-th of its sequence."""
        if self.times is None:
            return
        flash = self.times.is_flash_faster(tokens, self.flash)
        if flash == self.flash or self._context.shift_pending or self._context.gives_hidden:
            return
        try:
            self._move_to(replace(self._sizes, flash_attention="on" if flash else "off"))
        except (EdgeError, CannotSlice) as error:  # nothing has changed
            self.times, self.why = None, f"it stays: {error}"
            return
        self.flash = flash

    def _move_to(self, sizes: ContextSizes) -> None:
        """Go on in a context of these sizes, with the keys and values of this one."""
        n_tokens = self._context.kv_ends(0)[1] + 1
        block = self._states.read(0, Range(0, n_tokens)) if n_tokens else None
        fresh = Context(self._context.model, sizes, threads=self._threads())
        try:
            if block is not None:
                self._states.write_to(fresh, block)
        except BaseException:
            fresh.close()
            raise
        self._context.replace_by(fresh)

    def describe(self) -> str:
        """Describe it for people, in one line."""
        kernel = "flash attention" if self.flash else "no flash attention"
        return f"{kernel} ({self.times.describe() if self.times else self.why})"

    def to_json(self) -> dict[str, Any]:
        """Plain values, as docs/cli/chat.md says."""
        points = self.times.points if self.times else ()
        return {
            "flash": self.flash,
            "why": self.times.describe() if self.times else self.why,
            "measured": [
                {"tokens": tokens, "flash_ms": 1e3 * with_s, "plain_ms": 1e3 * without_s}
                for tokens, with_s, without_s in points
            ],
        }


def measured(
    states: StoredStates, context: Context, sizes: ContextSizes, threads: int, key: Callable[[list[int]], str]
) -> AttentionTimes:
    """Return what tokens take with both kernels, as remembered or measured now. EngineError where this device is busy:
    differences of some per cent do not show then. StateError, CannotSlice."""
    lengths = [n for n in LENGTHS if n <= sizes.context]
    cache = Remembered("attention-kernels")
    name = key(lengths)
    remembered = cache.get(name)
    times = None if remembered is None else _read(*remembered, lengths)
    if times is not None:
        return times
    points = []
    small = replace(sizes, context=lengths[-1], batch=1, outputs=1)
    with ExitStack() as closing:
        contexts = []
        for flash in ("on", "off"):
            contexts.append(Context(context.model, replace(small, flash_attention=flash), threads=threads))
            closing.callback(contexts[-1].close)
        for tokens in lengths:
            block = random_block(states, tokens - 1)
            tasks = [_task(states, other, block, tokens) for other in contexts]
            flash_time, plain_time = best_of(tasks, sample_s(threads))
            if flash_time.busy or plain_time.busy:
                raise EngineError("this device is busy")
            points.append((tokens, flash_time.seconds, plain_time.seconds))
    cache.put(name, points)
    return AttentionTimes(tuple(points))


def _task(states: StoredStates, context: Context, block: KVBlock, tokens: int) -> TimedTask:
    """Fill a cache, and return the step that computes its last token again and again."""
    context.kv_clear()
    states.write_to(context, block)
    rows = Batch(1)
    rows.positions[0], rows.sequences[0], rows.outputs[0] = tokens - 1, 0, 1

    def step() -> None:
        context.kv_remove(0, tokens - 1, -1)
        context.decode(rows, 1)

    return TimedTask(step)


def random_block(states: StoredStates, tokens: int) -> KVBlock:
    """Return random keys and values of the first tokens: kernels take other times where scores are all alike. The cache
    must be of floats. CannotSlice where the shape is not known."""
    numbers = np.random.default_rng(0).standard_normal(_RANDOM, np.float32)

    def rows(kind: TensorType, n_bytes: int) -> NDArray[np.uint8]:
        if kind.name == "bf16":
            return np.resize((numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8), (tokens, n_bytes))
        return np.resize(numbers.astype(kind.name.replace("f", "float")).view(np.uint8), (tokens, n_bytes))

    keys, values = states.kv.keys, states.kv.values
    layers = (LayerRows(rows(keys, own.key_bytes), rows(values, own.value_bytes)) for own in states.shape.layers)
    return KVBlock(Range(0, tokens), tuple(layers))


def _reason_to_stay(context: Context, sizes: ContextSizes, shape: ModelShape) -> str:
    """Say why the kernel is not to be measured; "" where it is."""
    model = context.model
    n_bytes = shape.kv_bytes(sizes.context, sizes.kv.keys, sizes.kv.values)
    # Without flash attention there are scores of all rows, heads and cells, and their softmax.
    scores_bytes = 8 * sizes.batch * sizes.context * max(shape.n_heads, default=0)
    reasons = {
        f"llama.cpp has none for {model.architecture} models": not has_flash(model.architecture),
        "the default with attention windows or recurrent layers": bool(model.window) or model.is_recurrent,
        "the default for several sequences": sizes.sequences > 1,
        f"the default, as a cache of {bytes_text(n_bytes)} is small": n_bytes < _LEAST_CACHE
        or sizes.context < LENGTHS[0],
        "the default, as memory has no room for both": _ROOM * n_bytes + scores_bytes > available_memory(),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _read(value: Any, age_s: float, lengths: list[int]) -> AttentionTimes | None:
    """Read remembered times; None for anything else, such as another version's."""
    try:
        points = tuple((int(tokens), float(with_s), float(without_s)) for tokens, with_s, without_s in value)
    except (TypeError, ValueError):
        return None
    good = [tokens for tokens, *seconds in points] == lengths and all(min(seconds) > 0 for _, *seconds in points)
    return AttentionTimes(points, age_s) if good else None
