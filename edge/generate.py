"""Generation: a generator of responses, each a piece of text with the counters so far."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edge.errors import SamplingError
from edge.sampler import PENALTY_LAST_N, SamplingParams, TokenSampler
from edge.session import PrefillProgress, Session


@dataclass(frozen=True)
class Usage:
    """Tokens of one generation."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt: those that were in the KV cache already
    completion_tokens: int


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
    finish_reason: str | None  # "stop", "length", or None while it goes on
    usage: Usage
    timing: Timing


def generate(
    session: Session,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    max_tokens: int | None = None,  # None: until the context is full
    stop: Sequence[str] = (),  # strings that end the answer and are not part of it
    on_prefill: PrefillProgress | None = None,
) -> Iterator[Response]:
    """Continue `prompt`; the session afterwards holds the prompt and what was generated.

    A token that ends the model's turn is not part of the answer and not counted. Closing the generator, or an
    exception such as KeyboardInterrupt, leaves the session usable.
    """
    accepted = time.perf_counter()
    if any(not s for s in stop):
        raise SamplingError("a stop string must not be empty")
    model = session.engine.model
    sampler = TokenSampler(model, sampling)
    session.top = sampler.needs
    text = TextStream(stop)
    clock = _Clock(accepted, len(prompt))
    step_s: list[float] = []
    try:
        logits = session.prefill(prompt, on_prefill)
        clock.prefilled(session.computed)
        for token in prompt[-PENALTY_LAST_N:]:
            sampler.accept(token, generated=False)
        while True:
            token = sampler.choose(logits)
            if model.is_end(token):
                finish = "stop"
                break
            sampler.accept(token)
            clock.token()
            piece = text.push(model.piece(token))
            yield Response(piece, token, None, clock.usage(), clock.timing())
            if text.stopped:
                finish = "stop"
                break
            if clock.completion_tokens == max_tokens or session.full:
                finish = "length"
                break
            began = time.perf_counter()
            logits = session.step(token)
            step_s.append(time.perf_counter() - began)
    finally:
        sampler.close()
        session.engine.answered(step_s)
    yield Response(text.rest(), None, finish, clock.usage(), clock.timing())


class TextStream:
    """Token bytes in, text out: whole UTF-8 characters, and nothing of a stop string, even when it comes in pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False

    def push(self, piece: bytes) -> str:
        """The text that is certain after this piece. Sets `stopped` when a stop string is complete."""
        self._held += self._decoder.decode(piece)
        found = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            return self._release(min(found), drop_rest=True)
        longest = max((_overlap(self._held, s) for s in self._stop), default=0)
        return self._release(len(self._held) - longest)

    def rest(self) -> str:
        """What was held back, once nothing more can come."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        return self._release(len(self._held))

    def _release(self, length: int, *, drop_rest: bool = False) -> str:
        text, rest = self._held[:length], self._held[length:]
        self._held = "" if drop_rest else rest
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class _Clock:
    """When what happened."""

    def __init__(self, accepted: float, prompt_tokens: int) -> None:
        self._accepted = accepted
        self._prefilled = self._first = self._last = accepted
        self._prompt_tokens, self._computed, self.completion_tokens = prompt_tokens, 0, 0

    def prefilled(self, computed: int) -> None:
        self._prefilled, self._computed = time.perf_counter(), computed

    def token(self) -> None:
        self._last = time.perf_counter()
        if self.completion_tokens == 0:
            self._first = self._last
        self.completion_tokens += 1

    def usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._prompt_tokens - self._computed, self.completion_tokens)

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
