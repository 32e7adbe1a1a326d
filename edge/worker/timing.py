"""Timing of a loaded slice alone: seconds of steps of its layers on this device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from edge.microbenchmark import BestTime, TimedTask, best_of, sample_s
from edge.parallel.shard import Shard

_MOST_SAMPLES = 1000


def time_shard(
    shard: Shard, rows: Sequence[int], samples: int, depth: int = 0, clock: Callable[[], float] | None = None
) -> list[BestTime]:
    """Time a step of so many rows, for each of `rows`, by the fastest of at least `samples` samples. depth: if above 0,
    also time the first of `rows` after so many tokens. clock: by default that of `best_of`."""
    most = shard.rows.capacity
    shard.rows.embeddings[:most] = 0
    shard.rows.outputs[:most] = 0

    def prepare(n: int, at: int = 0) -> None:
        # Rows of a batch that decodes are of different sequences; of a prompt they are of one.
        decode = n <= shard.engine.sequences
        shard.rows.sequences[:n] = range(n) if decode else 0
        shard.rows.positions[:n] = at if decode else range(at, at + n)
        shard.rows.outputs[:n] = decode
        shard.rows.outputs[0] = 1

    def from_empty(n: int) -> None:
        shard.engine.kv_clear()
        shard.compute(n)

    def after_depth() -> None:
        shard.engine.kv_remove(0, depth)
        shard.compute(sizes[0])

    def timed(tasks: Sequence[TimedTask]) -> list[BestTime]:
        n = max(1, min(samples, _MOST_SAMPLES))
        return best_of(tasks, sample_s(shard.engine.threads), samples=n, clock=clock)

    sizes = [max(1, min(n_rows, most)) for n_rows in rows]
    times = timed([TimedTask(partial(from_empty, n), partial(prepare, n)) for n in sizes])
    if depth:  # timed apart: filling the cache again for every sample would take longer than the samples
        prepare(min(depth, most))
        from_empty(min(depth, most))
        prepare(sizes[0], depth)
        times += timed([TimedTask(after_depth)])
    return times
