"""An engine with stages that computes nothing: its answers follow from its tokens, and their times follow from the
given times of its stages and links.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from edge.errors import EngineError
from edge.llama.llama import Model
from edge.llm.interface import Outputs
from edge.llm.states import CacheUse

_TOKENS = range(300, 500)  # that it answers with; none ends a text


def _read(*_: Any) -> Any:
    raise EngineError("there are no keys and values")


class StagedModel:
    """The methods of `TextEngine` that one answer needs. It refuses rows that do not continue what it holds."""

    batch, outputs, sequences, threads, can_shift, paging, rollback = 64, 8, 1, 1, False, None, None
    listener, adapters = None, ()

    def __init__(
        self,
        model: Model,
        stages: int,
        context: int = 4096,
        pass_s: Callable[[int], float] = lambda rows: 1.0,
        parts: Sequence[float] = (),
        delay_s: float = 0.0,
    ) -> None:
        """model: a vocabulary. pass_s: of so many rows, over all stages. parts: of it, by stage; none: equal ones.
        delay_s: of each link."""
        self.model, self.stages, self.microbatches, self.context = model, stages, stages, context
        self.now_s = 0.0
        self.failed: Exception | None = None
        self.logits_cross = False
        self.attention_window: int | None = None
        self.lives: int | None = None  # results it still gives
        self.states = SimpleNamespace(
            block=64,
            most_read=16,
            keeps=False,
            snapshots=None,
            use=CacheUse(),
            read=_read,
            prefiller=None,
        )
        self.path = self.file = self.shape = None
        self.tokens: list[int] = []
        self._pass_s, self._delay_s = pass_s, delay_s
        self._parts = list(parts) or [1 / stages] * stages
        self._free = [0.0] * stages
        self._coming: deque[tuple[float, list[int]]] = deque()

    @property
    def uncollected(self) -> int:
        """Results that are under way."""
        return len(self._coming)

    @staticmethod
    def token_after(current: Sequence[int]) -> int:
        """That follows these."""
        return random.Random(f"{len(current)} {current[-6:]}").choice(_TOKENS)

    def submit(self, tokens: Any, positions: Any, sequences: Any, outputs: Any, **how: Any) -> None:
        """As `TextEngine.submit`."""
        if self.failed is not None:
            raise self.failed
        if self.stages == 1 and self._coming:
            raise EngineError("collect the logits of the last step first")
        assert list(positions) == list(range(len(self.tokens), len(self.tokens) + len(tokens)))
        assert not any(sequences)
        chosen = []
        for token in tokens:
            self.tokens.append(int(token))
            chosen.append(self.token_after(self.tokens))
        done = self.now_s = self.now_s + self._parts[0] * self._pass_s(len(chosen))
        for stage in range(1, self.stages):
            done = max(done + self._delay_s, self._free[stage]) + self._parts[stage] * self._pass_s(len(chosen))
            self._free[stage] = done
        saved = [token for token, output in zip(chosen, outputs, strict=True) if output]
        if saved:
            self._coming.append((done + self._delay_s * (self.stages > 1), saved))

    def collect(self) -> np.ndarray:
        """As `TextEngine.collect`."""
        if self.lives is not None:
            self.lives -= 1
            if self.lives < 0:
                self._coming.clear()
                self.failed = EngineError("a stage was lost")
        if self.failed is not None:
            raise self.failed
        at, chosen = self._coming.popleft()
        self.now_s = max(self.now_s, at)
        logits = np.zeros((len(chosen), self.model.n_vocab), np.float32)
        logits[range(len(chosen)), chosen] = 1.0
        return logits

    def decode(
        self, tokens: Sequence[int], start: int, *, sequence: int = 0, outputs: Outputs = "last", **how: Any
    ) -> np.ndarray:
        """As `TextEngine.decode`."""
        if self._coming:
            raise EngineError("collect the logits of submitted steps first")
        n = len(tokens)
        expected = np.full(n, outputs == "all")
        expected[-1] = outputs != "none"
        self.submit(tokens, np.arange(start, start + n), np.zeros(n), expected)
        if outputs == "none":
            return np.empty(0, np.float32)
        rows = self.collect()
        return rows if outputs == "all" else rows[0]

    def kv_remove(self, sequence: int, start: int, end: int = -1) -> bool:
        """As `TextEngine.kv_remove`, of what is at the end."""
        assert end == -1
        del self.tokens[start:]
        return True

    def kv_clear(self) -> None:
        """Hold nothing."""
        self.tokens.clear()

    def chunk(self, n: int) -> int:
        """All of a prompt."""
        return self.batch

    def stop(self) -> None:
        """Nothing computes."""

    resume = stop
