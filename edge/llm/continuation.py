"""A request and its answer in the making: its tokens are chosen here, whoever computes the logits, and here it ends."""

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
"""(tokens done, tokens to do): called before the first chunk of a prompt is computed and after each."""


@dataclass(frozen=True)
class Request:
    """A prompt to be continued."""

    prompt: Sequence[int]  # token ids
    max_tokens: int | None  # None: until the context is full
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    stop: Sequence[str] = ()  # strings that end the answer; the token that completes one is its last
    ends: bool = True  # False: also after a token that ends a text, for measuring
    thinking: Thinking | None = None  # None: all of the answer is its text
    marks: Sequence[str] = ()  # of calls: their control tokens have text in the answer
    logprobs: int | None = None  # how many alternatives are reported with each token; None: no probabilities at all
    generated: Sequence[int] = ()  # the beginning of the answer, where it was sent already
    namespace: str = ""  # of those whose prompts it may share keys and values with
    adapters: Scales | None = None  # scale of each adapter; None: those that the engine's options say
    in_place: bool = False  # a stretch that the prompt lacks of what is held is dropped in place, and the rest shifted
    stays: Callable[[], int] | None = None  # tokens that a context shift keeps; None: the answer ends in a full context
    on_prefill: PrefillProgress | None = None
    background: bool = False  # runs while no other request does, in short steps, and is preempted by the next one
    media: Sequence[EmbeddingRows] = ()  # pictures and sounds that its prompt has


class Continuation:
    """Continues the prompt of a request, token by token; close it at the end."""

    def __init__(
        self,
        model: Model,
        request: Request,
        given_up: Callable[[], bool] = never_given_up,
        sampler: TokenSampler | None = None,
    ) -> None:
        """given_up: as of a TokenSampler; sampler: None: one of the request's options. SamplingError where the sampling
        options, the grammar or a stop string cannot be used."""
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
        self._text = TextStream(stop)  # of the answer itself
        self._characters = TextStream(())
        self._thoughts: ThoughtTracker | None = None
        marks = request.marks
        if thinking is not None:
            marks = (*marks, *thinking.form.marks)
            self._thoughts = ThoughtTracker(model, thinking, constrained=self._sampler.is_constrained)
        ids = {token for mark in marks for token in model.tokenize(mark, add_special=False, parse_special=True)}
        self._named = {token for token in ids if not model.piece(token)}  # control tokens that have text here
        self.tokens: list[int] = []  # chosen so far; one that ends a text is not among them
        self.finish_reason: str | None = None  # "stop", "length", "repetition", or None while it goes on
        self.repetition: Repetition | None = None  # the loop that ended it

    @property
    def thought_tokens(self) -> int:
        """Tokens of thoughts so far, with their marks."""
        return self._thoughts.tokens if self._thoughts else 0

    @property
    def is_constrained(self) -> bool:
        """True if a constraint holds for its answer."""
        return self._sampler.is_constrained

    def logits_request(self, drafts: Sequence[int] = ()) -> LogitsRequest:
        """Return the logits that its next token needs, and those that each token after these drafts would need."""
        if self._thoughts is None or self._thoughts.state == "answer" or not self._sampler.is_constrained:
            return self._sampler.logits_request(drafts)
        if drafts:  # the constraint may begin behind any of them
            return LogitsRequest()
        return self._sampler.logits_request(constrained=self._thoughts.state == "start")

    def choose(self, logits: NDArray[np.float32]) -> Split | None:
        """Choose the next token by logits [n_vocab]; what is certain now. None: a token ended the text."""
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
        """False while tokens that end a text, stop strings and repetitions end nothing."""
        sampling = self.request.sampling
        return not sampling.ignore_eos and len(self.tokens) >= sampling.min_tokens

    def _choice(self, logits: NDArray[np.float32]) -> int | None:
        """Return the next token; None if it ends the text."""
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
        """Go on behind tokens that were chosen, and whose text was sent, elsewhere."""
        for token in tokens:
            if self._thoughts is not None:
                self._thoughts.forced(is_whole=self._characters.is_whole)
            self._add(token)

    def _add(self, token: int) -> Split:
        """Append a token. Return the text that is certain now."""
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
        """The stop string that ended it; None where none did."""
        return self._text.stopped

    def rest(self) -> Split:
        """Return what was held back, once no token follows."""
        if self._thoughts is None:
            return Split(text=self._text.rest())
        thought, text = self._thoughts.add_rest(self._characters.rest())
        return Split(thought, "" if self._text.stopped is not None else self._text.add(text) + self._text.rest())

    def close(self) -> None:
        """Free the samplers."""
        self._sampler.close()


class TextStream:
    """Token bytes in, text out: whole UTF-8 characters, and nothing of a stop string, even when it comes in pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._first_characters = {s[0] for s in stop}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""  # may be the beginning of a stop string
        self.looks_for_stops = True  # False: a stop string is text
        self.stopped: str | None = None  # the stop string that is complete

    @property
    def is_whole(self) -> bool:
        """True if no character is incomplete."""
        return not self._decoder.getstate()[0]

    def push(self, piece: bytes) -> str:
        """The text that is certain after this piece. Sets `stopped` when a stop string is complete."""
        return self.add(self._decoder.decode(piece))

    def add(self, text: str) -> str:
        """As `push`, of whole characters."""
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
        """Return the text that was held back, once nothing more can come."""
        if self.stopped is not None:
            return ""
        self._pending += self._decoder.decode(b"", final=True)
        return self._release(len(self._pending))

    def _release(self, length: int, *, drop_rest: bool = False) -> str:
        text, rest = self._pending[:length], self._pending[length:]
        self._pending = "" if drop_rest else rest
        return text
