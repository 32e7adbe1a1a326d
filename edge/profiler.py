"""Times a loaded slice alone: how long steps of its layers take on this device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from edge.shard import Shard

_LEAST_S = 0.25  # of measuring: many periods of a CPU quota, which lets single steps pass as if there were none
_MOST_S = 5.0
_MOST_STEPS = 1000


def time_shard(shard: Shard, rows: Sequence[int], steps: int, depth: int = 0) -> list[float]:
    """Seconds of a step of so many rows, for each of `rows`: means over `steps`, or more where those are over too soon,
    fewer where they take too long. A warm-up comes first. depth: above 0, then also of a row behind so many tokens."""
    most = shard.rows.capacity
    shard.rows.embeddings[:most] = 0
    shard.rows.outputs[:most] = 0
    shard.rows.outputs[0] = 1

    def prepare(n: int, at: int = 0) -> None:
        # Rows of a batch that decodes are of different sequences; of a prompt they are of one.
        decode = n <= shard.sequences
        shard.rows.sequences[:n] = range(n) if decode else 0
        shard.rows.positions[:n] = at if decode else range(at, at + n)
        shard.rows.outputs[:n] = decode
        shard.rows.outputs[0] = 1

    def timed(n: int, step: Callable[[int], None]) -> float:
        step(n)
        began = time.perf_counter()
        done = 0
        while (took := time.perf_counter() - began) < _MOST_S and (done < steps or took < _LEAST_S):
            step(n)
            done += 1
        return took / done

    def anew(n: int) -> None:
        shard.engine.kv_clear()
        shard.compute(n)

    def behind(n: int) -> None:
        shard.engine.kv_remove(0, depth)
        shard.compute(n)

    steps = max(1, min(steps, _MOST_STEPS))
    found = []
    for wanted in rows:
        n = max(1, min(wanted, most))
        prepare(n)
        found.append(timed(n, anew))
    if depth:
        prepare(min(depth, most))
        anew(min(depth, most))
        prepare(1, depth)
        found.append(timed(1, behind))
    return found
