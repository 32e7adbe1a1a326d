"""Time steps of a loaded slice alone.

A whole model reads all its weights for each token, so its weights have left the caches before they are read again.
Weights of a small slice alone would stay in the caches. So before each step, the timing reads memory as large as the
rest of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from devices.machine_cores import cache_bytes
from devices.probe import MEMORY_SHARE, available_memory
from edge.microbenchmark import MOST_S, BestTime, TimedTask, best_of, is_throttled, sample_s
from edge.parallel.shard import Shard

_MOST_SAMPLES = 1000
_CACHES = 2  # multiple of the largest cache; reading that much replaces its contents
_MOST_OTHER_BYTES = 256 << 20


def time_shard(
    shard: Shard,
    rows: Sequence[int],
    samples: int,
    depth: int = 0,
    clock: Callable[[], float] | None = None,
    other_bytes: int = 0,
    most_s: float = MOST_S,
) -> list[BestTime]:
    """Time a step of n rows for each n in `rows`, and return the fastest of at least `samples` samples.

    depth: if above 0, also time the first of `rows` after `depth` tokens.
    clock: clock to use instead of the default of `best_of`.
    other_bytes: weights that the whole model reads between two uses of the slice's weights.
    most_s: maximum seconds for the samples of each n.
    """
    most = shard.rows.capacity
    # CPU quota pauses would hit these reads instead of the steps.
    read_others = None if is_throttled(shard.engine.threads) else memory_reader(bytes_to_read(other_bytes))
    shard.rows.embeddings[:most] = 0
    shard.rows.outputs[:most] = 0
    shard.engine.use_top(1)  # a browser's page would send the logits of the whole vocabulary

    def place_rows(n: int, at: int = 0) -> None:
        # Rows of a decode batch belong to different sequences; rows of a prompt to one.
        decode = n <= shard.engine.sequences
        shard.rows.sequences[:n] = range(n) if decode else 0
        shard.rows.positions[:n] = at if decode else range(at, at + n)
        shard.rows.outputs[:n] = decode
        shard.rows.outputs[0] = 1

    def from_empty(n: int) -> TimedTask:
        def prepare() -> None:
            place_rows(n)
            shard.engine.kv_clear()

        return task(n, prepare, shard.engine.kv_clear)

    def task(n: int, prepare: Callable[[], object], empty: Callable[[], object]) -> TimedTask:
        def before_step() -> None:
            empty()
            if read_others is not None:
                read_others()

        return TimedTask(partial(shard.compute, n), prepare, before_step)

    def timed(tasks: Sequence[TimedTask]) -> list[BestTime]:
        n = max(1, min(samples, _MOST_SAMPLES))
        threads = shard.engine.threads
        # A clock of the engine's own does not count the time that other work takes.
        shares = threads if clock is None else math.inf
        return best_of(tasks, sample_s(threads), samples=n, clock=clock, most_s=most_s, threads=shares)

    sizes = [max(1, min(n_rows, most)) for n_rows in rows]
    times = timed([from_empty(n) for n in sizes])
    if depth:  # timed separately: refilling the cache for every sample would take longer than the samples
        first = from_empty(min(depth, most))
        first.prepare()
        first.step()
        place_rows(sizes[0], depth)
        remove = partial(shard.engine.kv_remove, 0, depth)
        times += timed([task(sizes[0], remove, remove)])
    return times


def bytes_to_read(other_bytes: int) -> int:
    """Return the bytes to read for `other_bytes` of weights, limited to what replaces the contents of all caches."""
    return min(other_bytes, _CACHES * cache_bytes(), _MOST_OTHER_BYTES, available_memory() // MEMORY_SHARE)


def memory_reader(n_bytes: int) -> Callable[[], None] | None:
    """Return a function that reads `n_bytes` of its own memory, or None for 0 bytes."""
    if n_bytes <= 0:
        return None
    memory = np.ones(n_bytes // 8 + 1)  # written, because all unwritten pages share one physical page

    def read() -> None:
        memory.sum()

    return read
