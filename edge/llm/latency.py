"""Latency targets: the size of prefill steps by targets for inter-token latency (ITL) and time to first token (TTFT).

The gap between two tokens of an answer is modelled as

    gap = base + cost * prompt rows        (those that were submitted between the two)

base is the median of the last gaps without a prompt row, cost the upper quartile over the last ones with some. So a
burst of somebody else's work moves neither, and a lasting change moves both within a few steps.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from edge.llm.requests import Running

AIM = 0.9  # part of a target that steps are sized for: gaps scatter
LONGEST_GAP_S = 1.0  # that is made for a first token, where gaps have no target
LEAST_ROWS, TILE_ROWS = 8, 16  # of prompts in a step; what kernels take at once, with which nothing measured begins
_REMEMBERED = 8  # gaps of each kind
_GROWTH = 3  # how many times the rows that were measured a next step may have; with 2, whole tiles might never grow


class Came(NamedTuple):
    """Tokens of one request that a step chose."""

    running: Running
    n_tokens: int
    is_plain: bool  # its row was the next token of an answer, with no draft behind it


class Wait(NamedTuple):
    """A prompt whose first token somebody waits for."""

    pending: int  # tokens to compute
    waited_s: float


class LatencyTargets:
    """Targets, the model of gaps that sizes steps by them, and how many were met. It outlives its schedulers."""

    def __init__(self, itl_s: float | None = None, ttft_s: float | None = None) -> None:
        """itl_s: gaps are to be no longer, and first tokens come as soon as that allows. ttft_s: first tokens are to
        come no later; without itl_s, gaps are as short as that allows. At least one of them."""
        self.itl_s, self.ttft_s = itl_s, ttft_s
        self.gaps = self.gaps_within = self.first_tokens = self.first_tokens_within = 0
        self._plain_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._mixed: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)  # (prompt rows, seconds)

    def rows(self, waits: Iterable[Wait]) -> int:
        """Return how many prompt rows the next gap may have; `LEAST_ROWS` or more, as prompts must come to their end.
        waits: prompts without a first token."""
        if not self._mixed:
            return TILE_ROWS
        base_s = statistics.median(self._plain_s) if self._plain_s else 0.0
        costs = sorted(max(0.0, gap_s - base_s) / rows for rows, gap_s in self._mixed)
        cost_s = max(costs[(3 * len(costs) - 1) // 4], 1e-9)
        most = (AIM * (self.itl_s or LONGEST_GAP_S) - base_s) / cost_s
        if self.itl_s is None:
            most = min(most, max(TILE_ROWS, self._for_first_tokens(waits, base_s, cost_s, most)))
        return int(max(LEAST_ROWS, min(most, _GROWTH * max(rows for rows, _ in self._mixed))))

    def _for_first_tokens(self, waits: Iterable[Wait], base_s: float, cost_s: float, most: float) -> float:
        """Rows of a gap by which all these first tokens come in time, short prompts first; `most` where one cannot.
        n tokens take n / rows gaps, which last n / rows * base + n * cost."""
        assert self.ttft_s is not None
        needed, n_tokens = 0.0, 0
        for pending, waited_s in sorted(waits):
            n_tokens += pending
            spare_s = AIM * self.ttft_s - waited_s - n_tokens * cost_s
            needed = max(needed, n_tokens * base_s / spare_s if spare_s > 0 else most)
        return needed

    def step(self, came: Sequence[Came], now: float, prompt_rows: int) -> None:
        """Note the tokens that a step chose. now: seconds, as `Running.added_at`. prompt_rows: submitted so far, ever.
        The longest gap of a step is learned from."""
        longest: tuple[float, int] | None = None
        for running, n_tokens, is_plain in came:
            if not n_tokens:
                continue
            if running.token_at is not None:
                gap_s = now - running.token_at
                self.gaps += n_tokens
                self.gaps_within += n_tokens - (self.itl_s is not None and gap_s > self.itl_s)
                if is_plain:
                    longest = max(longest or (0.0, 0), (gap_s, prompt_rows - running.prompt_rows_at))
            elif len(running.answer) == n_tokens:
                self.first_tokens += 1
                self.first_tokens_within += self.ttft_s is None or now - running.added_at <= self.ttft_s
            running.token_at, running.prompt_rows_at = now, prompt_rows
        if longest is not None:
            gap_s, rows = longest
            if not rows:
                self._plain_s.append(gap_s)
            elif rows >= LEAST_ROWS:  # fewer say little of what one costs
                self._mixed.append((rows, gap_s))

    def to_json(self) -> dict[str, Any]:
        """Return the key `latency` of ServedModel.status: what has no target has no count of what was within it."""
        itl, ttft = self.itl_s, self.ttft_s
        return {
            "target_itl_ms": None if itl is None else itl * 1000,
            "target_ttft_ms": None if ttft is None else ttft * 1000,
            "gaps": self.gaps,
            "gaps_within": None if itl is None else self.gaps_within,
            "first_tokens": self.first_tokens,
            "first_tokens_within": None if ttft is None else self.first_tokens_within,
        }
