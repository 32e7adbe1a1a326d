"""Move a slot with its keys and values to another engine, as a change of plans does."""

from edge.llm.interface import TextEngine
from edge.llm.slot import Slot
from edge.parallel.moving import read_states, write_states


def move(slot: Slot, engine: TextEngine) -> Slot:
    """A slot of `engine` that holds what `slot`, the only one of its own, holds. Both remain usable."""
    states = read_states(slot.engine, [slot])
    assert states is not None
    engine.kv_clear()
    assert write_states(engine, states)
    moved = Slot(engine)
    moved.tokens, moved.origin = list(slot.tokens), slot.origin
    return moved
