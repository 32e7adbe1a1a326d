"""Generation: a generator of responses with text and counters, and greedy drafting."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from edge.errors import EngineError
from edge.llm.continuation import Request
from edge.llm.interface import TextEngine
from edge.llm.requests import RequestState
from edge.llm.scheduler import USED_MEANWHILE, Scheduler
from edge.llm.slot import Slot
from edge.media.media import text_of
from edge.text.repetition import Repetition


@dataclass  # frozen dataclasses take three times as long to create, which matters for each token
class Usage:
    """Token counts of one generation."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were already in the KV cache
    completion_tokens: int
    restored_tokens: int = 0  # cached tokens that were read from disk for this prompt
    dropped_tokens: int = 0  # oldest tokens that were dropped in place, before or during the response
    thought_tokens: int = 0  # tokens of thoughts, included in completion_tokens


@dataclass
class Timing:
    """Seconds and rates of one generation so far. A rate is 0 until it can be measured."""

    ttft_s: float  # from acceptance of the request to the first token
    tpot_s: float  # mean time per output token after the first
    prefill_tokens_per_s: float  # computed prompt tokens / their time
    decode_tokens_per_s: float  # 1 / tpot_s


@dataclass
class Response:
    """One step of a generation."""

    text: str  # new text; may be empty while a character or a stop string is incomplete
    token_id: int | None  # None in the last response, which has the finish reason
    finish_reason: str | None  # "stop", "length" or "repetition"; None before the end
    usage: Usage
    timing: Timing
    repetition: Repetition | None = None  # repetition that ended the response
    thought: str = ""  # new text of the model's thought, not part of `text`


def generate(scheduler: Scheduler, request: Request) -> Generator[Response, None, None]:
    """Run a request as the only one of a scheduler, which keeps the KV cache for the next prompt.

    An end-of-turn token is neither part of the response nor counted. The scheduler remains usable if the generator is
    closed, or after an exception such as KeyboardInterrupt.

    Raises EngineError if another generation began before this one was complete.
    """
    accepted = time.perf_counter()
    engine, most = scheduler.engine, request.max_tokens
    use = engine.states.use
    ends_when_full = request.stays is None and engine.attention_window is None
    if ends_when_full and most is not None and most > engine.context - len(request.prompt):
        request = replace(request, max_tokens=None)
    state = scheduler.prepare(request)
    clock = _Clock(accepted, state)
    with use.alone():
        scheduler.drop_requests()
        scheduler.drafts.begin()
        scheduler.enqueue(state)
    try:
        finish = None
        while finish is None:
            with use.alone():
                if state.ended:
                    raise EngineError(USED_MEANWHILE)
                events = scheduler.step()
            for event in events:
                if event.request != state.number:
                    continue
                if event.error is not None:
                    raise event.error
                if event.token_id is not None:
                    clock.token()
                    yield clock.response(event.text, event.token_id, None, event.thought)
                finish = event.finish_reason
    finally:
        scheduler.cancel(state.number)
    thought, rest = ("", "") if event.token_id is not None else (event.thought, event.text)
    repetition = state.continuation.repetition if finish == "repetition" else None
    yield clock.response(rest, None, finish, thought, repetition)


class _Clock:
    """Timestamps behind `Response.timing`."""

    def __init__(self, accepted: float, state: RequestState) -> None:
        self._accepted, self._state = accepted, state
        self._first = self._last = accepted
        self._tokens = 0

    def token(self) -> None:
        self._last = time.perf_counter()
        if self._tokens == 0:
            self._first = self._last
        self._tokens += 1

    def response(
        self, text: str, token_id: int | None, reason: str | None, thought: str, repetition: Repetition | None = None
    ) -> Response:
        state, cached_tokens = self._state, self._state.cached_tokens or 0
        usage = Usage(
            len(state.prompt),
            cached_tokens,
            self._tokens,
            state.restored_tokens,
            state.dropped_tokens,
            state.continuation.thought_tokens,
        )
        after_first = self._tokens - 1
        tpot = (self._last - self._first) / after_first if after_first > 0 else 0.0
        computed, prefill = len(state.prompt) - cached_tokens, state.prefilled_at - self._accepted
        timing = Timing(
            ttft_s=self._first - self._accepted,
            tpot_s=tpot,
            prefill_tokens_per_s=computed / prefill if prefill > 0 else 0.0,
            decode_tokens_per_s=1 / tpot if tpot > 0 else 0.0,
        )
        return Response(text, token_id, reason, usage, timing, repetition, thought)


class GreedyDrafter:
    """Drafts tokens with a model; each draft token is the most likely one."""

    def __init__(self, engine: TextEngine) -> None:
        """engine: engine for drafting, not shared with other users."""
        self.context, self.n_vocab = engine.context, engine.model.n_vocab
        self._slot = Slot(engine)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return `n` draft tokens after `tokens`. With n = 0 the text is only prefilled.

        Only the part that differs from the last text is computed. Raises ContextFull if the text is empty or does not
        fit, and the errors of the engine.
        """
        logits = self._slot.prefill(text_of(tokens), top=1)
        draft: list[int] = []
        while len(draft) < n:
            if draft:
                logits = self._slot.decode(draft[-1:], top=1)
            draft.append(int(logits.argmax()))
        return draft
