"""Transfer the KV cache of slots from one engine to another one, if both cannot be loaded at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from devices.probe import available_memory
from edge.errors import EdgeError
from edge.llama.llama import Model
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.resolve import resolve
from edge.llm.slot import Slot, common_prefix
from partition.errors import CannotSlice
from partition.model.file import ModelFile
from partition.plan.plan import Range
from partition.slices.source import Source
from partition.state.sequence import KVBlock
from partition.state.shape import StateShape

_MOST_OF_FREE = 0.25  # largest fraction of this device's free memory for KV cache in transit


def check_movable(file: ModelFile, options: EngineOptions, vocabulary: Model) -> None:
    """Raise CannotSlice if the KV cache of a model cannot be read."""
    if vocabulary.is_recurrent:
        raise CannotSlice(f"{file.architecture} models are recurrent: they store no state for single tokens")
    StateShape.of_model(Source.from_file(file), resolve(options, file.shape)[1])


@dataclass(frozen=True)
class Beginning:
    """A slot with the prefix that it shares with an earlier slot. The shared prefix is moved once."""

    sequence: int
    n_tokens: int  # tokens in the slot
    like: int  # sequence of the earlier slot
    start: int  # length of the shared prefix; 0: none


def beginnings(slots: Sequence[Slot]) -> Iterator[Beginning]:
    """Yield each non-empty slot, with the earlier slot that shares the longest prefix."""
    done: list[Slot] = []
    for slot in slots:
        if not slot.tokens:
            continue
        # The KV cache of shifted tokens depends on dropped tokens, so it is not shared.
        exact = slot.tokens[: slot.exact]
        # Slots in other namespaces may use other adapters.
        like = [other for other in done if other.namespace == slot.namespace]
        shared = ((common_prefix(other.tokens[: other.exact], exact), other.sequence) for other in like)
        start, sequence = max(shared, default=(0, 0))
        yield Beginning(slot.sequence, len(slot.tokens), sequence, start)
        done.append(slot)


@dataclass(frozen=True)
class HeldStates:
    """KV cache of slots in this device's memory."""

    factors: str  # `States.factors` of the positions
    parts: list[tuple[Beginning, list[KVBlock]]]


def read_states(engine: TextEngine, slots: Sequence[Slot]) -> HeldStates | None:
    """Return the KV cache of an engine's slots. None if it cannot be read, or is too large for this device."""
    at_once, room = engine.states.most_read, _MOST_OF_FREE * available_memory()
    n_blocks = sum(-(-len(slot.tokens) // at_once) for slot in slots)  # upper bound
    parts: list[tuple[Beginning, list[KVBlock]]] = []
    try:
        for beginning in beginnings(slots):
            blocks: list[KVBlock] = []
            for start in range(beginning.start, beginning.n_tokens, at_once):
                blocks.append(
                    engine.states.read(beginning.sequence, Range(start, min(start + at_once, beginning.n_tokens)))
                )
                if not parts and len(blocks) == 1 and blocks[0].n_bytes * n_blocks > room:
                    return None
            parts.append((beginning, blocks))
        return HeldStates(engine.states.factors, parts)
    # The model's states are unknown, or a window dropped positions; a lost engine is noticed in the next step.
    except EdgeError:
        return None


def write_states(engine: TextEngine, states: HeldStates) -> bool:
    """Write a KV cache to an empty engine. If the engine cannot take it, return False and leave the engine empty."""
    if engine.states.factors != states.factors:
        return False
    try:
        for beginning, blocks in states.parts:
            if beginning.start:
                engine.kv_copy(beginning.like, beginning.sequence, 0, beginning.start)
            for block in blocks:
                engine.states.write(beginning.sequence, block)
        return True
    except EdgeError:
        if engine.failed is not None:
            raise
        engine.kv_clear()
        return False
