"""Generation: a generator of responses, each a piece of text with the counters so far; and greedy drafts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from edge.errors import EngineError
from edge.llm.continuation import Request
from edge.llm.interface import TextEngine
from edge.llm.requests import Running
from edge.llm.scheduler import USED_MEANWHILE, Scheduler
from edge.llm.slot import Slot
from edge.media.media import text_of
from edge.text.repetition import Repetition


@dataclass  # a frozen one takes three times as long to make, for each token; so with the next two
class Usage:
    """Tokens of one generation."""

    prompt_tokens: int
    cached_tokens: int  # tokens of the prompt that were already in the KV cache
    completion_tokens: int
    restored_tokens: int = 0  # cached tokens that were read from disk for this prompt
    dropped_tokens: int = 0  # oldest tokens that were dropped in place, before or during the answer
    thought_tokens: int = 0  # tokens of thoughts, part of the completion


@dataclass
class Timing:
    """Seconds and rates of one generation so far; a rate is 0 where there is nothing to measure yet."""

    ttft_s: float  # from acceptance to the first token
    tpot_s: float  # mean time of an output token after the first
    prefill_tokens_per_s: float  # computed prompt tokens over their time
    decode_tokens_per_s: float  # 1 / tpot_s


@dataclass
class Response:
    """One step of a generation."""

    text: str  # new text; may be empty while a character or a stop string is incomplete
    token_id: int | None  # None in the last response, which has the finish reason
    finish_reason: str | None  # "stop", "length" or "repetition"; None before the end
    usage: Usage
    timing: Timing
    repetition: Repetition | None = None  # the loop that ended the answer
    thought: str = ""  # new text of the model's thought, not part of `text`


def generate(scheduler: Scheduler, request: Request) -> Iterator[Response]:
    """Answer the only request of a scheduler, which keeps what was computed for the next prompt.

    A token that ends the model's turn is not part of the answer and not counted. Closing the generator, or an
    exception such as KeyboardInterrupt, leaves the scheduler usable. An answer that was not complete when the next one
    began raises EngineError.
    """
    accepted = time.perf_counter()
    engine, most = scheduler.engine, request.max_tokens
    ends_when_full = request.stays is None and engine.attention_window is None
    if ends_when_full and most is not None and most > engine.context - len(request.prompt):
        request = replace(request, max_tokens=None)
    running = scheduler.prepare(request)
    clock = _Clock(accepted, running)
    scheduler.drop_requests()
    if scheduler.drafter is not None:
        scheduler.drafter.begin()
    try:
        scheduler.enqueue(running)
        finish = None
        while finish is None:
            if running.ended:
                raise EngineError(USED_MEANWHILE)
            for event in scheduler.step():
                if event.request != running.number:
                    continue
                if event.error is not None:
                    raise event.error
                if event.token_id is not None:
                    clock.token()
                    yield clock.response(event.text, event.token_id, None, event.thought)
                finish = event.finish_reason
    finally:
        scheduler.cancel(running.number)
    thought, rest = ("", "") if event.token_id is not None else (event.thought, event.text)
    repetition = running.continuation.repetition if finish == "repetition" else None
    yield clock.response(rest, None, finish, thought, repetition)


class _Clock:
    """Timestamps behind `Response.timing`."""

    def __init__(self, accepted: float, running: Running) -> None:
        self._accepted, self._running = accepted, running
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
        running, cached_tokens = self._running, self._running.cached_tokens or 0
        usage = Usage(
            len(running.prompt),
            cached_tokens,
            self._tokens,
            running.restored_tokens,
            running.dropped_tokens,
            running.continuation.thought_tokens,
        )
        after_first = self._tokens - 1
        tpot = (self._last - self._first) / after_first if after_first > 0 else 0.0
        computed, prefill = len(running.prompt) - cached_tokens, running.prefilled_at - self._accepted
        timing = Timing(
            ttft_s=self._first - self._accepted,
            tpot_s=tpot,
            prefill_tokens_per_s=computed / prefill if prefill > 0 else 0.0,
            decode_tokens_per_s=1 / tpot if tpot > 0 else 0.0,
        )
        return Response(text, token_id, reason, usage, timing, repetition, thought)


class GreedyDrafter:
    """Drafts of a model: each token is its likeliest."""

    def __init__(self, engine: TextEngine) -> None:
        """engine: nobody else may use it."""
        self.context, self.n_vocab = engine.context, engine.model.n_vocab
        self._slot = Slot(engine)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """`n` tokens behind these, each the likeliest; with 0 the text is only computed. Of a text that begins like the
        last one only the rest is computed. ContextFull where the text is empty, or has no room; the errors of the
        engine."""
        logits = self._slot.prefill(text_of(tokens), top=1)
        draft: list[int] = []
        while len(draft) < n:
            if draft:
                logits = self._slot.decode(draft[-1:], top=1)
            draft.append(int(logits.argmax()))
        return draft
