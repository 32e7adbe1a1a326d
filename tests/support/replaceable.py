"""Engines for tests that another engine can replace."""

from collections.abc import Callable
from typing import Any

from edge.errors import EngineError
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.parallel.replaceable import ReplaceableEngine
from edge.parallel.replacements import Replacements


def replaceable(engine: TextEngine, recovered: Callable[[Exception], TextEngine]) -> ReplaceableEngine:
    """Return an engine that `recovered` replaces after a loss."""
    return ReplaceableEngine(engine, engine.model, Replacements(engine, recovered))


class Mortal(Engine):
    """An engine that is lost for good at its `lives`th step."""

    lives = 1 << 30

    @property
    def failed(self) -> Exception | None:
        return EngineError("lost") if self.lives <= 0 else None

    def submit(self, *args: Any, **how: Any) -> None:
        self.lives -= 1
        if self.failed is not None:
            raise self.failed
        super().submit(*args, **how)
