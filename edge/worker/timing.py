"""Times a loaded slice alone: how long steps of its layers take on this device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from edge.microbenchmark import BestTime, TimedTask, best_of, sample_s
from edge.parallel.shard import Shard

_MOST_PIECES = 1000


def time_shard(shard: Shard, rows: Sequence[int], pieces: int, depth: int = 0) -> list[BestTime]:
    """A step of so many rows, for each of `rows`, by the best of so many pieces or more. depth: above 0, then also of
    a row behind so many tokens."""
    most = shard.rows.capacity
    shard.rows.embeddings[:most] = 0
    shard.rows.outputs[:most] = 0

    def prepare(n: int, at: int = 0) -> None:
        # Rows of a batch that decodes are of different sequences; of a prompt they are of one.
        decode = n <= shard.sequences
        shard.rows.sequences[:n] = range(n) if decode else 0
        shard.rows.positions[:n] = at if decode else range(at, at + n)
        shard.rows.outputs[:n] = decode
        shard.rows.outputs[0] = 1

    def anew(n: int) -> None:
        shard.engine.kv_clear()
        shard.compute(n)

    def behind() -> None:
        shard.engine.kv_remove(0, depth)
        shard.compute(1)

    def timed(kinds: Sequence[TimedTask]) -> list[BestTime]:
        return best_of(kinds, sample_s(shard.engine.threads), samples=max(1, min(pieces, _MOST_PIECES)))

    sizes = [max(1, min(wanted, most)) for wanted in rows]
    found = timed([TimedTask(partial(anew, n), partial(prepare, n)) for n in sizes])
    if depth:  # on its own: filling the cache again for every piece would take longer than the pieces
        prepare(min(depth, most))
        anew(min(depth, most))
        prepare(1, depth)
        found += timed([TimedTask(behind)])
    return found
