"""Requests of a scheduler, what it tells of them, and how far each is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge.errors import SamplingError
from edge.llm.continuation import Continuation
from edge.llm.sampler import SamplingParams
from edge.llm.slots import Slot


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one place of an answer, before any option of sampling changed them."""

    chosen: float  # of the token that was chosen
    alternatives: tuple[tuple[int, float], ...]  # (token id, its own), the likeliest first


def token_logprobs(logits: NDArray[np.float32], token: int, n_alternatives: int) -> TokenLogprobs:
    """Of the token chosen by logits [n_vocab], and of the `n_alternatives` likeliest ones."""
    largest = float(logits.max())
    log_sum = largest + float(np.log(np.exp(logits.astype(np.float64) - largest).sum()))
    n = min(n_alternatives, len(logits))
    likeliest = np.argpartition(-logits, n - 1)[:n] if n else np.empty(0, np.int64)
    ordered = sorted((-float(logits[i]), int(i)) for i in likeliest)
    return TokenLogprobs(float(logits[token]) - log_sum, tuple((i, -negative - log_sum) for negative, i in ordered))


@dataclass(frozen=True)
class Request:
    """A prompt to be continued."""

    prompt: Sequence[int]  # token ids
    max_tokens: int
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    stop: Sequence[str] = ()  # strings that end the answer; the token that completes one is its last
    ends: bool = True  # False: also after a token that ends a text, for measuring
    logprobs: int | None = None  # how many alternatives are told with each token; None: no probabilities at all
    generated: Sequence[int] = ()  # the beginning of the answer, where it was told already
    namespace: str = ""  # of those whose prompts it may share keys and values with


@dataclass(frozen=True)
class Event:
    """What came of one request in one step."""

    request: int  # its number, as `add` gave it
    token_id: int | None  # None where only its end is told
    text: str  # that is certain by now; may be empty while a character or a stop string is incomplete
    finish_reason: str | None  # "stop", "length", "repetition", "cancelled", "error"; None while it goes on
    logprobs: TokenLogprobs | None = None
    stop_string: str | None = None  # that ended it
    cached_tokens: int = 0  # of its prompt: that need not be computed
    error: SamplingError | None = None  # why its constraint cannot be followed any further


class Running:
    """A request that was added, and its answer."""

    def __init__(self, number: int, request: Request, continuation: Continuation) -> None:
        self.number, self.request, self.continuation = number, request, continuation
        self.slot: Slot | None = None  # None while it waits
        self.cached_tokens: int | None = None  # None until it was admitted for the first time
        self.cancelled = False
        self.guesses: Sequence[int] | None = None  # behind the token that is under way; None: it is not about guesses

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids."""
        return self.request.prompt

    @property
    def history(self) -> list[int]:
        """Its prompt, and its answer so far."""
        return [*self.request.prompt, *self.continuation.tokens]

    def part(self, start: int, n_tokens: int) -> list[int]:
        """So many tokens of its history from there on. Steps ask for few of a long one."""
        prompt, end = self.request.prompt, start + n_tokens
        answer = self.continuation.tokens[max(0, start - len(prompt)) : max(0, end - len(prompt))]
        return [*prompt[start:end], *answer]

    @property
    def length(self) -> int:
        """Tokens of its history."""
        return len(self.request.prompt) + len(self.continuation.tokens)

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        return self.request.max_tokens - len(self.continuation.tokens)

    @property
    def pending(self) -> int:
        """Tokens of its history that were not submitted yet."""
        assert self.slot is not None
        return self.length - len(self.slot.tokens)
