"""Steps in flight: rows that were submitted to an engine, and whose logits have not been collected.

A lone request may have several steps in flight, enough to keep all stages of an engine busy. Each step is a window. It
begins with a chosen token, or with a draft of the next chosen token, followed by draft tokens. While the stages compute
one window, the next one is drafted and submitted as if all of it were accepted:

    W1  the cat sat on        its rows choose  cat sat on the
    W2  the mat and the       begins with a draft of the token that the last row of W1 chooses

All rows are verified in order, and each token is chosen by the model's own logits. If a token differs from its draft,
the rows after it are cancelled, in this window and in all later ones. They are removed from the caches of all stages,
in order with the steps, and their logits are dropped. The next rows are submitted immediately after them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.errors import EdgeError, MediaError, SamplingError
from edge.llm.interface import Drafter, TextEngine, VerifyResult
from edge.llm.requests import Event, RequestState, token_logprobs
from edge.llm.sampler import LogitsRequest
from edge.llm.slot import Slot, full_length
from edge.llm.step_budget import StepBudget
from edge.media.media import alike
from edge.text.constraints.constraint import Mask
from edge.text.thinking_splitter import Split


@dataclass
class Rows:
    """Rows of one request in a step: tokens that follow the tokens in its slot."""

    state: RequestState
    tokens: list[int]
    logits: int  # number of last rows that yield logits
    drafts: Sequence[int] = ()  # tokens after the last chosen one up to the last row, including earlier windows
    is_first: bool = True  # True if the first row with logits is a chosen token and not a draft
    cancelled: bool = False

    @classmethod
    def pending(cls, state: RequestState, n_rows: int) -> Rows:
        """Return the next tokens of a request without drafts, at most `n_rows`; fewer if a snapshot is due."""
        if (pending := state.pending) == 1:
            return cls(state, state.tokens[-1:], 1)
        assert state.slot is not None
        start = len(state.slot.tokens)
        n_rows = state.slot.plan.rows(start, n_rows)
        n_rows = alike(state.tokens, start, n_rows)
        return cls(state, state.tokens[start : start + n_rows], int(n_rows == pending))

    @property
    def slot(self) -> Slot:
        """The slot of the request."""
        assert self.state.slot is not None
        return self.state.slot


def room(state: RequestState, most: int) -> int:
    """Return the number of rows that fit into the slot of a request, from 1 to `most`."""
    assert state.slot is not None
    return max(1, min(most, state.left, full_length(state.slot.engine) - len(state.slot.tokens)))


def batch(rows: Sequence[Rows]) -> tuple[list[int], NDArray[np.int_], NDArray[np.int_], NDArray[np.int8]]:
    """Return the arguments of `TextEngine.submit` for these rows, each placed after the tokens of its slot."""
    tokens: list[int] = []
    positions: list[int] = []
    sequences: list[int] = []
    outputs: list[int] = []
    for own in rows:
        slot, n_rows = own.slot, len(own.tokens)
        start = len(slot.tokens)
        tokens += own.tokens
        positions += range(start, start + n_rows)
        sequences += [slot.sequence] * n_rows
        outputs += [0] * (n_rows - own.logits) + [1] * own.logits
    return (tokens, np.array(positions), np.array(sequences), np.array(outputs, np.int8))


def prompt_rows(rows: Sequence[Rows]) -> int:
    """Return the number of prompt rows among these rows: all rows of requests that have rows without logits."""
    return sum([len(own.tokens) for own in rows if len(own.tokens) > own.logits])


def logits_request(rows: Sequence[Rows]) -> LogitsRequest:
    """Return a request for logits that suffices for all of these rows."""
    if any(own.state.request.logprobs is not None for own in rows):
        return LogitsRequest()
    each = [own.state.continuation.logits_request(own.drafts) for own in rows]
    if not all(request.top for request in each):
        return LogitsRequest()
    masks: list[Mask | None] = []
    for own, request in zip(rows, each, strict=True):
        masks += request.masks[len(request.masks) - own.logits :] if request.masks else [None] * own.logits
    return LogitsRequest(max((request.top for request in each), default=1), masks)


@dataclass
class StepInFlight:
    """A step whose logits are to come."""

    rows: list[Rows]  # rows with logits; never empty
    windows: int = 0  # number of windows intended in flight with this step; 0: no drafting
    follows_cancelled: bool = False  # True if logits of a cancelled step arrive before its own

    @property
    def is_cancelled(self) -> bool:
        """True if the logits of this step are no longer needed."""
        return all(rows.cancelled for rows in self.rows)


class InFlight:
    """The steps in flight, oldest first."""

    def __init__(self, budget: StepBudget, engine: TextEngine, microbatches: int | None = None) -> None:
        """budget: learns the times of steps with prompts.
        microbatches: number of decode groups; None: as the engine sets.
        """
        self._budget, self._microbatches = budget, microbatches
        self.most = 1  # number of steps in flight, not counting windows
        self.follow(engine)
        self.steps: deque[StepInFlight] = deque()
        self.submitted = self.prompt_rows = 0  # total steps, and total prompt rows in them

    def follow(self, engine: TextEngine) -> None:
        """Use the number of microbatches of this engine, and keep as many steps in flight."""
        self._budget.microbatches = self._microbatches or engine.microbatches
        self.most = self._budget.microbatches if engine.stages > 1 else 1  # a single stage computes one step at a time

    @property
    def awaited(self) -> list[StepInFlight]:
        """The steps that were not cancelled."""
        return [step for step in self.steps if not step.is_cancelled] if self.steps else []

    @property
    def n_requests(self) -> int:
        """Number of requests that wait for logits, counted once for each step."""
        return sum(not rows.cancelled for step in self.steps for rows in step.rows) if self.steps else 0

    def of_step(self, n_answers: int) -> int:
        """Return the number of answers in a step, if `n_answers` are spread over the microbatches."""
        return -(-n_answers // self._budget.microbatches)

    def most_with(self, ready: Collection[RequestState]) -> int:
        """Return the largest number of steps in flight if these requests are ready: the groups that all answers form.

        With more steps some groups would stay smaller than the others. 4 answers in groups of 2, 1 and 1 keep a stage
        busy for three steps, in groups of 2 and 2 for two. Prompts, and answers with adapters, have steps of their own.
        """
        if self.most == 1 or any(state.pending > 1 or state.adapters for state in ready):
            return self.most
        n_answers = len(ready) + self.n_requests
        return min(self.most, -(-n_answers // max(1, self.of_step(n_answers))))

    @property
    def has_windows(self) -> bool:
        """True if all steps that were not cancelled are windows of a lone request."""
        awaited = self.awaited
        return bool(awaited) and all(step.windows for step in awaited)

    def window(self, drafter: Drafter, state: RequestState, n_rows: int) -> Rows:
        """Return the next window of a request, at most `n_rows` rows. Empty if no row can follow the rows in flight."""
        assert state.slot is not None
        behind = [token for rows in self.rows_of(state) for token in rows.tokens]
        left = state.left - len(behind)
        if behind and (left <= 0 or len(state.slot.tokens) >= full_length(state.slot.engine)):
            return Rows(state, [], 0)
        first, assumed = ([], behind[1:]) if behind else (state.tokens[-1:], [])
        tokens = [*drafter.draft(state, first, room(state, min(n_rows, left)), assumed)]
        return Rows(state, tokens, len(tokens), [*assumed, *tokens[len(first) :]], not behind)

    def submit(self, engine: TextEngine, rows: Sequence[Rows], windows: int = 0) -> list[RequestState]:
        """Submit the rows of a step, whose requests have the same adapters.

        Return the requests that now wait for logits and did not wait before.

        windows: as in `StepInFlight`.

        Raises the errors of the engine.
        """
        giving, whole = [own for own in rows if own.logits], batch(rows)
        # On a single device all logits are available, so masks are not needed.
        top, masks = logits_request(giving) if engine.logits_cross else LogitsRequest()
        try:
            engine.submit(*whole, top=top, masks=masks, adapters=rows[0].state.adapters)
        except BaseException:
            for own in rows:
                own.slot.failed()
            raise
        self.submitted += 1
        self.prompt_rows += prompt_rows(rows)
        if giving:
            follows_cancelled = any(step.is_cancelled for step in self.steps)
            self.steps.append(StepInFlight(giving, windows, follows_cancelled))
        for own in rows:
            own.slot.submitted(own.tokens)
        return [own.state for own in giving if own.is_first]

    def took(self, rows: Sequence[Rows], began: float) -> None:
        """Report the time since `began` for submitted rows to the budget. The rows are one step, or parts of it.

        A part contains either prompt rows or decode rows.
        """
        if prompts := prompt_rows(rows):
            n_rows = sum(len(own.tokens) for own in rows)
            self._budget.took(n_rows, prompts, self._budget.clock() - began)

    def rows_of(self, state: RequestState) -> list[Rows]:
        """Return the rows of a request that were not cancelled."""
        if not self.steps:
            return []
        every = (rows for step in self.steps for rows in step.rows)
        return [rows for rows in every if rows.state is state and not rows.cancelled]

    def verify(
        self, rows: Rows, logits: NDArray[np.float32], windows: int, is_alone: bool, events: list[Event]
    ) -> VerifyResult:
        """Choose tokens by the logits of rows whose step has been collected.

        Rows after a rejected draft are removed from the cache, also in later windows.

        logits: [rows, n_vocab].
        windows: as in `StepInFlight`.
        is_alone: nothing else was in flight.
        events: receives the chosen tokens.
        """
        state, behind = rows.state, self.rows_of(rows.state)
        if not state.answer:
            state.prefilled_at = time.perf_counter()
        following = [*rows.tokens[len(rows.tokens) - rows.logits + 1 :], *(behind[0].tokens[:1] if behind else ())]
        new_events, used, right = verify(state, logits, following)
        events += new_events  # these tokens count even if the engine is lost now
        cancelled = tuple([len(rows_of_step.tokens) for rows_of_step in self.cancel(state)]) if right < used else ()
        if wrong := rows.logits - used + sum(cancelled):
            rows.slot.cut(len(rows.slot.tokens) - wrong)
        looked_at, is_alone = min(used, len(following)), is_alone and rows.is_first
        return VerifyResult(rows.logits, used, rows.is_first, is_alone, windows, right, looked_at, cancelled)

    def collect(self, engine: TextEngine) -> tuple[NDArray[np.float32], StepInFlight] | None:
        """Wait for the oldest step that was not cancelled. Return its logits and the step, or None if no such step
        is left.
        """
        while self.steps:
            logits, step = engine.collect(), self.steps.popleft()
            if not step.is_cancelled:
                return logits, step
        return None

    def drop(self, engine: TextEngine | None) -> None:
        """Drop all steps.

        engine: engine whose logits have to be collected first; None: another user already has the engine.
        """
        if engine is not None:
            with suppress(EdgeError):  # the error of a failed or stopped engine is reported elsewhere
                while engine.uncollected:
                    engine.collect()
        self.steps.clear()

    def cancel(self, state: RequestState) -> list[Rows]:
        """Cancel the rows of a request in flight. Return these rows."""
        cancelled = self.rows_of(state)
        for rows in cancelled:
            rows.cancelled = True
        return cancelled


def of_one_set(ready: deque[RequestState]) -> tuple[list[RequestState], list[RequestState]]:
    """Split requests into those with the adapters of the first one, and others, because a step uses one set of
    adapters.

    The first ones move to the end of `ready`, so that the sets alternate.
    """
    adapters = ready[0].adapters
    same = [state for state in ready if state.adapters == adapters]
    others = [state for state in ready if state.adapters != adapters]
    if others:
        for state in same:
            ready.remove(state)
        ready.extend(same)
    return same, others


def in_one_graph(rows: list[Rows], engine: TextEngine) -> list[list[Rows]]:
    """Split a step into parts that llama.cpp computes in one graph each.

    A picture is a part of its own. With recurrent layers, a part consists of consecutive sequences with equal numbers
    of rows, or of one sequence if rows can be rolled back. Otherwise llama.cpp would split the step itself, and hooks
    on the graph would mistake a part for the whole.
    """
    if len(rows) == 1:
        return [rows]
    pictures = [[own] for own in rows if own.tokens[0] < 0]
    rows = [own for own in rows if own.tokens[0] >= 0]
    if engine.rollback is None:
        return [*pictures, rows] if rows else pictures
    steps: list[list[Rows]] = [*pictures]
    for own in sorted(rows, key=lambda own: (len(own.tokens), own.slot.sequence)):
        last = steps[-1][-1] if len(steps) > len(pictures) and not engine.rollback else None
        if last and (last.slot.sequence + 1, len(last.tokens)) == (own.slot.sequence, len(own.tokens)):
            steps[-1].append(own)
        else:
            steps.append([own])
    return steps


def verify(state: RequestState, logits: NDArray[np.float32], following: Sequence[int]) -> tuple[list[Event], int, int]:
    """Choose the next tokens of a request from logits [rows, n_vocab].

    The first row gives one token. Each further row counts if the token before it equals the submitted one in
    `following`. Rows after a rejected draft are not used. Return (events, used rows, accepted drafts).
    """
    events: list[Event] = []
    used = right = 0
    try:
        for used, row in enumerate(logits, 1):
            events.append(_next(state, row))
            if events[-1].finish_reason or used > len(following) or events[-1].token_id != following[used - 1]:
                break
            right = used
    except SamplingError as error:
        events.append(end_event(state, "error", error))
    return events, used, right


def _next(state: RequestState, logits: NDArray[np.float32]) -> Event:
    """Choose the next token of a request. Return the event of the token or of the request's end."""
    continuation, n_logprobs = state.continuation, state.request.logprobs
    split = continuation.choose(logits)
    token = None if split is None else continuation.tokens[-1]
    if token is not None:
        state.tokens.append(token)
    logprobs = None if n_logprobs is None or token is None else token_logprobs(logits, token, n_logprobs)
    reason, (thought, text) = continuation.finish_reason, split or Split()
    if reason:
        rest = continuation.rest()
        thought, text = thought + rest.thought, text + rest.text
    return Event(
        state.number,
        token,
        text,
        reason,
        logprobs,
        continuation.stop_string,
        state.cached_tokens or 0,
        thought=thought,
        thought_tokens=continuation.thought_tokens,
    )


def end_event(state: RequestState, reason: str, error: SamplingError | MediaError | None = None) -> Event:
    """Return the event that ends a request without a token, with all text that was held back."""
    thought, text = state.continuation.rest()
    return Event(
        state.number,
        None,
        text,
        reason,
        cached_tokens=state.cached_tokens or 0,
        error=error,
        thought=thought,
        thought_tokens=state.continuation.thought_tokens,
    )
