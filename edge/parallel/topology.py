"""Topology of one rank: its tensor-parallel group, its upstream ranks, its downstream ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from edge.errors import EdgeError
from partition.plan.plan import MAX_WORLD_SIZE

NO_STAGE = -1


@dataclass(frozen=True, slots=True)
class Topology:
    """Position of one rank in a deployment. Ranks are numbered stage by stage."""

    rank: int
    stage: int  # index among the stages that compute; NO_STAGE for a thin owner
    n_stages: int  # number of stages that compute
    group: tuple[int, ...]  # ranks of its stage, including itself, which all-reduce partial sums
    source: int | None  # rank that sends it steps; None for rank 0, which creates them
    peers: tuple[int, ...]  # ranks of the first stage that get the same input; only for rank 0
    feeds: tuple[int, ...]  # ranks that get its stage's hidden states
    heads: tuple[int, ...]  # ranks of the last stage, which have the logits

    @property
    def thin(self) -> bool:
        """True if the rank holds no layer."""
        return self.stage == NO_STAGE

    @property
    def last(self) -> bool:
        """True if the rank's stage yields logits."""
        return self.stage == self.n_stages - 1


def place(rank: int, stages: Sequence[int]) -> Topology:
    """Return the topology of a rank. Stage i has `stages[i]` ranks.

    A first stage of 0 ranks means that rank 0 is a thin owner. It sends hidden states to all ranks of the first
    computing stage.

    The world size may exceed the maximum by one: when layers are timed, a further stage stands in for the rest of the
    model.

    All ranks of a stage have the same hidden states at its end, so they divide the transfers: rank number t of a stage
    receives from number t modulo the width of the previous stage.

    Raises EdgeError if there is no such rank.
    """
    thin = len(stages) > 1 and stages[0] == 0
    computing = stages[thin:]
    if min(computing, default=0) < 1 or not 0 <= rank < world_size(stages) <= MAX_WORLD_SIZE + 1:
        raise EdgeError(
            f"rank {rank} does not exist in {len(stages)} stages with {world_size(stages)} ranks; each stage has at"
            " least one,"
            f" and all together at most {MAX_WORLD_SIZE}"
        )
    edges = accumulate(computing, initial=int(thin))
    groups = [tuple(range(start, stop)) for start, stop in pairwise(edges)]
    stage = next((i for i, group in enumerate(groups) if rank in group), NO_STAGE)
    group = groups[stage] if stage != NO_STAGE else (rank,)
    mine = group.index(rank)
    before = groups[stage - 1] if stage > 0 else ()
    after = groups[stage + 1] if 0 <= stage < len(groups) - 1 else ()
    if rank == 0:
        source = None
    else:
        source = before[mine % len(before)] if before else 0
    return Topology(
        rank=rank,
        stage=stage,
        n_stages=len(groups),
        group=group,
        source=source,
        peers=tuple(peer for peer in groups[0] if peer) if rank == 0 else (),
        feeds=tuple(peer for i, peer in enumerate(after) if i % len(group) == mine),
        heads=groups[-1],
    )


def world_size(stages: Sequence[int]) -> int:
    """Return the number of ranks of stages with these sizes. A first stage of size 0 means a thin owner."""
    return sum(stages) + (len(stages) > 0 and stages[0] == 0)
