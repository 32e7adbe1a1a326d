"""A loaded language model as a program uses it: the same on one device and on many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from edge.adapters.adapter import Scales, scales_by_name
from edge.closing import Closing
from edge.llm.continuation import Request
from edge.llm.generate import Response, generate
from edge.llm.interface import Drafter, TextEngine
from edge.llm.requests import Event
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler


class RequestStream(Closing):
    """Requests on one model, answered together. Iterate over it for what comes of them; add and cancel meanwhile.

    It is a context manager; leaving it drops what is not complete.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._scheduler = Scheduler(model.engine, keep=True)

    def add(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        adapters: Mapping[str, float] | None = None,
    ) -> int:
        """Continue a text or token ids; the number that this request's events carry. It waits where all sequences are
        taken. adapters: as of `Model.generate`. ContextFull where it alone does not fit."""
        tokens = self._model.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        scales = self._model.scales(adapters)
        return self._scheduler.add(Request(tokens, max_tokens, sampling or SamplingParams(), stop, adapters=scales))

    def cancel(self, number: int) -> None:
        """End a request; an event with the reason "cancelled" follows, unless it has ended already."""
        self._scheduler.cancel(number)

    def __iter__(self) -> Iterator[Event]:
        """Events of the requests, as they come, until all have ended."""
        while self._scheduler.busy:
            yield from self._scheduler.step()

    def close(self) -> None:
        """Drop the requests that are not complete."""
        self._scheduler.close()


class Model(Closing):
    """A language model, loaded. `close()` unloads it, on all of its devices; it is also a context manager."""

    def __init__(self, engine: TextEngine, close: Callable[[], None], drafter: Drafter | None = None) -> None:
        """close: what ends the engine and all that belongs to it. drafter: drafts tokens of single answers."""
        self.engine = engine
        self.drafter = drafter
        self._close = close
        self._scheduler = Scheduler(engine, slots=1, keep=True, drafter=drafter)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text. add_special: with the tokens that the model expects around one (BOS, EOS).
        parse_special: text such as "<|im_start|>" becomes its control token; else it is text like any other, which is
        what a text from somebody else should be."""
        return self.engine.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.engine.model.piece(token) for token in tokens).decode(errors="replace")

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        adapters: Mapping[str, float] | None = None,
    ) -> Iterator[Response]:
        """Continue a text or token ids as they are, without a chat template. Responses as they come.

        max_tokens: None goes on until the context is full. stop: texts that end it and are not part of it. adapters:
        the scale of each LoRA adapter that is to be used, by its name; None: as the model was loaded.
        ContextFull for a prompt that leaves no room; SamplingError for options that cannot be used. Only one
        generation or conversation runs at a time; `stream` runs several.
        """
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        sampling, scales = sampling or SamplingParams(), self.scales(adapters)
        return generate(self._scheduler, Request(tokens, max_tokens, sampling, stop, adapters=scales))

    def scales(self, adapters: Mapping[str, float] | None) -> Scales | None:
        """Return the scales of adapters, by name, as requests have them. EngineError for an unknown name."""
        return None if adapters is None else scales_by_name(self.engine.adapters, adapters)

    def stream(self) -> RequestStream:
        """Several requests at once, which come and go while others are answered. Load the model with as many
        `sequences` as are to run at a time."""
        return RequestStream(self)

    def close(self) -> None:
        """Unload the model."""
        self._close()
