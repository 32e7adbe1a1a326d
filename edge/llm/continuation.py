"""One answer in the making: its tokens are chosen here, whoever computes the logits, and here it is known to end."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edge.bounds.repetition import Repetition, RepetitionDetector
from edge.constraints.constraint import never_given_up
from edge.errors import SamplingError
from edge.llama.llama import Model
from edge.llm.sampler import LogitsRequest, SamplingParams, TokenSampler
from quant.text import overlap


class Continuation:
    """Continues one prompt, token by token; close it at the end."""

    def __init__(
        self,
        model: Model,
        prompt: Sequence[int],  # token ids; penalties look back into them
        sampling: SamplingParams,
        *,
        max_tokens: int | None = None,  # None: until somebody else ends it
        stop: Sequence[str] = (),  # more of them than `sampling` has, such as those of a template
        ends: bool = True,  # False: also after a token that ends a text, for measuring
        given_up: Callable[[], bool] = never_given_up,  # as of a TokenSampler
        sampler: TokenSampler | None = None,  # None: one of these options
    ) -> None:
        """SamplingError where the sampling options, the grammar or a stop string cannot be used."""
        stop = (*stop, *sampling.stop)
        if any(not s for s in stop):
            raise SamplingError("a stop string must not be empty")
        self._model, self._max_tokens, self._ends = model, max_tokens, ends
        self._sampler = sampler or TokenSampler(model, sampling, given_up)
        for token in prompt[-sampling.looks_back :]:
            self._sampler.accept(token, generated=False)
        self._detector = RepetitionDetector() if ends and not sampling.allow_repetition else None
        self._text = TextStream(stop)
        self.tokens: list[int] = []  # chosen so far; one that ends a text is not among them
        self.finish_reason: str | None = None  # "stop", "length", "repetition", or None while it goes on
        self.repetition: Repetition | None = None  # the loop that ended it

    def logits_request(self, drafts: Sequence[int] = ()) -> LogitsRequest:
        """Which logits suffice behind its tokens so far, and behind each of these, as if they came."""
        return self._sampler.logits_request(drafts)

    def choose(self, logits: NDArray[np.float32]) -> str | None:
        """Choose the next token by logits [n_vocab], and the text that is certain now; None: a token ended the text."""
        token = self._sampler.choose(logits)
        if self._ends and self._model.is_end(token):
            self.finish_reason = "stop"
            return None
        text = self._add(token)
        if self._text.stopped is not None:
            self.finish_reason = "stop"
        elif len(self.tokens) == self._max_tokens:
            self.finish_reason = "length"
        elif self.repetition is not None:
            self.finish_reason = "repetition"
        return text

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens that were chosen, and whose text was sent, elsewhere."""
        for token in tokens:
            self._add(token)

    def _add(self, token: int) -> str:
        """Append a token; the text that is certain now."""
        self._sampler.accept(token)
        self.tokens.append(token)
        if self._detector is not None:
            self.repetition = self._detector.add(token)
        return self._text.push(self._model.piece(token))

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it; None where none did."""
        return self._text.stopped

    def rest(self) -> str:
        """The text that was held back, once no token follows."""
        return self._text.rest()

    def close(self) -> None:
        """Free the samplers."""
        self._sampler.close()


class TextStream:
    """Token bytes in, text out: whole UTF-8 characters, and nothing of a stop string, even when it comes in pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""  # may be the beginning of a stop string
        self.stopped: str | None = None  # the stop string that is complete

    def push(self, piece: bytes) -> str:
        """The text that is certain after this piece. Sets `stopped` when a stop string is complete."""
        self._pending += self._decoder.decode(piece)
        places = [(at, s) for s in self._stop if (at := self._pending.find(s)) >= 0]
        if places:
            at, self.stopped = min(places)
            return self._release(at, drop_rest=True)
        longest = max((overlap(self._pending, s) for s in self._stop), default=0)
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
