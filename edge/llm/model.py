"""A loaded language model as a program uses it: the same on one device and on many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from edge.llm.generate import Response, generate
from edge.llm.interface import TextEngine
from edge.llm.sampler import SamplingParams
from edge.llm.sequence import Session


class Model:
    """A language model, loaded. `close()` unloads it, on all of its devices; it is also a context manager."""

    def __init__(self, engine: TextEngine, close: Callable[[], None]) -> None:
        """close: what ends the engine and all that belongs to it."""
        self.engine = engine
        self._close = close
        self._session = Session(engine)

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """The token ids of a text. add_special: with the tokens that the model expects around one."""
        return self.engine.model.tokenize(text, add_special=add_special, parse_special=False)

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
    ) -> Iterator[Response]:
        """Continue a text or token ids as they are, without a chat template. Responses as they come.

        max_tokens: None goes on until the context is full. stop: texts that end it and are not part of it.
        ContextFull for a prompt that leaves no room; SamplingError for options that cannot be used. Only one
        generation or conversation runs at a time; `stream` runs several.
        """
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        return generate(self._session, tokens, sampling or SamplingParams(), max_tokens=max_tokens, stop=stop)

    def close(self) -> None:
        """Unload the model."""
        self._close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
