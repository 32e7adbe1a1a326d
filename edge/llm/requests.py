"""Requests of a scheduler, the events that tell what came of them, and how far each has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edge.errors import ContextFull, EngineError, MediaError, SamplingError
from edge.llm.continuation import Continuation, Request
from edge.llm.interface import RemotePrompt, TextEngine
from edge.llm.options import SINKS
from edge.llm.slot import Former, Slot, check_prompt, common_prefix
from edge.media.media import EmbeddingRows, behind, has_rows
from edge.weights.adapter import scales_of
from edge.weights.adapter_file import CheckedAdapter, namespace_with

_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one place of an answer, before any option of sampling changed them."""

    chosen: float  # of the token that was chosen
    alternatives: tuple[tuple[int, float], ...]  # (token id, its own), the likeliest first


def token_logprobs(logits: NDArray[np.float32], token: int, n_alternatives: int) -> TokenLogprobs:
    """Log probabilities of the token chosen by logits [n_vocab], and of the `n_alternatives` likeliest ones."""
    largest = float(logits.max())
    log_sum = largest + float(np.log(np.exp(logits.astype(np.float64) - largest).sum()))
    n = min(n_alternatives, len(logits))
    greatest = np.argpartition(-logits, n - 1)[:n] if n else np.empty(0, np.int64)
    ordered = sorted((-float(logits[i]), int(i)) for i in greatest)
    return TokenLogprobs(float(logits[token]) - log_sum, tuple((i, -negative - log_sum) for negative, i in ordered))


_WINDOW_PARTS = 8  # of an attention window: one is dropped at a time, as each time all keys are moved


@dataclass  # a frozen one takes three times as long to make, for each token
class Event:
    """A token of one request in one step, or its end."""

    request: int  # its number, as `add` gave it
    token_id: int | None  # None where only its end is reported
    text: str  # that is certain by now; may be empty while a character, a mark or a stop string is incomplete
    finish_reason: str | None  # "stop", "length", "repetition", "cancelled", "error"; None while it goes on
    logprobs: TokenLogprobs | None = None
    stop_string: str | None = None  # that ended it
    cached_tokens: int = 0  # of its prompt: that need not be computed
    error: SamplingError | MediaError | None = None  # why it cannot go on: its constraint, or its pictures elsewhere
    thought: str = ""  # more of what the model thinks, which is no part of `text`
    thought_tokens: int = 0  # of the answer so far


class Running:
    """A request that was added, and its answer."""

    def __init__(
        self,
        number: int,
        continuation: Continuation,
        adapters: Sequence[CheckedAdapter],
        window: int | None = None,
    ) -> None:
        """adapters, window: of the engine."""
        self.window, request = window, continuation.request
        self.number, self.request, self.continuation = number, request, continuation
        self.adapters = scales_of(adapters, request.adapters)
        self.namespace = namespace_with(request.namespace, adapters, self.adapters)
        self.tokens = [*request.prompt, *continuation.tokens]  # its history, without what context shifts dropped
        self.slot: Slot | None = None  # None while it waits
        self.former: Former | None = None  # what an engine before this one held of it
        self.remote: RemotePrompt | None = None  # its prompt on another placement, until all of that is here
        self.ended = False
        self.to_prefill = 0  # tokens of its history that had to be computed when it was admitted
        self.cached_tokens: int | None = None  # of its prompt; None until it was admitted for the first time
        self.restored_tokens = self.dropped_tokens = 0
        self.added_at = 0.0  # when it was enqueued, by the scheduler's clock
        self.token_at: float | None = None  # when its last token was chosen, by that clock; None before its first one
        self.prompt_rows_at = 0  # that had been submitted then, of all requests
        self.prefilled_at = 0.0  # when its first logits came, by time.perf_counter

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids."""
        return self.request.prompt

    @property
    def answer(self) -> Sequence[int]:
        """Token ids so far."""
        return self.continuation.tokens

    @property
    def sequence(self) -> int:
        """The engine's sequence that it runs in."""
        assert self.slot is not None, "it waits"
        return self.slot.sequence

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        most = self.request.max_tokens
        return (_NO_LIMIT if most is None else most) - len(self.continuation.tokens)

    def fills(self, full_length: int) -> bool:
        """Return whether its next token has no room, however alone it is, in a slot that may hold so many."""
        return self.slot is not None and len(self.slot.tokens) >= full_length and self.pending == 1

    def shift(self) -> bool:
        """Drop half of its tokens that need not stay, or a part of an attention window, from its slot, too. False where
        none may be dropped."""
        stays = self.request.stays
        if self.window is not None:
            start, n_tokens = SINKS, self.window // _WINDOW_PARTS
        else:
            start = len(self.tokens) if stays is None else stays()
            n_tokens = behind(self.tokens, start + max(0, (len(self.tokens) - 1 - start) // 2)) - start
        if self.slot is not None and n_tokens:
            self.slot.drop(start, n_tokens)
        del self.tokens[start : start + n_tokens]
        self.dropped_tokens += n_tokens
        return n_tokens > 0

    def preempt(self, *, exact: bool) -> None:
        """Wait again, for another engine. exact: as `CacheUse.exact`."""
        self.release_remote()
        slot, former = self.slot, self.former
        # Another engine may be lost before it holds what the first one held.
        most = 1 if exact or former is None else common_prefix(former.tokens, self.tokens)
        if slot is not None and len(slot.tokens) >= max(1, most):
            self.former = slot.former()
        self.slot = None

    def release_remote(self) -> None:
        """Let the placement of prompts forget its keys and values: all of them are here, or nobody needs them."""
        if self.remote is not None:
            self.remote.release()
            self.remote = None

    @property
    def has_pending_media(self) -> bool:
        """True if rows of pictures or sounds are still to be submitted."""
        return bool(self.request.media) and has_rows(self.tokens[len(self.tokens) - self.pending :])

    def tell_prefill(self) -> None:
        """Say how far the prompt is, until the answer begins."""
        if self.request.on_prefill is not None and not self.answer:
            self.request.on_prefill(self.to_prefill - self.pending, self.to_prefill)

    @property
    def pending(self) -> int:
        """Tokens of its history that were not submitted yet; below 0 where drafts were submitted behind it."""
        assert self.slot is not None
        return len(self.tokens) - len(self.slot.tokens)


def only_background(*queues: Iterable[Running]) -> bool:
    """Return True if there are no requests but those in the background."""
    for queue in queues:
        for running in queue:
            if not running.request.background:
                return False
    return True


def check_window(engine: TextEngine) -> None:
    """EngineError where an attention window is set and the model cannot drop tokens in place."""
    if engine.attention_window is not None and not engine.can_shift:
        raise EngineError(
            f"{engine.path.name} cannot have an attention window: it has windows of its own, recurrent layers or"
            " positions that are not rotations, so nothing can be dropped in place; leave attention_window out"
        )


def windowed(prompt: Sequence[int], window: int) -> Sequence[int]:
    """Return the first tokens of a prompt, and as many of its last ones as leave room for some of an answer."""
    n_last = window - window // _WINDOW_PARTS
    return prompt if len(prompt) <= SINKS + n_last else [*prompt[:SINKS], *prompt[-n_last:]]


def prepare(number: int, request: Request, engine: TextEngine, given_up: Callable[[], bool]) -> Running:
    """A request that can run on an engine. The errors of `Scheduler.prepare`."""
    if engine.attention_window is not None:
        request = replace(request, prompt=windowed(request.prompt, engine.attention_window))
        if request.max_tokens is None:  # no context ends it
            request = replace(request, max_tokens=engine.context)
    prompt, most = request.prompt, request.max_tokens
    if most is not None and most < 1:
        raise SamplingError(f"max_tokens is {most}: an answer has 1 token or more")
    if most is not None and request.sampling.min_tokens > most:
        raise SamplingError(f"min_tokens is {request.sampling.min_tokens}, and max_tokens {most}: it must not be more")
    check_media(request.media, engine)
    scales_of(engine.adapters, request.adapters)  # for its errors, before anything is made
    if most is None or request.stays is not None or engine.attention_window is not None:
        check_prompt(prompt, engine)
    elif not 0 < len(prompt) + most <= engine.context or not prompt:
        raise ContextFull(
            f"request {number} has {len(prompt)} tokens and may get {most}; the context holds {engine.context}"
        )
    continuation = Continuation(engine.model, request, given_up)
    try:
        continuation.follow(request.generated)
        return Running(number, continuation, engine.adapters, engine.attention_window)
    except BaseException:
        continuation.close()
        raise


def check_media(media: Sequence[EmbeddingRows], engine: TextEngine) -> None:
    """MediaError where an engine cannot take a picture."""
    if media and (problem := getattr(engine, "media_problem", "")):
        raise MediaError(problem)
    if media and engine.attention_window is not None:
        raise MediaError("an attention window drops tokens, and would cut a picture; leave one of them out")
    most = max((len(rows.embeddings) for rows in media if not rows.causal), default=0)
    if most > engine.batch:
        raise MediaError(
            f"a picture has {most} rows here, which must be in one batch, and a batch has {engine.batch}; use a larger"
            " batch"
        )
