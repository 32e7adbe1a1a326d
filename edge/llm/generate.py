"""Generation: a generator of responses, each a piece of text with the counters so far."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.bounds.repetition import Repetition
from edge.errors import EdgeError
from edge.llm.continuation import Continuation
from edge.llm.interface import Drafter
from edge.llm.sampler import SamplingParams
from edge.llm.sequence import PrefillProgress, Session
from edge.llm.windows import Windows


@dataclass(frozen=True)
class Usage:
    """Tokens of one generation."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt: those that were in the KV cache already
    completion_tokens: int
    restored_tokens: int = 0  # of those in the cache: that were read from disk for this prompt
    dropped_tokens: int = 0  # of the oldest: that were dropped in place, before or during the answer


@dataclass(frozen=True)
class Timing:
    """Seconds and rates of one generation so far; a rate is 0 where there is nothing to measure yet."""

    ttft_s: float  # accepted to first token
    tpot_s: float  # mean time per token after the first
    prefill_tokens_per_s: float  # prompt tokens that were computed, over the time that took
    decode_tokens_per_s: float  # 1 / tpot_s


@dataclass(frozen=True)
class Response:
    """One step of a generation."""

    text: str  # new text; may be empty while a character or a stop string is incomplete
    token_id: int | None  # None in the last response, which only says how it ended
    finish_reason: str | None  # "stop", "length", "repetition", or None while it goes on
    usage: Usage
    timing: Timing
    repetition: Repetition | None = None  # the loop that ended the answer


def generate(
    session: Session,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    max_tokens: int | None = None,  # None: until the context is full
    stop: Sequence[str] = (),  # strings that end the answer and are not part of it
    on_prefill: PrefillProgress | None = None,
    in_place: bool = False,  # as in `Session.prefill`
    beginning: Callable[[], int] | None = None,  # tokens that stay in a full context; None: the answer ends there
    drafter: Drafter | None = None,  # guesses tokens, which are then checked several in a pass; None: one in a pass
) -> Iterator[Response]:
    """Continue `prompt`; the session afterwards holds the prompt and what was generated.

    A token that ends the model's turn is not part of the answer and not counted. Closing the generator, or an
    exception such as KeyboardInterrupt, leaves the session usable. Tokens are chosen one after the other by the model's
    own logits, with a drafter and without: it only has some of these computed before they are asked for.
    """
    accepted = time.perf_counter()
    continuation = Continuation(session.engine.model, prompt, sampling, max_tokens=max_tokens, stop=stop)
    session.wanted = continuation.wanted
    clock = _Clock(accepted, len(prompt))
    step_s: list[float] = []
    finish = None
    following: Sequence[int] = ()  # tokens that were submitted behind the rows
    windows = Windows(session, drafter)
    try:
        if drafter is not None:
            drafter.begin(prompt)
        rows = session.prefill(prompt, on_prefill, in_place=in_place)[np.newaxis]
        clock.prefilled(session)
        while finish is None:
            texts, used, right = _accept(continuation, rows, following)
            windows.used(used, right, min(used, len(following)))
            chosen = continuation.tokens[clock.completion_tokens :]
            for token, text in zip(chosen, texts, strict=True):
                clock.token()
                yield Response(text, token, None, clock.usage(), clock.timing())
            finish = continuation.finish_reason
            if finish is None and windows.is_empty and session.full:
                dropped = 0 if beginning is None else session.make_room(beginning())
                clock.dropped += dropped
                finish = None if dropped else "length"
            if finish is None:
                began = time.perf_counter()
                windows.fill(chosen, (max_tokens or sys.maxsize) - clock.completion_tokens)
                rows, following = windows.collect()
                if len(rows) == 1:
                    step_s.append(time.perf_counter() - began)
    finally:
        continuation.close()
        windows.close()
        session.engine.answered(step_s)
        with suppress(EdgeError):  # it was told already, or keeping is no duty
            session.keep()
    repetition = continuation.repetition if finish == "repetition" else None
    yield Response(continuation.rest(), None, finish or "stop", clock.usage(), clock.timing(), repetition)


def _accept(
    continuation: Continuation, rows: NDArray[np.float32], following: Sequence[int]
) -> tuple[list[str], int, int]:
    """Choose tokens by `rows` for as long as they are those that were submitted behind them: their texts, how many rows
    were used, and how many tokens were right. The row behind a wrong one knows nothing of what was chosen."""
    texts: list[str] = []
    right = 0
    for used, logits in enumerate(rows, 1):
        text = continuation.choose(logits)
        if text is None:
            break
        texts.append(text)
        if continuation.finish_reason or used > len(following) or continuation.tokens[-1] != following[used - 1]:
            break
        right = used
    return texts, used, right


class _Clock:
    """When what happened."""

    def __init__(self, accepted: float, prompt_tokens: int) -> None:
        self._accepted = accepted
        self._prefilled = self._first = self._last = accepted
        self._prompt_tokens, self._computed, self._restored, self.completion_tokens = prompt_tokens, 0, 0, 0
        self.dropped = 0

    def prefilled(self, session: Session) -> None:
        self._prefilled, self.dropped = time.perf_counter(), session.dropped
        self._computed, self._restored = session.computed, session.restored

    def token(self) -> None:
        self._last = time.perf_counter()
        if self.completion_tokens == 0:
            self._first = self._last
        self.completion_tokens += 1

    def usage(self) -> Usage:
        cached = self._prompt_tokens - self._computed
        return Usage(self._prompt_tokens, cached, self.completion_tokens, self._restored, self.dropped)

    def timing(self) -> Timing:
        after_first = self.completion_tokens - 1
        tpot = (self._last - self._first) / after_first if after_first > 0 else 0.0
        prefill = self._prefilled - self._accepted
        return Timing(
            ttft_s=self._first - self._accepted,
            tpot_s=tpot,
            prefill_tokens_per_s=self._computed / prefill if prefill > 0 else 0.0,
            decode_tokens_per_s=1 / tpot if tpot > 0 else 0.0,
        )
