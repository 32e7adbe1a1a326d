"""Times a loaded slice alone: how long a decode step and a prefill step of its layers take on this device."""

from __future__ import annotations

import time

from edge.shard import Shard

_LEAST_S = 0.8  # of measuring: many periods of a CPU quota, which lets single steps pass as if there were none
_MOST_S = 5.0
_MOST_STEPS = 1000


def time_shard(shard: Shard, rows: int, steps: int) -> tuple[float, float]:
    """(seconds of a decode step of one row, of a step of `rows` rows): means over `steps` and a fifth as many, or more
    where those are over too soon, fewer where they take too long. A warm-up comes first."""
    rows, steps = max(1, min(rows, shard.rows.capacity)), max(1, min(steps, _MOST_STEPS))
    shard.rows.embeddings[:rows] = 0
    shard.rows.sequences[:rows] = 0
    shard.rows.outputs[:rows] = 0
    shard.rows.outputs[0] = 1
    shard.rows.positions[:rows] = range(rows)

    def timed(n: int, least: int) -> float:
        step(n)
        began = time.perf_counter()
        done = 0
        while (took := time.perf_counter() - began) < _MOST_S and (done < least or took < _LEAST_S):
            step(n)
            done += 1
        return took / done

    def step(n: int) -> None:
        shard.engine.kv_clear()
        shard.compute(n)

    return timed(1, steps), timed(rows, max(1, steps // 5))
