"""Speculative decoding: draft tokens for a few requests at a time if that pays, and learn from the results."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.llm.interface import Answer, TextEngine, VerifyResult
from edge.llm.slot import Slot
from edge.speculate.choice import SIZES, RowChoice
from edge.speculate.windows import Shape, WindowChoice
from partition.predict.drafts import MODEL_ACCEPTANCE

if TYPE_CHECKING:
    from edge.cluster.draft_worker import DraftDevice  # imports gRPC

# maximum number of requests with drafts; with more requests, their own rows share the pass, and drafts gain little
FEW = 4
PROFILE_S = 2.0  # time limit for all passes that are measured before the first answer
_PROFILE_PROMPT = 12  # number of tokens, the same as a trial prefills
_PROFILE_ROUNDS = (1, *SIZES), SIZES  # the faster of two passes counts, each close to a warm pass of one row
_LEAST_PLAIN = 3  # minimum number of one-row passes for a mean


class Drafts:
    """Source of drafts. Drafts affect the speed of an answer, but never its text."""

    free: bool  # True: drafting takes almost no time
    acceptance: float = MODEL_ACCEPTANCE  # expected acceptance rate before any draft was verified

    def attach(self, request: Answer) -> None:
        """Set the request, before `begin`."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new text with a prompt."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""

    @property
    def behind_s(self) -> float:
        """Estimated seconds of `catch_up` for a trial."""
        return 0.0

    def catch_up(self, pays: Callable[[float], bool]) -> float:
        """Prefill the text for the next draft, and more of it if the seconds pay. Return the seconds that this took."""
        return 0.0

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        """Return at most `n` tokens that may follow the text and `assumed`; fewer, or none, without a draft."""
        raise NotImplementedError


@dataclass
class _Passes:
    """Measured passes with a given number of requests."""

    tokens: float = 0.0  # generated tokens per request
    seconds: float = 0.0  # duration of the passes, including drafting
    plain: int = 0  # number of one-row passes
    plain_s: float = 0.0  # duration of the one-row passes
    usual_plain_s: float = 0.0  # duration of one such pass, including earlier answers; 0: unknown

    @property
    def of_plain_s(self) -> float:
        """Seconds for the same tokens in one-row passes, or 0 if unknown."""
        return self.tokens * (self.plain_s / self.plain if self.plain >= _LEAST_PLAIN else self.usual_plain_s)


@dataclass
class SpeculationStats:
    """Statistics of drafts, without the prompt and its first token."""

    drafted: int = 0  # number of drafted tokens that were verified
    accepted: int = 0  # number of drafted tokens that were accepted
    passes: int = 0  # number of passes of one or more rows per request
    rows: int = 0  # number of rows in all passes
    # by number of requests in a pass
    _measured: dict[int, _Passes] = field(default_factory=lambda: defaultdict(_Passes))

    @property
    def gain(self) -> float | None:
        """Speed-up over one-row passes, or None without a comparison."""
        known = [passes for passes in self._measured.values() if passes.of_plain_s]
        return (
            sum(counted.of_plain_s for counted in known) / sum(counted.seconds for counted in known) if known else None
        )

    def count(self, results: Sequence[VerifyResult]) -> None:
        """Add a pass and the windows that it cancelled."""
        cancelled = [rows for result in results for rows in result.cancelled]
        first, rows = sum(result.is_first for result in results), sum(result.rows for result in results)
        self.drafted += rows - first + sum(cancelled)
        self.accepted += sum(result.used for result in results) - first
        self.passes += 1 + len(cancelled)
        self.rows += rows + sum(cancelled)

    def time(self, results: Sequence[VerifyResult], seconds: float, is_plain: bool, usual_plain_s: float) -> None:
        """Add the duration of a pass. is_plain: the pass had one row per request and no other work."""
        passes = self._measured[len(results)]
        passes.tokens += sum(result.used for result in results) / len(results)
        passes.seconds += seconds
        passes.plain += is_plain
        passes.plain_s += seconds if is_plain else 0.0
        passes.usual_plain_s = usual_plain_s or passes.usual_plain_s  # it may be unknown now, while it is measured anew

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that docs/cli/chat.md and docs/serve.md describe."""
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "passes": self.passes,
            "rows_per_pass": self.rows / self.passes if self.passes else None,
            "gain": self.gain,
        }

    def __str__(self) -> str:
        if not self.drafted:
            return "no token was drafted: drafting did not pay, or there was no draft"
        gain = "" if self.gain is None else f", {self.gain:.2f} times as fast as one at a time"
        return (
            f"{self.accepted} of {self.drafted} drafted tokens accepted, {self.passes} passes of"
            f" {self.rows / self.passes:.1f} rows{gain}"
        )


@dataclass
class _RandomText:
    """Request with random text and a different end each time, so that no earlier drafts exist for it."""

    prompt: list[int]
    tokens: list[int]
    answer: Sequence[int] = ()
    sequence: int = 0


class Speculation:
    """Implementation of `Drafter`. It keeps learned values across answers.

    Each request has its own drafts. Passes with the same number of requests share one choice of rows.
    """

    def __init__(
        self,
        drafts: Callable[[], Drafts],
        name: str,
        few: int = FEW,
        *,
        device: DraftDevice | None = None,
        choice: Callable[[], WindowChoice] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create the drafter.

        drafts: creates the drafts of a request.
        name: name of the drafts for display.
        few: maximum number of concurrent requests with drafts.
        device: worker that drafts; None: this device.
        choice: creates a choice of rows and windows; None: the default for these drafts.
        clock: clock in seconds.
        """
        self.name, self.device, self.stats = name, device, SpeculationStats()
        self._make, self._few, self._clock = drafts, few, clock
        # by request: its drafts, and how many tokens of its answer they know
        self._drafts: dict[Answer, tuple[Drafts, int]] = {}
        self._choices: dict[int, WindowChoice] = defaultdict(choice or self._new_choice)  # by number of requests
        self._choice: WindowChoice | None = None  # choice for the pass that is measured
        self._began = 0.0  # start of drafting, or end of the previous window if later windows are in flight
        self._caught_up_s = 0.0  # part of that time that was spent on prefill
        self._goes_on = False  # later windows are in flight
        self._was_plain = False  # the last measured pass had one row per request

    def begin(self) -> None:
        """Reset the statistics."""
        self.stats = SpeculationStats()

    def profile(self, engine: TextEngine, limit_s: float = PROFILE_S) -> None:
        """Measure pass times, which depend on machine and model but not on the text, before the first answer.

        The measurement stops at the limit. If one pass of a slow model exceeds it, the first answers provide the times.
        The engine's cache is empty afterwards.
        """
        n_vocab, began = engine.model.n_vocab, self._clock()
        prompt = np.random.default_rng(0).integers(0, n_vocab, _PROFILE_PROMPT).tolist()
        most = min(engine.outputs, engine.batch, engine.context - _PROFILE_PROMPT - 1)
        if engine.rollback is not None:
            most = min(most, 1 + engine.rollback)
        engine.kv_clear()
        slot = Slot(engine)
        slot.prefill(prompt, top=1)
        plain_s = last_s = self._clock() - began
        ends = count()
        for sizes in _PROFILE_ROUNDS:
            for size in (size for size in sizes if size <= most):
                if self._clock() - began + 2 * last_s > limit_s:
                    break
                pass_began = self._clock()
                self._profile_pass(_RandomText(prompt, [*prompt, next(ends) % n_vocab]), size, slot)
                last_s = self._clock() - pass_began
                slot.forget(len(slot.tokens) - _PROFILE_PROMPT)
                plain_s = last_s if size == 1 else plain_s
                # it cannot pay even with full acceptance, and larger ones are rarely cheaper
                if last_s > size * plain_s:
                    break
        engine.kv_clear()

    def _profile_pass(self, request: Answer, rows: int, slot: Slot) -> None:
        """Time a pass of `rows` rows of a request, including drafting."""
        drafts = self._make()
        drafts.attach(request)
        drafts.begin(request.tokens)
        drafts.catch_up(lambda _: False)
        began = self._clock()
        tokens = [*request.tokens[-1:], *drafts.draft(rows - 1)]
        slot.decode(tokens, "all", top=1)
        if len(tokens) == rows:
            self._choices[1].rows.measured(rows, self._clock() - began)

    def shape(self, requests: Sequence[Answer], most_rows: int, most_windows: int = 1) -> Shape:
        """Return the rows of each request and the number of windows in flight for the next step.

        requests: all running requests. Only a single request can have several windows.
        Drafting time counts as part of a pass, so that drafting takes no longer than it is worth.
        """
        for request in requests if len(requests) <= self._few else ():
            if request not in self._drafts:
                self._drafts[request] = self._make(), 0
                self._drafts[request][0].attach(request)
                self._drafts[request][0].begin(request.prompt)
        if not self._goes_on:
            self._began, self._caught_up_s = self._clock(), 0.0
        if len(requests) > self._few:
            self._choice = None
            return 1, 1
        self._choice = self._choices[len(requests)]
        for request in requests:
            self._take_in(request, self._choice)
        self._choice.rows.behind_s = sum(self._drafts[request][0].behind_s for request in requests)
        return self._choice.shape(max(1, min(most_rows, SIZES[-1] // len(requests))), most_windows)

    def draft(self, request: Answer, first: Sequence[int], rows: int, assumed: Sequence[int] = ()) -> Sequence[int]:
        """Return a window of at most `rows` tokens: `first`, and drafts that follow the text and `assumed`.

        first: the sampled token, or nothing if the window follows other windows.
        Return an empty window if there is nothing to draft.
        """
        if rows <= len(first) or self._choice is None:
            return first
        drafts, _ = self._drafts[request]
        self._caught_up_s += drafts.catch_up(self._choice.rows.pays)
        tokens = [*first, *drafts.draft(rows - len(first), assumed)]
        if self._choice is not self._choices[1]:
            return tokens
        # pass times are known for these row counts
        n_rows = max((size for size in SIZES if size <= len(tokens)), default=0)
        self._choice.drafted(n_rows)
        return tokens[:n_rows]

    def verified(self, results: Sequence[VerifyResult]) -> None:
        """Learn from the oldest step in flight, whose logits have arrived. results: result of each request's window."""
        now, n = self._clock(), len(results)
        seconds, self._began = now - self._began, now
        self.stats.count(results)
        choice, self._goes_on, self._was_plain = self._choice, False, False
        if choice is None:
            return
        choice.rows.paid(self._caught_up_s)
        passed_s, self._caught_up_s = seconds - self._caught_up_s, 0.0
        self._goes_on = results[0].right == results[0].used
        self._was_plain = all(result.is_alone and result.rows == 1 for result in results)
        if n == 1:
            choice.verified(results[0], passed_s)
        else:
            size = next(size for size in SIZES if size * n >= sum(result.rows for result in results))
            # A request with fewer drafts than the others lacked correct ones, so the missing drafts count as wrong.
            tried = sum(min(result.used, size - 1) for result in results) / n
            choice.rows.checked(size, sum(result.used for result in results) / n, passed_s, tried)
        self.stats.time(results, seconds, self._was_plain, choice.rows.plain_s)

    def disturbed(self) -> None:
        """Ignore the duration of the current pass, because other work runs during it."""
        self._choice, self._goes_on = None, False

    def ended(self, request: Answer) -> None:
        """Drop the drafts of a request that has ended."""
        self._drafts.pop(request, None)

    def to_json(self) -> dict[str, Any]:
        """Return the statistics since `begin` as JSON values, as docs/cli/chat.md and docs/serve.md describe."""
        device = self.device
        worker = {"draft_worker": device and device.name, "draft_worker_lost": device is not None and device.is_lost}
        return {"draft": self.name, **worker, **self.stats.to_json()}

    def describe(self) -> str:
        """Return a line of text with the statistics."""
        where = f" on {self.device.name}{', which is lost' if self.device.is_lost else ''}" if self.device else ""
        return f"{self.name}{where}: {self.stats}"

    def _new_choice(self) -> WindowChoice:
        drafts = self._make()
        return WindowChoice(RowChoice(drafts.acceptance, is_watched=drafts.free))

    def _take_in(self, request: Answer, choice: WindowChoice) -> None:
        """Add a request's new tokens to its drafts.

        If drafting is free and the last pass had one row, also check whether a draft would have been right. This costs
        nothing.
        """
        drafts, known = self._drafts[request]
        news = request.answer[known:]
        if self._was_plain and drafts.free and len(news) == 1 and (draft := drafts.draft(1)):
            choice.rows.watched(draft[0] == news[0])
        drafts.extend(news)
        self._drafts[request] = drafts, known + len(news)
