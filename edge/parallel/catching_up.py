"""An engine brought to hold what another one held: by its tokens, or by keys and values where these can be had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from devices.probe import available_memory
from edge.errors import EdgeError
from edge.llm.interface import TextEngine
from edge.parallel.history import History
from partition.plan.plan import Range
from partition.state.sequence import KVBlock

_MOST_OF_FREE = 0.25  # of this device's memory, for keys and values on their way


@dataclass(frozen=True)
class Beginning:
    """Prefix that a sequence shares with an earlier one: it need not be computed or moved."""

    sequence: int
    tokens: list[int]
    like: int  # the other sequence
    start: int  # tokens that are the same; 0: it shares nothing


def beginnings(sequences: Mapping[int, list[int]]) -> Iterator[Beginning]:
    """The sequences in their order, each with the one before it that begins most like it."""
    done: dict[int, list[int]] = {}
    for sequence, tokens in sequences.items():
        start, like = max(((_shared(held, tokens), other) for other, held in done.items()), default=(0, 0))
        yield Beginning(sequence, tokens, like, start)
        done[sequence] = tokens


def compute(
    engine: TextEngine,
    sequences: Mapping[int, list[int]],
    check: Callable[[], None],
    history: History,
    exact: bool = False,
) -> int:
    """Compute the tokens of sequences, which are empty, but for those that `history` restores: how many those were.

    check: called now and then; what it raises ends it. exact: in the very steps that they were computed in before, as
    last bits depend on the rows of a step.
    """
    if exact:
        return sum(_compute_exactly(engine, *one, check, history) for one in sequences.items())
    computed = 0
    for one in beginnings(sequences):
        start, tokens = one.start, one.tokens
        if start:
            engine.kv_copy(one.like, one.sequence, 0, start)
        start = history.restore(engine, one.sequence, tokens, start)
        while start < len(tokens):
            check()
            chunk = tokens[start : start + engine.chunk(len(tokens) - start)]
            engine.decode(chunk, start, sequence=one.sequence, outputs="none")
            start += len(chunk)
            computed += len(chunk)
    return computed


def _compute_exactly(
    engine: TextEngine, sequence: int, tokens: list[int], check: Callable[[], None], history: History
) -> int:
    start = history.restore(engine, sequence, tokens, 0)
    begun, _ = history.step_at(sequence, start)
    if 0 < start < len(tokens) and begun < start:  # what was restored ends inside a step
        engine.kv_remove(sequence, begun, -1)
        start = begun
    first = start
    while start < len(tokens):
        check()
        _, end = history.step_at(sequence, start)
        step = tokens[start:end]
        engine.decode(step, start, sequence=sequence, outputs="none")
        start += len(step)
    return start - first


@dataclass(frozen=True)
class HeldStates:
    """Keys and values of sequences, in this device's memory."""

    factors: str  # as `States.factors`: those that positions were turned by
    parts: list[tuple[Beginning, list[KVBlock]]]


def read_states(engine: TextEngine, sequences: Mapping[int, list[int]]) -> HeldStates | None:
    """The keys and values of sequences. None where this model's cannot be read, or are too many for this device."""
    room = _MOST_OF_FREE * available_memory()
    parts: list[tuple[Beginning, list[KVBlock]]] = []
    at_once = engine.states.most_read
    try:
        for one in beginnings(sequences):
            blocks: list[KVBlock] = []
            for start in range(one.start, len(one.tokens), at_once):
                blocks.append(engine.states.read(one.sequence, Range(start, min(start + at_once, len(one.tokens)))))
                if not parts and len(blocks) == 1 and blocks[0].n_bytes * _blocks(sequences, engine) > room:
                    return None
            parts.append((one, blocks))
        return HeldStates(engine.states.factors, parts)
    except EdgeError:  # of models whose states are not known, or windows; a loss shows with the next step
        return None


def write_states(engine: TextEngine, held: HeldStates) -> bool:
    """Give an empty engine these keys and values; where it cannot take them it is left empty, and False comes back."""
    if engine.states.factors != held.factors:
        return False
    try:
        for one, blocks in held.parts:
            if one.start:
                engine.kv_copy(one.like, one.sequence, 0, one.start)
            for block in blocks:
                engine.states.write(one.sequence, block)
        return True
    except EdgeError:
        if engine.failed is not None:
            raise
        engine.kv_clear()
        return False


def _blocks(sequences: Mapping[int, Sequence[int]], engine: TextEngine) -> int:
    """Return how many blocks all sequences have, at most."""
    return sum(-(-len(tokens) // engine.states.most_read) for tokens in sequences.values())


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
