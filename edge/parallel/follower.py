"""Follower rank: it receives steps over a data link, computes its part, and sends the result to the next stage."""

from __future__ import annotations

import json
import time
from typing import Any

from edge.errors import EngineError
from edge.llm.states import States
from edge.parallel import logits, masks, steps
from edge.parallel.shard import Shard
from edge.text.constraints.constraint import Mask
from partition.plan.plan import Range
from transport.collective import Group, Wire
from transport.errors import ProtocolError
from transport.frame import Kind
from transport.link import IDLE_S, Link


def follow(shard: Shard, group: Group, algorithm: str = "auto", wire: Wire | None = None) -> None:
    """Carry out steps until rank 0 ends them. `group` has links to all ranks. Raises the errors of links, and
    EngineError.
    """
    shard.join(group, algorithm, wire)
    place = shard.place
    assert place.source is not None, "rank 0 makes the steps"
    source, home = group.links[place.source], group.links[0]
    feeds = [group.links[rank] for rank in place.feeds]
    most = steps.max_bytes(shard.rows.capacity)
    while True:
        began = time.perf_counter()
        frame = source.receive(IDLE_S, most)
        if frame.kind is not Kind.CONTROL:
            raise ProtocolError(f"{source.peer} sent {frame.kind.name} where a step was expected")
        step = steps.unpack(frame.payload, shard.rows)
        if isinstance(step, steps.Decode):
            idle_s = 0.0 if step.fresh else time.perf_counter() - began
            _decode(shard, step, source, feeds, home, idle_s)
            continue
        for link in feeds:
            link.send(steps.pack(step, shard.rows), Kind.CONTROL)
        if isinstance(step, steps.End):
            return
        answer = _carry_out(step, shard, home)
        if answer is not None:
            home.send(json.dumps(answer).encode(), Kind.CONTROL)


def _decode(shard: Shard, step: steps.Decode, source: Link, feeds: list[Link], home: Link, idle_s: float) -> None:
    n, place = step.rows, shard.place
    allowed: list[Mask | None] = [None] * step.outputs
    if step.masks and place.last:
        n_own, own = shard.engine.model.n_vocab, place.heads.index(place.rank)
        allowed = masks.unpack(step.masks, step.outputs, len(place.heads), own, n_own)
    shard.begin()
    steps.receive_states(source, shard.rows.embeddings[:n], shard.wire if place.stage else None)
    if place.stage:
        shard.rows.deep = None  # rows added at the end of layers stay on the first stage
    elif shard.rows.deep is not None:
        steps.receive_states(source, shard.rows.deep)
    if step.hidden and place.last:
        shard.engine.hidden.give(only_outputs=0 not in place.heads)
    if place.last:
        shard.engine.use_top(0 if step.masks else step.top)
    shard.compute(n)
    feed(shard, step, feeds)
    if place.last:
        for row, mask in zip(shard.logits(n), allowed, strict=True):
            logits.send(home, row, step.top, mask)
        if step.hidden and 0 not in place.heads and place.rank == place.heads[0]:
            steps.send_states(home, shard.engine.hidden.rows(step.outputs), shard.wire)
    shard.times.add(shard.end(shard.time_of(n, idle_s)))


def _carry_out(step: steps.Step, shard: Shard, home: Link) -> Any:
    """Carry out a step other than a decode. Return the answer to rank 0 as JSON values, or None if there is none."""
    match step:
        case steps.Times(clear, last, rows):
            summaries = {kind: summary.to_json() for kind, summary in shard.times.summaries(last, rows).items()}
            if clear:
                shard.times.clear()
            return summaries
        case steps.Read() | steps.Write():
            _exchange_block(step, shard, home)
        case steps.Keep(sequence, start, hashes):
            _states_of(sequence, shard).keep(sequence, start, hashes)
            return len(hashes)
        case steps.Count(part, hashes):
            return shard.engine.states.n_cached(hashes, part)
        case steps.Restore(sequence, start, part, hashes):
            return _states_of(sequence, shard).restore(sequence, start, hashes, part)
        case steps.Snapshot(sequence):
            _states_of(sequence, shard)
            shard.keep(step)
        case steps.SetBack(sequence):
            _states_of(sequence, shard)
            return shard.keep(step)
        case steps.Remove(answers=True):
            return shard.keep(step)
        case steps.Remove(removed=True):
            if not shard.keep(step):
                rank = shard.place.rank
                raise EngineError(
                    f"rank {rank} cannot drop the positions that rank 0 dropped; use one kind of layers per stage"
                )
        case steps.Remove() | steps.Copy() | steps.Shift() | steps.Clear() | steps.Adapt():
            shard.keep(step)
    return None


def _exchange_block(step: steps.Read | steps.Write, shard: Shard, home: Link) -> None:
    """Send this rank's part of a KV block to rank 0, or write the part that rank 0 sends."""
    sequence, start, end = step
    states = _states_of(sequence, shard)
    if not 0 <= start < end <= start + states.most_read:
        raise ProtocolError(f"positions {start} to {end} were requested; expected at most {states.most_read}")
    positions = Range(start, end)
    if isinstance(step, steps.Read):
        steps.send_block(home, states.read(sequence, positions), states.shape)
    else:
        states.write(sequence, steps.receive_block(home, states.shape, positions))


def _states_of(sequence: int, shard: Shard) -> States:
    """Return the states of a shard. Raises ProtocolError for an unknown sequence, because llama.cpp would abort."""
    if not 0 <= sequence < shard.engine.sequences:
        raise ProtocolError(
            f"sequence {sequence} was requested; the number of sequences of this rank is {shard.engine.sequences}"
        )
    return shard.engine.states


def feed(shard: Shard, step: steps.Decode, links: list[Link]) -> None:
    """Send a computed step and its hidden states to the next stage."""
    for link in links:
        link.send(steps.pack(step, shard.rows), Kind.CONTROL)
        steps.send_states(link, shard.hidden, shard.wire)
