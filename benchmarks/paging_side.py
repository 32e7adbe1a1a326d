"""One side of bench_paging.py: a process with one model, paged or not, that measures on command.

    python benchmarks/paging_side.py SIDE SIDES    (started by bench_paging.py, mostly in a memory group)

Methods are commands; they take and return JSON.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import serve
from devices.probe import peak_rss
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions

SEED = 0
# What an engine says of its paging, by what it was doing.
FIGURES = ("bytes_per_token", "disk_gbps", "stall_ms", "hidden_ms", "hit_rate")


class Side:
    """An engine, and what is measured of it."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._runs = 0

    def load(self, model: str, options: dict[str, Any]) -> dict[str, Any]:
        """Load a model: how long that took, and what the engine says of its memory and its paging."""
        began = time.perf_counter()
        engine = self._engine = Engine(model, EngineOptions(**options))
        took = time.perf_counter() - began
        return {
            "load_s": took,
            "context": engine.context,
            "batch": engine.batch,
            "threads": engine.threads,
            "memory": {"total_bytes": engine.memory.total, "parts": engine.memory.parts},
            "paging": paging(engine),
        }

    def close(self) -> None:
        """Free the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def run(self, prompt: int, warm: int, steps: int, repeats: float = 0.0) -> dict[str, float]:
        """A prompt of so many tokens, `warm` steps that are not counted, and steps of one token that are.

        Tokens are random, others in each run: what a model with random weights goes on with would soon repeat itself,
        and its experts, too. repeats: of the tokens, how many are one of the last 24.
        """
        engine = self._loaded
        self._runs += 1
        tokens = self._tokens(prompt + warm + steps, self._runs - 1, repeats)
        engine.kv_clear()
        prefill_s = self._prefill(tokens[:prompt])
        for i in range(prompt, prompt + warm):
            engine.decode(tokens[i : i + 1], i, top=1)
        clear(engine)
        took, read = [], bytes_read()
        for i in range(prompt + warm, len(tokens)):
            began = time.perf_counter()
            engine.decode(tokens[i : i + 1], i, top=1)
            took.append(time.perf_counter() - began)
        return {
            "prefill_s": prefill_s,
            "decode_s": statistics.median(took),
            "mean_s": statistics.mean(took),
            "kernel_bytes_per_token": (bytes_read() - read) / steps,
            **figures(engine, "decode"),
            "peak_rss_bytes": peak_rss(),
        }

    def prefill(self, prompt: int) -> dict[str, float]:
        """A prompt of so many tokens."""
        engine = self._loaded
        engine.kv_clear()
        clear(engine)
        seconds = self._prefill(self._tokens(prompt))
        return {"prefill_s": seconds, **figures(engine, "prefill"), "peak_rss_bytes": peak_rss()}

    @property
    def _loaded(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def _tokens(self, n: int, run: int = 0, repeats: float = 0.0) -> Any:
        rng = np.random.default_rng(SEED + run)
        tokens = rng.integers(0, self._loaded.model.n_vocab, n, np.int32)
        for i in range(1, n):
            if rng.random() < repeats:
                tokens[i] = tokens[i - 1 - rng.integers(0, min(i, 24))]
        return tokens

    def _prefill(self, tokens: Any) -> float:
        engine, n = self._loaded, len(tokens)
        began = time.perf_counter()
        for start in range(0, n, engine.batch):
            stop = min(n, start + engine.batch)
            engine.decode(tokens[start:stop], start, outputs="last" if stop == n else "none")
        return time.perf_counter() - began


def bytes_read() -> int:
    """Return the bytes that the kernel read from disks for this process, page faults and readahead included; 0 where
    the kernel does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)


# --- what the engine says of its paging ---


def paging(engine: Engine) -> dict[str, Any] | None:
    """Describe what is paged, and how; None where everything is in memory."""
    pager = engine.paging
    if pager is None:
        return None
    plan, reader = pager.plan, pager.reader
    return {
        "streamed_bytes": plan.streamed_bytes,
        "window_bytes": plan.window,
        "expert_bytes": plan.expert_room,
        "io_threads": reader.threads,
        "io_chunk_bytes": reader.chunk,
    }


def clear(engine: Engine) -> None:
    """Count from here on."""
    pager = engine.paging
    if pager is not None:
        pager.clear_stats()


def figures(engine: Engine, doing: str) -> dict[str, float]:
    """FIGURES since they were cleared, those that the engine has. doing: "decode" or "prefill"."""
    pager = engine.paging
    if pager is None:
        return {}
    stats = getattr(pager.stats(), doing).to_json()
    return {name: float(stats[name]) for name in FIGURES if stats[name] is not None}


if __name__ == "__main__":
    serve(Side())
