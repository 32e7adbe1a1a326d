"""Token budget of a step for chunked prefill: how many prompt tokens go beside answers, and whose.

Targets for inter-token latency (ITL) and time to first token (TTFT) size it where there are some. The gap between two
tokens of an answer is then modelled as

    gap = base + cost * prompt rows        (those that were submitted between the two)

base is the median of the last gaps without a prompt row, cost the upper quartile over the last ones with some. So a
burst of somebody else's work moves neither, and a lasting change moves both within a few steps.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from edge.llm.requests import Running

STEP_S = 0.25  # that a step with prompt tokens may take: a reader hardly sees a pause of that
MOST_STEP_S = 1.0  # and where many wait for each one that is answered
SHORT_STEP_S = 0.02  # a step of background requests: whoever comes meanwhile waits for it
FIRST_ROWS = 64
OLDEST_PART = 4  # of a step's rows for prompts, one in so many is for the oldest
_REMEMBERED = 8  # steps; the best of them counts, so that a burst of somebody else's work does not
AIM = 0.9  # part of a target that steps are sized for: gaps scatter
LONGEST_GAP_S = 1.0  # that is made for a first token, where gaps have no target
LEAST_ROWS, TILE_ROWS = 8, 16  # of prompts in a step; what kernels take at once, with which nothing measured begins
_REMEMBERED_GAPS = 8  # of each kind
_GROWTH = 3  # how many times the rows that were measured a next step may have; with 2, whole tiles might never grow


class Came(NamedTuple):
    """Tokens of one request that a step chose."""

    running: Running
    n_tokens: int
    is_plain: bool  # its row was the next token of an answer, with no draft behind it


class LatencyTargets:
    """Targets, the model of gaps that sizes steps by them, and how many were met. It outlives its schedulers."""

    def __init__(self, itl_s: float | None = None, ttft_s: float | None = None) -> None:
        """itl_s: gaps are to be no longer, and first tokens come as soon as that allows. ttft_s: first tokens are to
        come no later; without itl_s, gaps are as short as that allows. At least one of them."""
        self.itl_s, self.ttft_s = itl_s, ttft_s
        self.gaps = self.gaps_within = self.first_tokens = self.first_tokens_within = 0
        self._plain_s: deque[float] = deque(maxlen=_REMEMBERED_GAPS)
        self._mixed: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED_GAPS)  # (prompt rows, seconds)

    def rows(self, waits: Iterable[tuple[int, float]]) -> int:
        """Return how many prompt rows the next gap may have; `LEAST_ROWS` or more, as prompts must come to their end.
        waits: of prompts without a first token, tokens to compute and seconds that they waited."""
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


class StepBudget:
    """Follows how fast steps with prompts are computed here, rows of answers among theirs."""

    groups = 1  # that answers form, each for a step of its own

    def __init__(self, most_rows: int, clock: Callable[[], float], targets: LatencyTargets | None = None) -> None:
        """most_rows: of a step. clock: seconds. targets: size steps with prompts, in place of STEP_S."""
        self.clock, self._most_rows, self._targets = clock, most_rows, targets
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)  # rows a second
        self.rows = min(FIRST_ROWS, most_rows)  # that take STEP_S
        self._others_wait = False  # for the last step that was chosen
        self._is_short = False  # the last step that was chosen
        self._short_rates: deque[float] = deque(maxlen=_REMEMBERED)  # rows a second of short steps

    def prompt_rows(self, answers: int, waiting: float = 1.0) -> int:
        """Rows for prompts in a step that has so many answers. waiting: prompts that are being computed for each answer
        of the engine, in this step or another; above 1, the step may take as many times STEP_S, MOST_STEP_S at most. It
        has whole tiles, and so many that some rows are left for prompts."""
        times = min(MOST_STEP_S / STEP_S, max(1.0, waiting))
        fitting = int(times * self.rows) // TILE_ROWS
        # A few rows more may be faster: with TinyLlama's shape 16 took 161 ms where 15 took 206, and 14 187.
        return max(fitting, -(-(answers + LEAST_ROWS) // TILE_ROWS)) * TILE_ROWS - answers

    def choose(
        self,
        ready: Iterable[Running],
        in_flight: int,
        chunk: Callable[[int], int],
        others: Collection[Running] = (),
        *,
        is_short: bool = False,
    ) -> list[tuple[Running, int]]:
        """Choose the requests whose rows the next step has, and how many of each: the next token of a group of answers,
        and tokens of prompts beside them. in_flight: requests that wait for logits. chunk: as `TextEngine.chunk`.
        others: requests that wait for this step, but cannot be in it. is_short: the step may take SHORT_STEP_S."""
        answering: list[Running] = []
        prefilling: list[Running] = []
        for request in ready:
            (answering if request.pending == 1 else prefilling).append(request)
        self._others_wait, self._is_short = bool(others), is_short
        waiting = [other for other in others if other.pending > 1]
        in_all = len(answering) + in_flight + len(others) - len(waiting)
        group = answering[: -(-in_all // self.groups)]
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
            turns = sets * min(self.groups, in_all)
            most = self._within_targets(self._targets, len(group), turns, prefilling + waiting)
        if is_short:
            rows = int(max(self._short_rates, default=0.0) * SHORT_STEP_S) - len(group)
            most = min(most, max(LEAST_ROWS, rows // TILE_ROWS * TILE_ROWS))
        return chosen + parts(prefilling, min(self._most_rows - len(group), most))

    def _within_targets(self, targets: LatencyTargets, answers: int, turns: int, prefilling: Iterable[Running]) -> int:
        """Rows for prompts in a step that has so many answers, one of `turns`: whole tiles, where these fit."""
        now = self.clock()
        waits = [(prompt.pending, now - prompt.added_at) for prompt in prefilling if not prompt.answer]
        rows = max(LEAST_ROWS, targets.rows(waits) // turns)
        in_tiles = (answers + rows) // TILE_ROWS * TILE_ROWS - answers
        return in_tiles if in_tiles >= LEAST_ROWS else rows

    def chosen(self, came: Sequence[Came], prompt_rows: int) -> None:
        """Note the tokens that a step chose. prompt_rows: submitted so far, ever."""
        if self._targets is not None:
            self._targets.step(came, self.clock(), prompt_rows)

    def took(self, rows: int, prompt_rows: int, took_s: float) -> None:
        """Note what a step with so many rows took, and so many of these of prompts. One that has little of either says
        nothing of the other."""
        if self._is_short and took_s > 0:
            self._short_rates.append(rows / took_s)
        elif prompt_rows >= LEAST_ROWS and (prompt_rows < rows or self._others_wait) and took_s > 0:
            self._rates.append(rows / took_s)
            self.rows = int(max(self._rates) * STEP_S)


def parts(prefilling: Sequence[Running], room: int) -> list[tuple[Running, int]]:
    """Return how many of so many rows each of these prompts gets. Short ones come first, so that most answers begin
    soon; the oldest always has a part, so that it comes to its end."""
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
