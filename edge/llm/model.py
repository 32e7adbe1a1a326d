"""A loaded language model, as programs use it. The interface is the same for one device and for several."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from edge.arguments import checked
from edge.closing import Closing
from edge.llm.continuation import Request
from edge.llm.generate import Response, generate
from edge.llm.interface import Drafter, TextEngine
from edge.llm.pieces import Pieces, in_thread
from edge.llm.requests import Event
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.weights.adapter import Scales, scales_by_name


class RequestStream(Closing):
    """Concurrent requests on one model. Iterate over it for their events; add and cancel requests at any time.

    It is a context manager; leaving it cancels incomplete requests.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._scheduler = Scheduler(model.engine, keep=True)
        self._changes: deque[Callable[[], object]] = deque()  # made before the next step, which may run in a thread
        self._events: deque[Event] = deque()

    @checked
    def add(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        adapters: Mapping[str, float] | None = None,
    ) -> int:
        """Add a request that continues a text or token ids, and return its number, which its events carry.

        The request waits while all sequences are in use.
        adapters: as for `Model.generate`.
        Raises ContextFull if the request alone does not fit.
        """
        tokens = self._model.prompt_tokens(prompt)
        scales = self._model.scales(adapters)
        request = Request(tokens, max_tokens, sampling or SamplingParams(), stop, adapters=scales)
        state = self._scheduler.prepare(request)
        self._changes.append(partial(self._scheduler.enqueue, state))
        return state.number

    @checked
    def cancel(self, number: int) -> None:
        """End a request. An event with the reason "cancelled" follows, unless the request has ended already."""
        self._changes.append(partial(self._scheduler.cancel, number))

    def __iter__(self) -> Iterator[Event]:
        """Yield the events of the requests as they come, until all requests have ended."""
        while self._events or self._is_busy:
            if not self._events:
                self._step()
            while self._events:
                yield self._events.popleft()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Same for `async for`: each step runs in a thread. A cancelled task waits for its step and loses no event."""
        with ThreadPoolExecutor(1, "edge-requests") as thread:
            while self._events or self._is_busy:
                if not self._events:
                    await in_thread(thread, self._step)
                while self._events:
                    yield self._events.popleft()

    def close(self) -> None:
        """Cancel incomplete requests."""
        self._changes.clear()
        self._events.clear()
        self._scheduler.close()

    @property
    def _is_busy(self) -> bool:
        return bool(self._changes) or self._scheduler.busy

    def _step(self) -> None:
        """Make the changes that were requested, and run one step."""
        while self._changes:
            self._changes.popleft()()
        if self._scheduler.busy:
            self._events += self._scheduler.step()


class Model(Closing):
    """A loaded language model. `close()` unloads it on all of its devices; it is also a context manager."""

    def __init__(self, engine: TextEngine, close: Callable[[], None], drafter: Drafter | None = None) -> None:
        """close: ends the engine and everything that belongs to it. drafter: drafts tokens of single answers."""
        self.engine = engine
        self.drafter = drafter
        self._close = close
        self._scheduler = Scheduler(engine, slots=1, keep=True, drafter=drafter)

    def __repr__(self) -> str:
        return f"<edge.Model {self.engine.path.name}, context {self.engine.context}>"

    @checked
    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text.

        add_special: add the tokens that the model expects around a text (BOS, EOS).
        parse_special: text such as "<|im_start|>" becomes a control token; do not use it for untrusted text.
        """
        return self.engine.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    @checked
    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become U+FFFD."""
        self._check_ids("tokens", tokens)
        return b"".join(self.engine.model.piece(token) for token in tokens).decode(errors="replace")

    @checked
    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        adapters: Mapping[str, float] | None = None,
    ) -> Pieces[Response]:
        """Continue a text or token ids without a chat template, and yield responses.

        max_tokens: None: until the context is full.
        stop: texts that end the answer and are not part of it.
        adapters: scales of LoRA adapters by name; None: the scales of loading.
        Raises ContextFull if the prompt leaves no room, SamplingError if an option is invalid. Only one generation or
        conversation runs at a time; `stream` runs several.
        """
        tokens = self.prompt_tokens(prompt)
        sampling, scales = sampling or SamplingParams(), self.scales(adapters)
        request = Request(tokens, max_tokens, sampling, stop, adapters=scales)
        return Pieces(generate(self._scheduler, request), self.engine)

    def prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a prompt. Raises ValueError if an id is unknown."""
        if isinstance(prompt, str):
            return self.tokenize(prompt)
        self._check_ids("prompt", prompt)
        return list(prompt)

    def _check_ids(self, name: str, tokens: Sequence[int]) -> None:
        most = self.engine.model.n_vocab - 1
        for token in tokens:
            if not 0 <= token <= most:
                raise ValueError(f"{name} has the token id {token}; ids of this model are from 0 to {most}")

    def scales(self, adapters: Mapping[str, float] | None) -> Scales | None:
        """Return the scales of adapters by name, in the form that requests have. Raises EngineError for an unknown
        name."""
        return None if adapters is None else scales_by_name(self.engine.adapters, adapters)

    def stream(self) -> RequestStream:
        """Return a stream of concurrent requests. Load the model with as many `sequences` as shall run concurrently."""
        return RequestStream(self)

    def close(self) -> None:
        """Unload the model."""
        self._close()
