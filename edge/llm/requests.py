"""Requests of a scheduler with their progress, and the events that report tokens and ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Natural logarithms of probabilities for one token, before sampling options change them."""

    chosen: float  # log probability of the chosen token
    alternatives: tuple[tuple[int, float], ...]  # (token id, log probability), most likely first


def token_logprobs(logits: NDArray[np.float32], token: int, n_alternatives: int) -> TokenLogprobs:
    """Return the log probabilities of the chosen token, and of the `n_alternatives` most likely ones. logits:
    [n_vocab].
    """
    largest = float(logits.max())
    log_sum = largest + float(np.log(np.exp(logits.astype(np.float64) - largest).sum()))
    n = min(n_alternatives, len(logits))
    greatest = np.argpartition(-logits, n - 1)[:n] if n else np.empty(0, np.int64)
    ordered = sorted((-float(logits[i]), int(i)) for i in greatest)
    return TokenLogprobs(float(logits[token]) - log_sum, tuple((i, -negative - log_sum) for negative, i in ordered))


_WINDOW_PARTS = 8  # an attention window drops 1/8 of its tokens at a time, because each drop moves all keys


@dataclass  # a frozen dataclass takes three times as long to create, for each token
class Event:
    """A token of one request, or the request's end."""

    request: int  # number of the request, as returned by `add`
    token_id: int | None  # None if the event only reports the end
    text: str  # text that is final now; may be empty while a character, a mark or a stop string is incomplete
    finish_reason: str | None  # "stop", "length", "repetition", "cancelled", "error"; None before the end
    logprobs: TokenLogprobs | None = None
    stop_string: str | None = None  # stop string that ended the request
    cached_tokens: int = 0  # prompt tokens that did not have to be computed
    error: SamplingError | MediaError | None = None  # reason for finish_reason "error"
    thought: str = ""  # new text of the model's thought, not part of `text`
    thought_tokens: int = 0  # thought tokens of the response so far


class RequestState:
    """A request in the scheduler, with its response so far."""

    def __init__(
        self,
        number: int,
        continuation: Continuation,
        adapters: Sequence[CheckedAdapter],
        window: int | None = None,
    ) -> None:
        """adapters, window: adapters and attention window of the engine."""
        self.window, request = window, continuation.request
        self.number, self.request, self.continuation = number, request, continuation
        self.adapters = scales_of(adapters, request.adapters)
        self.namespace = namespace_with(request.namespace, adapters, self.adapters)
        self.tokens = [*request.prompt, *continuation.tokens]  # history without tokens dropped by context shifts
        self.slot: Slot | None = None  # None while the request waits
        self.former: Former | None = None  # its slot on the engine before a replacement
        # Its prompt on the prefill placement, until all of its KV cache has arrived.
        self.remote: RemotePrompt | None = None
        self.ended = False
        self.to_prefill = 0  # tokens of its history to compute, at its admission
        self.cached_tokens: int | None = None  # prompt tokens in the cache; None before the first admission
        self.restored_tokens = self.dropped_tokens = 0
        self.added_at = 0.0  # time of enqueueing, by the scheduler's clock
        self.token_at: float | None = None  # time of its last token, by the same clock; None before the first one
        self.prompt_rows_at = 0  # total prompt rows of all requests submitted by then
        self.prefilled_at = 0.0  # time of its first logits, by time.perf_counter

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the prompt."""
        return self.request.prompt

    @property
    def answer(self) -> Sequence[int]:
        """Token ids of the response so far."""
        return self.continuation.tokens

    @property
    def sequence(self) -> int:
        """The engine's sequence that the request uses."""
        assert self.slot is not None, "it waits"
        return self.slot.sequence

    @property
    def left(self) -> int:
        """Number of tokens that the request may still get."""
        most = self.request.max_tokens
        return (_NO_LIMIT if most is None else most) - len(self.continuation.tokens)

    def fills(self, full_length: int) -> bool:
        """Return True if its slot, which holds up to `full_length` tokens, has no room for its next token."""
        return self.slot is not None and len(self.slot.tokens) >= full_length and self.pending == 1

    def shift(self) -> bool:
        """Drop half of the tokens that need not stay, or a part of an attention window, also from the slot. Return
        False if no token may be dropped.
        """
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
        """Release the slot, because another engine takes over. exact: as `CacheUse.exact`."""
        self.release_remote()
        slot, former = self.slot, self.former
        # The replacement may be lost before it holds as much as the first engine did.
        most = 1 if exact or former is None else common_prefix(former.tokens, self.tokens)
        if slot is not None and len(slot.tokens) >= max(1, most):
            self.former = slot.former()
        self.slot = None

    def release_remote(self) -> None:
        """Let the prefill placement drop the prompt's KV cache, because it has arrived or is no longer needed."""
        if self.remote is not None:
            self.remote.release()
            self.remote = None

    @property
    def has_pending_media(self) -> bool:
        """True if rows of pictures or sounds have not been submitted."""
        return bool(self.request.media) and has_rows(self.tokens[len(self.tokens) - self.pending :])

    def tell_prefill(self) -> None:
        """Report prefill progress until the first token of the response."""
        if self.request.on_prefill is not None and not self.answer:
            self.request.on_prefill(self.to_prefill - self.pending, self.to_prefill)

    @property
    def pending(self) -> int:
        """Number of tokens of the history that were not submitted; negative if drafts were submitted after it."""
        assert self.slot is not None
        return len(self.tokens) - len(self.slot.tokens)


def check_window(engine: TextEngine) -> None:
    """Raise EngineError if an attention window is set, but the model cannot drop tokens in place."""
    if engine.attention_window is not None and not engine.can_shift:
        raise EngineError(
            f"{engine.path.name} cannot have an attention window: it has windows of its own, recurrent layers or"
            " positions that are not rotations, so nothing can be dropped in place; leave attention_window out"
        )


def windowed(prompt: Sequence[int], window: int) -> Sequence[int]:
    """Return the first tokens of a prompt, and as many of its last tokens as leave room for a response."""
    n_last = window - window // _WINDOW_PARTS
    return prompt if len(prompt) <= SINKS + n_last else [*prompt[:SINKS], *prompt[-n_last:]]


def prepare(number: int, request: Request, engine: TextEngine, given_up: Callable[[], bool]) -> RequestState:
    """Return a request that is ready for an engine. Raises the errors of `Scheduler.prepare`."""
    if engine.attention_window is not None:
        request = replace(request, prompt=windowed(request.prompt, engine.attention_window))
        if request.max_tokens is None:  # a full context does not end it
            request = replace(request, max_tokens=engine.context)
    prompt, most = request.prompt, request.max_tokens
    if most is not None and most < 1:
        raise SamplingError(f"max_tokens is {most}: it must be 1 or more")
    if most is not None and request.sampling.min_tokens > most:
        raise SamplingError(
            f"min_tokens is {request.sampling.min_tokens}, but must not be more than max_tokens, {most}"
        )
    check_media(request.media, engine)
    scales_of(engine.adapters, request.adapters)  # raises its errors before anything is created
    if most is None or request.stays is not None or engine.attention_window is not None:
        check_prompt(prompt, engine)
    elif not 0 < len(prompt) + most <= engine.context or not prompt:
        raise ContextFull(
            f"request {number} has {len(prompt)} prompt tokens and may generate {most}; the context holds"
            f" {engine.context}"
        )
    continuation = Continuation(engine.model, request, given_up)
    try:
        continuation.follow(request.generated)
        return RequestState(number, continuation, engine.adapters, engine.attention_window)
    except BaseException:
        continuation.close()
        raise


def check_media(media: Sequence[EmbeddingRows], engine: TextEngine) -> None:
    """Raise MediaError if the engine cannot process these pictures or sounds."""
    if media and engine.media_problem:
        raise MediaError(engine.media_problem)
    if media and engine.attention_window is not None:
        raise MediaError("an attention window drops tokens, and would cut a picture; leave one of them out")
    most = max((len(rows.embeddings) for rows in media if not rows.causal), default=0)
    if most > engine.batch:
        raise MediaError(
            f"a picture becomes {most} rows, which must fit into one batch of {engine.batch}; use a larger batch"
        )
