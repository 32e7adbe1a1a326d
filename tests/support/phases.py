"""An engine that generates and an engine that computes prompts, both in this process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from edge.errors import EngineError
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.parallel.prefiller import PrefillPlacement
from edge.parallel.replaceable import ReplaceableEngine
from edge.parallel.replacements import Replacements
from tests.support.helpers import TIMEOUT_S


class Counting(Engine):
    """An engine that notes the rows of each step, and is lost at one of them."""

    def __init__(self, path: Path, options: EngineOptions, lives: int = 1 << 30) -> None:
        super().__init__(path, options)
        self.computed: list[int] = []
        self.lives = lives
        self.gate = Event()  # steps wait for it
        self.gate.set()

    @property
    def failed(self) -> Exception | None:
        return EngineError("it was lost") if self.lives < 0 else None

    def submit(self, tokens: Any, *arguments: Any, **how: Any) -> None:
        assert self.gate.wait(TIMEOUT_S)
        self.lives -= 1
        if self.failed is not None:
            raise self.failed
        self.computed.append(len(tokens))
        super().submit(tokens, *arguments, **how)

    def kv_remove(self, *arguments: int) -> bool:
        if self.failed is not None:
            raise self.failed
        return super().kv_remove(*arguments)


class Phases:
    """Two placements, and what came of them."""

    def __init__(self, engine: ReplaceableEngine, placement: PrefillPlacement, lost: list[Exception]) -> None:
        self.engine, self.placement, self.lost = engine, placement, lost


@contextmanager
def phases(
    decode: TextEngine,
    prefill: TextEngine,
    least: int = 1,
    recovered: Callable[[Exception], TextEngine] | None = None,
    break_off: Callable[[], None] = lambda: None,
) -> Iterator[Phases]:
    """`decode` generates, `prefill` computes prompts of `least` new tokens and more."""

    def nobody(error: Exception) -> TextEngine:
        raise error

    lost: list[Exception] = []
    with PrefillPlacement(prefill, least, lost.append, break_off) as placement:

        def another(error: Exception) -> TextEngine:
            engine = (recovered or nobody)(error)
            engine.states.prefiller = placement
            return engine

        decode.states.prefiller = placement
        replacements = Replacements(decode, another)
        yield Phases(ReplaceableEngine(decode, decode.model, replacements), placement, lost)
