"""A conversation's keys and values from one engine to another one of the same model, however each is spread."""

from __future__ import annotations

from collections.abc import Callable

from edge.errors import EngineError
from edge.llm.interface import TextEngine
from edge.llm.sequence import Session, holds, take
from partition.errors import StateError
from partition.plan.plan import Range


def move(
    session: Session, engine: TextEngine, sequence: int = 0, on_progress: Callable[[int, int], None] | None = None
) -> Session:
    """A session of `engine` that holds what `session` holds, so that nothing is computed again. Both remain usable.

    A block of tokens at a time is in memory. on_progress is called with (tokens moved, tokens to move). Errors leave
    the sequence of `engine` empty: EngineError where there is no room; CannotSlice where keys
    and values of this model cannot be told apart; StateError where some are gone, behind an attention window, or mean
    something else in a context of another length. Whoever moves computes the tokens again then.
    """
    source, n_tokens = session.engine, len(session.tokens)
    if not holds(source, session.sequence, session):
        raise EngineError("something else used the sequence since, so its keys and values are gone; compute them again")
    if n_tokens > engine.context:
        raise EngineError(f"{n_tokens} tokens do not fit in a context of {engine.context}; use a larger --context")
    if source.states.factors != engine.states.factors:
        raise StateError(
            f"contexts of {source.context} and {engine.context} tokens turn this model's positions by other factors;"
            " compute the tokens again"
        )
    moved = Session(engine, sequence)
    take(engine, sequence, moved)
    engine.kv_remove(sequence, 0, -1)
    try:
        for start in range(0, n_tokens, source.states.block):
            positions = Range(start, min(start + source.states.block, n_tokens))
            engine.states.write(sequence, source.states.read(session.sequence, positions))
            if on_progress is not None:
                on_progress(positions.stop, n_tokens)
    except BaseException:
        engine.kv_remove(sequence, 0, -1)
        raise
    moved.tokens, moved.exact = list(session.tokens), session.exact
    return moved
