"""Keys and values of slots on their way from one engine to another, which cannot be loaded at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from devices.probe import available_memory
from edge.errors import EdgeError
from edge.llama.llama import Model
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions, resolve
from edge.llm.slot import Slot, common_prefix
from partition.errors import CannotSlice
from partition.model.model import ModelShape
from partition.plan.plan import Range
from partition.slices.source import Source
from partition.state.sequence import KVBlock
from partition.state.shape import StateShape
from quant.gguf.file import GgufFile

_MOST_OF_FREE = 0.25  # of this device's memory, for keys and values on their way


def check_movable(file: GgufFile, options: EngineOptions, vocabulary: Model) -> None:
    """Raise CannotSlice if the keys and values of a model cannot be read."""
    if vocabulary.is_recurrent:
        raise CannotSlice(f"{file.architecture} models are recurrent: they hold nothing of each token")
    StateShape.of_model(Source.from_file(file), resolve(options, ModelShape.from_gguf(file))[2])


@dataclass(frozen=True)
class Beginning:
    """Prefix that a slot shares with an earlier one: it is moved once."""

    sequence: int
    n_tokens: int  # that the slot holds
    like: int  # the other sequence
    start: int  # tokens that are the same; 0: it shares nothing


def beginnings(slots: Sequence[Slot]) -> Iterator[Beginning]:
    """Yield each slot that holds tokens, with the earlier slot that shares the longest prefix."""
    done: list[Slot] = []
    for slot in slots:
        if not slot.tokens:
            continue
        # Keys and values that were shifted depend on tokens that were dropped.
        exact = slot.tokens[: slot.exact]
        # Slots of other namespaces may have other adapters.
        like = [other for other in done if other.namespace == slot.namespace]
        shared = ((common_prefix(other.tokens[: other.exact], exact), other.sequence) for other in like)
        start, sequence = max(shared, default=(0, 0))
        yield Beginning(slot.sequence, len(slot.tokens), sequence, start)
        done.append(slot)


@dataclass(frozen=True)
class HeldStates:
    """Keys and values of slots, in this device's memory."""

    factors: str  # as `States.factors`, by which positions were turned
    parts: list[tuple[Beginning, list[KVBlock]]]


def read_states(engine: TextEngine, slots: Sequence[Slot]) -> HeldStates | None:
    """Return the keys and values of an engine's slots. None if they cannot be read, or are too large for this
    device."""
    at_once, room = engine.states.most_read, _MOST_OF_FREE * available_memory()
    n_blocks = sum(-(-len(slot.tokens) // at_once) for slot in slots)  # at most
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
    except EdgeError:  # of models whose states are not known, or windows; a loss shows with the next step
        return None


def write_states(engine: TextEngine, states: HeldStates) -> bool:
    """Give an empty engine these keys and values. Return False, and leave it empty, if it cannot take them."""
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
