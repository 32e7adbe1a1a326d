"""A rank that follows: steps come over a data link, and go on to whoever depends on this rank."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from edge.constraints.constraint import Mask
from edge.errors import EngineError
from edge.llm.states import Part, States
from edge.parallel import logits, masks, steps
from edge.parallel.shard import Shard
from edge.parallel.steps import Op, Step
from edge.tasks import results
from partition.plan.plan import Range
from transport.collective import Group, Wire
from transport.errors import ProtocolError
from transport.frame import Kind
from transport.link import IDLE_S, Link


def follow(shard: Shard, group: Group, algorithm: str = "auto", wire: Wire | None = None) -> None:
    """Do the steps that come until rank 0 ends them. `group` has links to all ranks. Raise the errors of links, and
    EngineError."""
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
        if step.op is Op.DECODE:
            idle_s = 0.0 if step.fresh else time.perf_counter() - began
            _decode(shard, step, source, feeds, home, idle_s)
            continue
        for link in feeds:
            link.send(steps.pack(step, shard.rows), Kind.CONTROL)
        if step.op is Op.END:
            return
        if step.op is Op.TIMES:
            clear, last, rows, _ = (max(0, number) for number in step.numbers)
            summaries = {kind: summary.to_json() for kind, summary in shard.times.summaries(last, rows).items()}
            home.send(json.dumps(summaries).encode(), Kind.CONTROL)
            if clear:
                shard.times.clear()
        elif step.op in (Op.READ, Op.WRITE):
            _exchange_block(step, shard, home)
        elif step.op in (Op.KEEP, Op.COUNT, Op.RESTORE):
            _keep_blocks(step, shard, home)
        elif step.op in (Op.SNAPSHOT, Op.SET_BACK):
            _states_for(step, shard)
            is_done = shard.keep(step)
            if step.op is Op.SET_BACK:
                home.send(json.dumps(is_done).encode(), Kind.CONTROL)
        elif step.op is Op.REMOVE and step.numbers[3] == steps.ASKED:
            home.send(json.dumps(shard.keep(step)).encode(), Kind.CONTROL)
        elif not shard.keep(step) and step.numbers[3]:
            raise EngineError(f"rank {place.rank} cannot forget what rank 0 could; use one kind of layers a stage")


def follow_groups(shards: Sequence[Shard], group: Group, algorithm: str, wire: Wire | None) -> None:
    """As `follow`, with a shard for each group of sequences: each has a thread, and a lane of every link. The first
    error ends all of them."""
    if len(shards) == 1:
        follow(shards[0], group, algorithm, wire)
        return
    with ThreadPoolExecutor(len(shards), "group") as pool:
        own_lanes = group.lanes(len(shards))
        following = [
            pool.submit(follow, shard, lane, algorithm, wire) for shard, lane in zip(shards, own_lanes, strict=True)
        ]
        try:
            results(following)
        except Exception as error:
            for link in group.links.values():  # the other threads end where they wait
                link.refuse(f"rank {group.rank}: {error}")
            raise


def _decode(shard: Shard, step: Step, source: Link, feeds: list[Link], home: Link, idle_s: float) -> None:
    n, place = step.rows, shard.place
    allowed: list[Mask | None] = [None] * step.outputs
    if step.masks and place.last:
        n_own, own = shard.engine.model.n_vocab, place.heads.index(place.rank)
        allowed = masks.unpack(step.masks, step.outputs, len(place.heads), own, n_own)
    shard.begin()
    steps.receive_states(source, shard.rows.embeddings[:n], shard.wire if place.stage else None)
    if place.stage:
        shard.rows.deep = None  # they stay on the first stage
    elif shard.rows.deep is not None:
        steps.receive_states(source, shard.rows.deep)
    if step.hidden and place.last:
        shard.engine.hidden.give(only_outputs=0 not in place.heads)
    shard.compute(n)
    feed(shard, step, feeds)
    if place.last:
        for row, mask in zip(shard.logits(n), allowed, strict=True):
            logits.send(home, row, step.top, mask)
        if step.hidden and 0 not in place.heads and place.rank == place.heads[0]:
            steps.send_states(home, shard.engine.hidden.rows(step.outputs), shard.wire)
    shard.times.add(shard.end(shard.time_of(n, idle_s)))


def _exchange_block(step: Step, shard: Shard, home: Link) -> None:
    """Send rank 0 this rank's part of a block, or add what it sends."""
    states = _states_for(step, shard)
    sequence, start, end, _ = step.numbers
    if not 0 <= start < end <= start + states.most_read:
        raise ProtocolError(f"positions {start} to {end} were asked for; needed are up to {states.most_read}")
    positions = Range(start, end)
    if step.op is Op.READ:
        steps.send_block(home, states.read(sequence, positions), states.shape)
    else:
        states.write(sequence, steps.receive_block(home, states.shape, positions))


def _keep_blocks(step: Step, shard: Shard, home: Link) -> None:
    """Keep this rank's part of blocks, count what is kept, or restore it; tell rank 0 how many blocks that are."""
    states = _states_for(step, shard)
    sequence, start, number, part = step.numbers
    if part not in range(4):
        raise ProtocolError(f"{part} as the part that blocks are of others; update both devices")
    if step.op is Op.KEEP:
        states.keep(sequence, start, step.hashes)
    elif step.op is Op.COUNT:
        number = states.n_cached(step.hashes, Part(part))
    else:
        number = states.restore(sequence, start, step.hashes, Part(part))
    home.send(json.dumps(number).encode(), Kind.CONTROL)


def _states_for(step: Step, shard: Shard) -> States:
    """Return the KV cache states that a step is about. ProtocolError for an unknown sequence: llama.cpp aborts."""
    if not 0 <= step.numbers[0] < shard.engine.sequences:
        raise ProtocolError(f"sequence {step.numbers[0]} was asked for; this rank has {shard.engine.sequences}")
    return shard.engine.states


def feed(shard: Shard, step: Step, links: list[Link]) -> None:
    """Hand a computed step to the next stage."""
    for link in links:
        link.send(steps.pack(step, shard.rows), Kind.CONTROL)
        steps.send_states(link, shard.hidden, shard.wire)
