"""Speculative decoding: draft tokens of few requests at a time, as many as pay, and learn from what came of them."""

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
    from edge.cluster.draft_worker import DraftDevice  # which takes gRPC with it

FEW = 4  # requests: of more, their own rows share the pass, and drafts bring little
PROFILE_S = 2.0  # for all passes that are measured before the first answer
_PROFILE_PROMPT = 12  # tokens: as many as a trial takes in
_PROFILE_ROUNDS = (1, *SIZES), SIZES  # the faster of two passes counts, each beside passes of one row that are warm
_LEAST_PLAIN = 3  # passes of one row, for a mean


class Drafts:
    """Where drafts come from. They decide how fast an answer comes, never what it says."""

    free: bool  # whether a draft takes next to no time
    acceptance: float = MODEL_ACCEPTANCE  # the part of drafts that is expected to be right, before any were verified

    def attach(self, request: Answer) -> None:
        """Know the request, before its prompt is taken in."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget what was, and take in a prompt."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens that follow."""

    @property
    def behind_s(self) -> float:
        """Seconds that `catch_up` would take for a trial, as far as that is known."""
        return 0.0

    def catch_up(self, pays: Callable[[float], bool]) -> float:
        """Compute what the next draft needs of the text: more of it where the seconds for that pay. Return the seconds
        that this took."""
        return 0.0

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        """At most `n` tokens that may follow all these and then `assumed`; fewer, or none, where there is no draft."""
        raise NotImplementedError


@dataclass
class _Passes:
    """Passes that were measured, of so many requests."""

    tokens: float = 0.0  # that each request got of them
    seconds: float = 0.0  # that they took, with the drafting
    plain: int = 0  # those of one row
    plain_s: float = 0.0  # that these took
    usual_plain_s: float = 0.0  # of one such pass, also of earlier answers; 0 where there was none

    @property
    def of_plain_s(self) -> float:
        """Seconds that the same tokens take in passes of one row; 0 where that is not known."""
        return self.tokens * (self.plain_s / self.plain if self.plain >= _LEAST_PLAIN else self.usual_plain_s)


@dataclass
class SpeculationStats:
    """Figures of drafts. The prompt and its first token are not in it."""

    drafted: int = 0  # tokens that were drafted and verified
    accepted: int = 0  # of these: that were chosen
    passes: int = 0  # of one row a request, or more
    rows: int = 0  # in all passes
    _measured: dict[int, _Passes] = field(default_factory=lambda: defaultdict(_Passes))  # by requests of a pass

    @property
    def gain(self) -> float | None:
        """Speed-up of the tokens over passes of one row; None where nothing can be compared."""
        known = [passes for passes in self._measured.values() if passes.of_plain_s]
        return (
            sum(counted.of_plain_s for counted in known) / sum(counted.seconds for counted in known) if known else None
        )

    def count(self, results: Sequence[VerifyResult]) -> None:
        """Add a pass, and those of windows that it cancelled."""
        cancelled = [rows for result in results for rows in result.cancelled]
        first, rows = sum(result.is_first for result in results), sum(result.rows for result in results)
        self.drafted += rows - first + sum(cancelled)
        self.accepted += sum(result.used for result in results) - first
        self.passes += 1 + len(cancelled)
        self.rows += rows + sum(cancelled)

    def time(self, results: Sequence[VerifyResult], seconds: float, is_plain: bool, usual_plain_s: float) -> None:
        """Add what a pass took. is_plain: it had one row of each request and nothing beside it."""
        passes = self._measured[len(results)]
        passes.tokens += sum(result.used for result in results) / len(results)
        passes.seconds += seconds
        passes.plain += is_plain
        passes.plain_s += seconds if is_plain else 0.0
        passes.usual_plain_s = usual_plain_s or passes.usual_plain_s  # that may be measured anew just now

    def to_json(self) -> dict[str, Any]:
        """Plain values, as docs/cli/chat.md and docs/serve.md say."""
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "passes": self.passes,
            "rows_per_pass": self.rows / self.passes if self.passes else None,
            "gain": self.gain,
        }

    def __str__(self) -> str:
        if not self.drafted:
            return "no token was drafted: it did not pay, or there was no draft"
        gain = "" if self.gain is None else f", {self.gain:.2f} times as fast as one at a time"
        return (
            f"{self.accepted} of {self.drafted} drafted tokens accepted, {self.passes} passes of"
            f" {self.rows / self.passes:.1f} rows{gain}"
        )


@dataclass
class _RandomText:
    """A request whose text is random, and ends otherwise each time: of it nothing is drafted yet."""

    prompt: list[int]
    tokens: list[int]
    answer: Sequence[int] = ()
    sequence: int = 0


class Speculation:
    """A `Drafter`: each request has its own text to draft from, and all of so many requests one choice of rows. It goes
    on with what it learned from answer to answer."""

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
        """drafts: makes those of a request. name: of them, for people. few: requests at once that have drafts. device:
        that drafts; None: this one. choice: makes one of rows and windows; None: what suits the drafts. clock: in
        seconds."""
        self.name, self.device, self.stats = name, device, SpeculationStats()
        self._make, self._few, self._clock = drafts, few, clock
        self._drafts: dict[Answer, tuple[Drafts, int]] = {}  # and how much of its answer they know
        self._choices: dict[int, WindowChoice] = defaultdict(choice or self._new_choice)  # by requests
        self._choice: WindowChoice | None = None  # of the pass that is measured
        self._began = 0.0  # drafting; or the window before ended, where others were in flight behind it
        self._caught_up_s = 0.0  # of that time, spent on text
        self._goes_on = False  # such others are in flight
        self._was_plain = False  # the last pass that was measured had one row of each request

    def begin(self) -> None:
        """Count figures from now on, and forget those before."""
        self.stats = SpeculationStats()

    def profile(self, engine: TextEngine, limit_s: float = PROFILE_S) -> None:
        """Measure what passes take, before the first answer: a property of machine and model, not of a text. That is
        done as far as the limit allows. One pass of a slow model is over it: then its first answers tell. The engine's
        cache is empty afterwards."""
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
                if last_s > size * plain_s:  # it cannot pay, whatever is accepted, and larger ones are seldom cheaper
                    break
        engine.kv_clear()

    def _profile_pass(self, request: Answer, rows: int, slot: Slot) -> None:
        """Time a pass of so many rows of a request, with the drafting."""
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
        """Rows of each of these requests, which are all that run, in the next step; and how many such windows of one
        that is alone are to be in flight: what pays. Drafting is not to take longer than it is worth, so that counts as
        a part of the pass."""
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
        """A window of at most `rows` tokens: `first`, which was chosen, or nothing where the window is behind others;
        then drafts of what follows the text and `assumed`. Empty where there is nothing to draft."""
        if rows <= len(first) or self._choice is None:
            return first
        drafts, _ = self._drafts[request]
        self._caught_up_s += drafts.catch_up(self._choice.rows.pays)
        tokens = [*first, *drafts.draft(rows - len(first), assumed)]
        if self._choice is not self._choices[1]:
            return tokens
        n_rows = max((size for size in SIZES if size <= len(tokens)), default=0)  # of which times are known
        self._choice.drafted(n_rows)
        return tokens[:n_rows]

    def verified(self, results: Sequence[VerifyResult]) -> None:
        """The logits of the oldest step came: what came of the window of each request."""
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
            # Where a request had fewer drafts than others, those that it lacked were wrong.
            tried = sum(min(result.used, size - 1) for result in results) / n
            choice.rows.checked(size, sum(result.used for result in results) / n, passed_s, tried)
        self.stats.time(results, seconds, self._was_plain, choice.rows.plain_s)

    def disturbed(self) -> None:
        """Something else is computed beside the pass: how long it takes says nothing."""
        self._choice, self._goes_on = None, False

    def ended(self, request: Answer) -> None:
        """A request has ended."""
        self._drafts.pop(request, None)

    def to_json(self) -> dict[str, Any]:
        """Figures since `begin`, as docs/cli/chat.md and docs/serve.md say."""
        device = self.device
        worker = {"draft_worker": device and device.name, "draft_worker_lost": device is not None and device.is_lost}
        return {"draft": self.name, **worker, **self.stats.to_json()}

    def describe(self) -> str:
        """The same in a line for people."""
        where = f" on {self.device.name}{', which is lost' if self.device.is_lost else ''}" if self.device else ""
        return f"{self.name}{where}: {self.stats}"

    def _new_choice(self) -> WindowChoice:
        drafts = self._make()
        return WindowChoice(RowChoice(drafts.acceptance, is_watched=drafts.free))

    def _take_in(self, request: Answer, choice: WindowChoice) -> None:
        """Let the drafts of a request know all of its text. Where drafting is free and the last pass had one row, a
        draft beside it would have been right or not: that is learned at no cost."""
        drafts, known = self._drafts[request]
        news = request.answer[known:]
        if self._was_plain and drafts.free and len(news) == 1 and (draft := drafts.draft(1)):
            choice.rows.watched(draft[0] == news[0])
        drafts.extend(news)
        self._drafts[request] = drafts, known + len(news)
