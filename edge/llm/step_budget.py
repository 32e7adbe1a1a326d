"""Token budget of a step for chunked prefill: the number of prompt tokens next to the decode rows, and their prompts.

Latency targets determine the budget if there are some: inter-token latency (ITL) and time to first token (TTFT). The
gap between two tokens of a response is then modelled as

    gap = base + cost * prompt rows        (rows submitted between the two tokens)

base is the median of recent gaps without prompt rows. cost is the upper quartile over recent gaps with prompt rows. So
a burst of other work moves neither, and a lasting change moves both within a few steps.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from edge.llm.requests import RequestState

STEP_S = 0.25  # target time of a step with prompt tokens; readers hardly notice such a pause
MOST_STEP_S = 1.0  # the same if many prompts wait for each running response
SHORT_STEP_S = 0.02  # target time of a step with background requests only; a new request waits for it
FIRST_ROWS = 64
OLDEST_PART = 4  # 1/4 of a step's prompt rows are for the oldest prompt
_REMEMBERED = 8  # number of recent steps; the fastest of them counts, so that a burst of other work does not matter
AIM = 0.9  # fraction of a target that steps are sized for, because gaps scatter
LONGEST_GAP_S = 1.0  # longest gap for the sake of a first token if gaps have no target
# Minimum prompt rows of a step; rows that kernels compute together, also the first size tried.
LEAST_ROWS, TILE_ROWS = 8, 16
_REMEMBERED_GAPS = 8  # number of recent gaps of each kind
_GROWTH = 3  # largest growth of prompt rows from step to step; with 2, whole tiles might never grow


class Came(NamedTuple):
    """Tokens of one request that were chosen in a step."""

    state: RequestState
    n_tokens: int
    is_plain: bool  # True if its row was a single decode row without drafts


class LatencyTargets:
    """Latency targets, the model of gaps that sizes steps, and counts of met targets. It outlives its schedulers."""

    def __init__(self, itl_s: float | None = None, ttft_s: float | None = None) -> None:
        """Set at least one target.

        itl_s: largest gap; first tokens come as early as that allows.
        ttft_s: largest time to first token; without itl_s, gaps are as short as that allows.
        """
        self.itl_s, self.ttft_s = itl_s, ttft_s
        self.gaps = self.gaps_within = self.first_tokens = self.first_tokens_within = 0
        self._plain_s: deque[float] = deque(maxlen=_REMEMBERED_GAPS)
        self._mixed: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED_GAPS)  # (prompt rows, seconds)

    def rows(self, waits: Iterable[tuple[int, float]]) -> int:
        """Return the prompt rows of the next gap, at least `LEAST_ROWS`, so that prompts complete.

        waits: (tokens to compute, seconds waited) of each prompt without a first token.
        """
        if not self._mixed:
            return TILE_ROWS
        base_s = statistics.median(self._plain_s) if self._plain_s else 0.0
        costs = sorted(max(0.0, gap_s - base_s) / rows for rows, gap_s in self._mixed)
        cost_s = max(costs[(3 * len(costs) - 1) // 4], 1e-9)
        most = (AIM * (self.itl_s or LONGEST_GAP_S) - base_s) / cost_s
        if self.itl_s is None:
            most = min(most, max(TILE_ROWS, self._for_first_tokens(waits, base_s, cost_s, most)))
        return int(max(LEAST_ROWS, min(most, _GROWTH * max(rows for rows, _ in self._mixed))))

    def _for_first_tokens(self, waits: Iterable[tuple[int, float]], base_s: float, cost_s: float, most: float) -> float:
        """Return the smallest number of rows per gap that makes all first tokens come in time, short prompts first.

        Return `most` if a first token cannot come in time.

        n tokens take n / rows gaps, which last n / rows * base + n * cost.
        """
        assert self.ttft_s is not None
        needed, n_tokens = 0.0, 0
        for pending, waited_s in sorted(waits):
            n_tokens += pending
            spare_s = AIM * self.ttft_s - waited_s - n_tokens * cost_s
            needed = max(needed, n_tokens * base_s / spare_s if spare_s > 0 else most)
        return needed

    def step(self, came: Sequence[Came], now: float, prompt_rows: int) -> None:
        """Record the tokens that a step chose, and learn from its longest gap.

        now: seconds, as `RequestState.added_at`.
        prompt_rows: total prompt rows submitted so far.
        """
        longest: tuple[float, int] | None = None
        for state, n_tokens, is_plain in came:
            if not n_tokens:
                continue
            if state.token_at is not None:
                gap_s = now - state.token_at
                self.gaps += n_tokens
                self.gaps_within += n_tokens - (self.itl_s is not None and gap_s > self.itl_s)
                if is_plain:
                    longest = max(longest or (0.0, 0), (gap_s, prompt_rows - state.prompt_rows_at))
            elif len(state.answer) == n_tokens:
                self.first_tokens += 1
                self.first_tokens_within += self.ttft_s is None or now - state.added_at <= self.ttft_s
            state.token_at, state.prompt_rows_at = now, prompt_rows
        if longest is not None:
            gap_s, rows = longest
            if not rows:
                self._plain_s.append(gap_s)
            elif rows >= LEAST_ROWS:  # fewer rows reveal little about the cost of one
                self._mixed.append((rows, gap_s))

    def to_json(self) -> dict[str, Any]:
        """Return the value of the key `latency` of ServedModel.status. Counts without a target are None."""
        itl, ttft = self.itl_s, self.ttft_s
        return {
            "target_itl_ms": None if itl is None else itl * 1000,
            "target_ttft_ms": None if ttft is None else ttft * 1000,
            "gaps": self.gaps,
            "gaps_within": None if itl is None else self.gaps_within,
            "first_tokens": self.first_tokens,
            "first_tokens_within": None if ttft is None else self.first_tokens_within,
        }


class StepBudget:
    """Learns the speed of steps with prompt and decode rows, and chooses the rows of steps."""

    microbatches = 1  # number of microbatches, each with its own step

    def __init__(self, most_rows: int, clock: Callable[[], float], targets: LatencyTargets | None = None) -> None:
        """most_rows: largest number of rows of a step.
        clock: returns seconds.
        targets: latency targets that replace STEP_S.
        """
        self.clock, self._most_rows, self._targets = clock, most_rows, targets
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)  # rows per second
        self.rows = min(FIRST_ROWS, most_rows)  # rows that take STEP_S
        self._others_wait = False  # True if other requests waited for the last step
        self._is_short = False  # True if the last step was short
        self._short_rates: deque[float] = deque(maxlen=_REMEMBERED)  # rows per second of short steps

    @property
    def rows_apart(self) -> int:
        """Number of prompt rows of a step without decode rows; 0 with latency targets, because such a step makes a gap
        longer.
        """
        return 0 if self._targets is not None else self.rows

    def prompt_rows(self, answers: int, waiting: float = 1.0) -> int:
        """Return the prompt rows of a step with `answers` decode rows. The step has whole tiles with some prompt rows.

        waiting: prompts being computed per running response; above 1, the step may take this multiple of STEP_S, at
            most MOST_STEP_S.
        """
        times = min(MOST_STEP_S / STEP_S, max(1.0, waiting))
        fitting = int(times * self.rows) // TILE_ROWS
        # A few more rows may be faster: with TinyLlama's shape, 16 rows took 161 ms, 15 rows 206 ms, and 14 rows 187
        # ms.
        return max(fitting, -(-(answers + LEAST_ROWS) // TILE_ROWS)) * TILE_ROWS - answers

    def choose(
        self,
        ready: Iterable[RequestState],
        in_flight: int,
        chunk: Callable[[int], int],
        others: Collection[RequestState] = (),
        *,
        is_short: bool = False,
    ) -> list[tuple[RequestState, int]]:
        """Choose the requests of the next step, with the number of rows of each: decode rows of a group, and prompt
        rows.

        in_flight: number of requests that wait for logits.
        chunk: as `TextEngine.chunk`.
        others: requests that wait for this step but cannot be part of it.
        is_short: the step should take at most SHORT_STEP_S.
        """
        answering: list[RequestState] = []
        prefilling: list[RequestState] = []
        for request in ready:
            (answering if request.pending == 1 else prefilling).append(request)
        self._others_wait, self._is_short = bool(others), is_short
        waiting = [other for other in others if other.pending > 1]
        in_all = len(answering) + in_flight + len(others) - len(waiting)
        group = answering[: -(-in_all // self.microbatches)]
        chosen = [(request, 1) for request in group]
        if not prefilling:
            return chosen
        longest = max(request.to_prefill for request in prefilling)
        if not in_all:
            most = chunk(longest)
        elif self._targets is None:
            most = self.prompt_rows(len(group), len(prefilling + waiting) / in_all)
        else:
            sets = 1 + len({other.adapters for other in waiting})  # each has a step between two tokens of an answer
            turns = sets * min(self.microbatches, in_all)
            most = self._within_targets(self._targets, len(group), turns, prefilling + waiting)
        if is_short:
            rows = int(max(self._short_rates, default=0.0) * SHORT_STEP_S) - len(group)
            most = min(most, max(LEAST_ROWS, rows // TILE_ROWS * TILE_ROWS))
        return chosen + parts(prefilling, min(self._most_rows - len(group), most))

    def _within_targets(
        self, targets: LatencyTargets, answers: int, turns: int, prefilling: Iterable[RequestState]
    ) -> int:
        """Return the prompt rows of a step with `answers` decode rows, one of `turns` steps in a gap. Whole tiles
        if they fit.
        """
        now = self.clock()
        waits = [(prompt.pending, now - prompt.added_at) for prompt in prefilling if not prompt.answer]
        rows = max(LEAST_ROWS, targets.rows(waits) // turns)
        in_tiles = (answers + rows) // TILE_ROWS * TILE_ROWS - answers
        return in_tiles if in_tiles >= LEAST_ROWS else rows

    def chosen(self, came: Sequence[Came], prompt_rows: int) -> None:
        """Record the tokens that a step chose. prompt_rows: total prompt rows submitted so far."""
        if self._targets is not None:
            self._targets.step(came, self.clock(), prompt_rows)

    def took(self, rows: int, prompt_rows: int, took_s: float) -> None:
        """Record the time of a step. Steps with few prompt rows, or without decode rows, are ignored.

        rows: rows of the step.
        prompt_rows: prompt rows among them.
        took_s: seconds.
        """
        if self._is_short and took_s > 0:
            self._short_rates.append(rows / took_s)
        elif prompt_rows >= LEAST_ROWS and (prompt_rows < rows or self._others_wait) and took_s > 0:
            self._rates.append(rows / took_s)
            self.rows = int(max(self._rates) * STEP_S)


def parts(prefilling: Sequence[RequestState], room: int) -> list[tuple[RequestState, int]]:
    """Divide `room` rows among prompts. Short prompts come first, so that most responses begin soon. The oldest
    prompt always gets a part, so that it completes.
    """
    if not prefilling:
        return []
    oldest = min(prefilling, key=lambda prompt: prompt.number)
    reserved = min(oldest.pending, -(-room // OLDEST_PART))
    room -= reserved
    shares = []
    for prompt in sorted(prefilling, key=lambda prompt: (prompt.pending, prompt.number)):
        kept_back = reserved if prompt is oldest else 0
        n_rows = min(prompt.pending, room + kept_back)
        if n_rows:
            shares.append((prompt, n_rows))
        room -= max(0, n_rows - kept_back)
    return shares
