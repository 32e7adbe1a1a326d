"""One side of bench_elastic.py: a process with one model that changes its quantization and measures on command.

    python benchmarks/elastic_side.py SIDE SIDES    (started by bench_elastic.py, for `follow` in a memory group)

Methods are commands; they take and return JSON.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.processes import serve
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.weights.elastic import load as loading
from edge.weights.elastic.load import load_elastic
from edge.weights.elastic.room import Room
from edge.weights.elastic.weights import ElasticWeights

SHARE = 128  # of a budget, that is for what grows with it: as `edge.weights.budget` has it
_STEADY_S = 60.0  # after which memory that became free is taken


class Side:
    """An engine, and memory that is said to be free."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._free, self._now_s = 0, 0.0

    def load(self, model: str, options: dict[str, Any], *, says: bool = False) -> dict[str, Any]:
        """Load a model. says: free is what `give` says, not what the machine has. Return the seconds, and bytes of the
        process with each size whole."""
        self.close()
        self._free = options["memory"]
        room = Room(lambda: 0, lambda: self._free, lambda: 0.0, lambda: self._now_s)
        loading.load_elastic = partial(load_elastic, room=room) if says else load_elastic  # type: ignore[assignment]
        began = time.perf_counter()
        self._engine = Engine(model, EngineOptions(**options))
        took = time.perf_counter() - began
        if not isinstance(self._engine.paging, ElasticWeights):
            return {"load_s": took}
        return {"load_s": took, "whole": self._whole(), "room": self._room()}

    def prompt(self, n: int) -> None:
        """Compute a prompt of so many tokens."""
        engine = self._loaded
        tokens = np.random.default_rng(0).integers(5, 1000, n).tolist()
        for start in range(0, n, engine.batch):
            engine.decode(tokens[start : start + engine.batch], start)

    def give(self, free: int, position: int) -> dict[str, float]:
        """Let so much memory be free, for long enough; return the seconds until there is a token at a position, the
        most between two tokens, and until there is one that what is due has computed."""
        weights = self._loaded.paging
        assert isinstance(weights, ElasticWeights)
        self._free = free
        ends = [time.perf_counter()]
        for _ in range(2):
            self._now_s += _STEADY_S
            weights.look()
        while len(ends) == 1 or weights.due:
            self.decode(position, 1)
            ends.append(time.perf_counter())
        gaps = [end - begin for begin, end in pairwise(ends)]
        return {"next_s": gaps[0], "longest_s": max(gaps), "changed_s": ends[-1] - ends[0]}

    def decode(self, position: int, n: int) -> list[float]:
        """Decode so many tokens from a position on; return the seconds of each."""
        took = []
        for i in range(n):
            began = time.perf_counter()
            self._loaded.decode([5 + i], position + i)
            took.append(time.perf_counter() - began)
        self._loaded.kv_remove(0, position)
        return took

    def reload(self, model: str, options: dict[str, Any], history: int) -> float:
        """Close what is loaded, load another model and compute the history and a token; return the seconds."""
        began = time.perf_counter()
        self.load(model, options)
        self.prompt(history)
        self.decode(history, 1)
        return time.perf_counter() - began

    def run(self, position: int, seconds: float) -> list[dict[str, float]]:
        """Decode for so long; return when each token came, what it took, and in which size."""
        weights, tokens = self._loaded.paging, []
        assert isinstance(weights, ElasticWeights)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            [took] = self.decode(position, 1)
            tokens.append({"at": time.monotonic(), "took_s": took, "size": weights.choice.number})
        return tokens

    def close(self) -> None:
        """Free the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    @property
    def _loaded(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def _whole(self) -> list[int]:
        """Return the bytes of the process with each size whole, the largest first."""
        weights = self._loaded.paging
        assert isinstance(weights, ElasticWeights)
        budget, whole = self._loaded.memory.budget or 0, {}
        for at in np.linspace(budget, weights.sizes.least, 200).astype(int).tolist():
            choice = weights.sizes.choose(at, "speed")
            if not choice.plan.pages:
                whole[choice.number] = (choice.n_bytes - at // SHARE) * SHARE // (SHARE - 1) + 1
        return [whole[number] for number in sorted(whole)]

    def _room(self) -> int:
        weights = self._loaded.paging
        assert isinstance(weights, ElasticWeights)
        return Room().for_process(weights.planned_bytes)


if __name__ == "__main__":
    serve(Side())
