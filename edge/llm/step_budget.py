"""Token budget of a step for chunked prefill: how many prompt tokens go beside answers, and whose."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from edge.llm.latency import LEAST_ROWS, TILE_ROWS, Came, LatencyTargets, Wait

STEP_S = 0.25  # that a step with prompt tokens may take: a reader hardly sees a pause of that
MOST_STEP_S = 1.0  # and where many wait for each one that is answered
FIRST_ROWS = 64
OLDEST_PART = 4  # of a step's rows for prompts, one in so many is for the oldest
_REMEMBERED = 8  # steps; the best of them counts, so that a burst of somebody else's work does not


class Prompt(Protocol):
    """A request whose next tokens can be submitted."""

    number: int  # the oldest has the least
    to_prefill: int  # tokens that had to be computed when it was admitted
    added_at: float  # by the clock of the budget

    @property
    def pending(self) -> int:
        """Tokens that were not submitted yet."""

    @property
    def answer(self) -> Sequence[int]:
        """Token ids so far."""


AnyPrompt = TypeVar("AnyPrompt", bound=Prompt)


class StepBudget:
    """Follows how fast steps with prompts are computed here, rows of answers among theirs."""

    def __init__(
        self,
        most_rows: int,
        clock: Callable[[], float],
        groups: int = 1,
        targets: LatencyTargets | None = None,
        turns: int = 1,
    ) -> None:
        """most_rows: of a step. clock: seconds. groups: that answers form, each for a step of its own. targets: size
        steps with prompts, in place of STEP_S. turns: steps that may lie between two tokens of an answer."""
        self.clock, self._most_rows, self.groups = clock, most_rows, groups
        self._targets, self._turns = targets, turns
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)  # rows a second
        self.rows = min(FIRST_ROWS, most_rows)  # that take STEP_S

    def prompt_rows(self, answers: int, waiting: float = 1.0) -> int:
        """Rows for prompts in a step that has so many answers. waiting: prompts that are being computed for each answer
        of the engine, in this step or another; above 1, the step may take as many times STEP_S, MOST_STEP_S at most. It
        has whole tiles, and so many that some rows are left for prompts."""
        times = min(MOST_STEP_S / STEP_S, max(1.0, waiting))
        fitting = int(times * self.rows) // TILE_ROWS
        # A few rows more may be faster: with TinyLlama's shape 16 took 161 ms where 15 took 206, and 14 187.
        return max(fitting, -(-(answers + LEAST_ROWS) // TILE_ROWS)) * TILE_ROWS - answers

    def choose(
        self, ready: Iterable[AnyPrompt], in_flight: int, chunk: Callable[[int], int]
    ) -> list[tuple[AnyPrompt, int]]:
        """Choose the requests whose rows the next step has, and how many of each: the next token of a group of answers,
        and tokens of prompts beside them. in_flight: requests that wait for logits. chunk: as `TextEngine.chunk`."""
        answering: list[AnyPrompt] = []
        prefilling: list[AnyPrompt] = []
        for request in ready:
            (answering if request.pending == 1 else prefilling).append(request)
        in_all = len(answering) + in_flight
        group = answering[: -(-in_all // self.groups)]
        chosen = [(request, 1) for request in group]
        if not prefilling:
            return chosen
        longest = max(request.to_prefill for request in prefilling)
        if not in_all:
            most = chunk(longest)
        elif self._targets is None:
            most = self.prompt_rows(len(group), len(prefilling) / in_all)
        else:
            most = self._within_targets(self._targets, len(group), in_all, prefilling)
        return chosen + parts(prefilling, min(self._most_rows - len(group), most))

    def _within_targets(
        self, targets: LatencyTargets, answers: int, in_all: int, prefilling: Iterable[AnyPrompt]
    ) -> int:
        """Rows for prompts in a step that has so many answers of all: whole tiles, where these fit."""
        now = self.clock()
        waits = [Wait(prompt.pending, now - prompt.added_at) for prompt in prefilling if not prompt.answer]
        rows = max(LEAST_ROWS, targets.rows(waits) // min(self._turns, in_all))
        in_tiles = (answers + rows) // TILE_ROWS * TILE_ROWS - answers
        return in_tiles if in_tiles >= LEAST_ROWS else rows

    def chosen(self, came: Sequence[Came], prompt_rows: int) -> None:
        """Note the tokens that a step chose. prompt_rows: submitted so far, ever."""
        if self._targets is not None:
            self._targets.step(came, self.clock(), prompt_rows)

    @contextmanager
    def timed(self, rows: int, prompt_rows: int) -> Iterator[None]:
        """Around a step with so many rows, and so many of these of prompts. One that has little of either says nothing
        of the other."""
        began = self.clock()
        yield
        self.took(rows, prompt_rows, self.clock() - began)

    def took(self, rows: int, prompt_rows: int, took_s: float) -> None:
        """Note what such a step took."""
        if LEAST_ROWS <= prompt_rows < rows and took_s > 0:
            self._rates.append(rows / took_s)
            self.rows = int(max(self._rates) * STEP_S)


def parts(prefilling: Sequence[AnyPrompt], room: int) -> list[tuple[AnyPrompt, int]]:
    """How many of so many rows each of these prompts gets. Short ones come first, so that most answers begin soon; the
    oldest always has a part, so that it comes to its end."""
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
