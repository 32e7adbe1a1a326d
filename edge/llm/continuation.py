"""A request and its response in progress: tokens are chosen from logits, text is produced, and the end is detected."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge.errors import SamplingError
from edge.llama.llama import Model
from edge.llm.sampler import LogitsRequest, SamplingParams, TokenSampler
from edge.media.media import EmbeddingRows, text_of
from edge.text.constraints.constraint import never_given_up
from edge.text.repetition import Repetition, RepetitionDetector
from edge.text.thinking_splitter import Split
from edge.text.thinking_tracker import Thinking, ThoughtTracker
from edge.weights.adapter import Scales
from quant.text import overlap

PrefillProgress = Callable[[int, int], None]
"""Called as (tokens done, tokens to do) before the first chunk of a prompt and after each chunk."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue."""

    prompt: Sequence[int]  # token ids
    max_tokens: int | None  # None: until the context is full
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    stop: Sequence[str] = ()  # strings that end the response; the token that completes one is the last token
    ends: bool = True  # False: continue after an end-of-text token, for measurements
    thinking: Thinking | None = None  # None: the whole response is text
    marks: Sequence[str] = ()  # marks of tool calls, whose control tokens appear as text
    logprobs: int | None = None  # number of alternatives reported for each token; None: no probabilities
    generated: Sequence[int] = ()  # beginning of the response that was sent already
    namespace: str = ""  # name space of prompts that may share KV cache with this one
    adapters: Scales | None = None  # scale of each adapter; None: the scales of the engine's options
    # Tokens of the cache that the prompt lacks are dropped in place, and later tokens are shifted.
    in_place: bool = False
    # Returns the number of tokens that a context shift keeps; None: a full context ends the response.
    stays: Callable[[], int] | None = None
    on_prefill: PrefillProgress | None = None
    # Requests with lower values begin first: the priority, and the place in a fair order of clients.
    order: tuple[int, float] = (0, 0.0)
    client: str = ""  # while several clients have requests, each one leaves a slot to the others
    background: bool = False  # runs only without other requests, in short steps, and is preempted by the next request
    media: Sequence[EmbeddingRows] = ()  # pictures and sounds in the prompt


class Continuation:
    """Continues the prompt of a request token by token. Close it at the end."""

    def __init__(
        self,
        model: Model,
        request: Request,
        given_up: Callable[[], bool] = never_given_up,
        sampler: TokenSampler | None = None,
    ) -> None:
        """given_up: as for TokenSampler.
        sampler: None: create one from the request's sampling options.

        Raises SamplingError if the sampling options, the grammar or a stop string are invalid.
        """
        sampling, thinking = request.sampling, request.thinking
        stop = (*request.stop, *sampling.stop)
        if any(not s for s in stop):
            raise SamplingError("a stop string must not be empty")
        self.request, self._model = request, model
        self._sampler = sampler or TokenSampler(model, sampling, given_up)
        prompt = text_of(request.prompt) if request.media else request.prompt
        for token in prompt[-sampling.looks_back :]:
            self._sampler.accept(token, generated=False)
        self._detector = RepetitionDetector() if request.ends and not sampling.allow_repetition else None
        self._text = TextStream(stop)  # text of the answer, without thoughts
        self._characters = TextStream(())
        self._thoughts: ThoughtTracker | None = None
        marks = request.marks
        if thinking is not None:
            marks = (*marks, *thinking.form.marks)
            self._thoughts = ThoughtTracker(model, thinking, constrained=self._sampler.is_constrained)
        ids = {token for mark in marks for token in model.tokenize(mark, add_special=False, parse_special=True)}
        self._named = {token for token in ids if not model.piece(token)}  # control tokens that appear as text
        self.tokens: list[int] = []  # tokens chosen so far, without an end-of-text token
        self.finish_reason: str | None = None  # "stop", "length", "repetition", or None before the end
        self.repetition: Repetition | None = None  # repetition that ended the response

    @property
    def thought_tokens(self) -> int:
        """Number of thought tokens so far, including their marks."""
        return self._thoughts.tokens if self._thoughts else 0

    @property
    def is_constrained(self) -> bool:
        """True if a constraint applies to the answer."""
        return self._sampler.is_constrained

    def logits_request(self, drafts: Sequence[int] = ()) -> LogitsRequest:
        """Return the logits needed for the next token, and for the tokens after each of these drafts."""
        if self._thoughts is None or self._thoughts.state == "answer" or not self._sampler.is_constrained:
            return self._sampler.logits_request(drafts)
        if drafts:  # the constraint may begin after any of the drafts
            return LogitsRequest()
        return self._sampler.logits_request(constrained=self._thoughts.state == "start")

    def choose(self, logits: NDArray[np.float32]) -> Split | None:
        """Choose the next token from logits [n_vocab]. Return the text that is final now, or None if the token
        ended the text.
        """
        token = self._choice(logits)
        if token is None:
            self.finish_reason = "stop"
            return None
        split = self._add(token)
        if self._text.stopped is not None:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.request.max_tokens:
            self.finish_reason = "length"
        elif self.repetition is not None and self._may_end:
            self.finish_reason = "repetition"
        return split

    @property
    def _may_end(self) -> bool:
        """False while end-of-text tokens, stop strings and repetitions do not end the response."""
        sampling = self.request.sampling
        return not sampling.ignore_eos and len(self.tokens) >= sampling.min_tokens

    def _choice(self, logits: NDArray[np.float32]) -> int | None:
        """Return the next token, or None if it ends the text."""
        thoughts, may_end = self._thoughts, self._may_end
        if thoughts is None:
            token = self._sampler.choose(logits, may_end=may_end)
        elif (forced := thoughts.forced(is_whole=self._characters.is_whole)) is not None:
            return forced
        elif thoughts.state == "start" and self._sampler.is_constrained:
            mark = thoughts.mark(self._sampler.choose(logits, constrained=False, may_end=may_end))
            token = self._sampler.choose(logits, may_end=may_end) if mark is None else mark
        else:
            token = self._sampler.choose(logits, constrained=thoughts.state == "answer", may_end=may_end)
        if not (self.request.ends and self._model.is_end(token)):
            return token
        return None if thoughts is None else thoughts.instead_of_end()

    def follow(self, tokens: Sequence[int]) -> None:
        """Continue after tokens that were chosen elsewhere, and whose text was sent already."""
        for token in tokens:
            if self._thoughts is not None:
                self._thoughts.forced(is_whole=self._characters.is_whole)
            self._add(token)

    def _add(self, token: int) -> Split:
        """Append a token. Return the text that is final now."""
        thoughts = self._thoughts
        self._sampler.accept(token, generated=thoughts is None or thoughts.is_answer(token))
        self.tokens.append(token)
        self._text.looks_for_stops = len(self.tokens) >= self.request.sampling.min_tokens
        if self._detector is not None:
            self.repetition = self._detector.add(token)
        piece = self._model.piece(token, special=token in self._named)
        if thoughts is None:
            return Split(text=self._text.push(piece))
        thought, text = thoughts.add(token, self._characters.push(piece))
        self._sampler.constrain(thoughts.unread)
        return Split(thought, self._text.add(text))

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the response, or None."""
        return self._text.stopped

    def rest(self) -> Split:
        """Return the text that was held back, after the last token."""
        if self._thoughts is None:
            return Split(text=self._text.rest())
        thought, text = self._thoughts.add_rest(self._characters.rest())
        return Split(thought, "" if self._text.stopped is not None else self._text.add(text) + self._text.rest())

    def close(self) -> None:
        """Free the samplers."""
        self._sampler.close()


class TextStream:
    """Converts token bytes to text. It returns whole UTF-8 characters and no part of a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._first_characters = {s[0] for s in stop}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""  # text that may be the beginning of a stop string
        self.looks_for_stops = True  # False: treat stop strings as text
        self.stopped: str | None = None  # the completed stop string

    @property
    def is_whole(self) -> bool:
        """True if there is no incomplete character."""
        return not self._decoder.getstate()[0]

    def push(self, piece: bytes) -> str:
        """Add token bytes. Return the text that is final now. Sets `stopped` if a stop string is complete."""
        return self.add(self._decoder.decode(piece))

    def add(self, text: str) -> str:
        """Same as `push`, for whole characters."""
        self._pending += text
        if not self.looks_for_stops or self._first_characters.isdisjoint(self._pending):
            return self._release(len(self._pending))
        places = [(at, s) for s in self._stop if (at := self._pending.find(s)) >= 0]
        if places:
            at, self.stopped = min(places)
            return self._release(at, drop_rest=True)
        longest = max(overlap(self._pending, s) for s in self._stop)
        return self._release(len(self._pending) - longest)

    def rest(self) -> str:
        """Return the text that was held back, after the last token."""
        if self.stopped is not None:
            return ""
        self._pending += self._decoder.decode(b"", final=True)
        return self._release(len(self._pending))

    def _release(self, length: int, *, drop_rest: bool = False) -> str:
        text, rest = self._pending[:length], self._pending[length:]
        self._pending = "" if drop_rest else rest
        return text
