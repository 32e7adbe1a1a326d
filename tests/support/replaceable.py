"""Engines that another one takes over from, for tests."""

from collections.abc import Callable

from edge.llm.interface import TextEngine
from edge.parallel.mirror import Mirror
from edge.parallel.replacements import ReplaceableEngine, Replacements


def replaceable(
    engine: TextEngine, recovered: Callable[[Exception], TextEngine], mirror: Mirror | None = None
) -> ReplaceableEngine:
    """This engine, with those that `recovered` gives in reserve."""
    return ReplaceableEngine(engine, engine.model, Replacements(engine, recovered, mirror))
