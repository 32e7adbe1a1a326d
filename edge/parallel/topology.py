"""Topology of one rank: its tensor-parallel group, its upstream ranks, its downstream ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from edge.errors import EdgeError
from partition.plan.plan import MAX_WORLD_SIZE


@dataclass(frozen=True, slots=True)
class Topology:
    """One rank of a deployment. Ranks are numbered stage by stage."""

    rank: int
    stage: int
    n_stages: int
    group: tuple[int, ...]  # the ranks of its stage, itself among them: they sum their parts
    source: int | None  # who sends it steps; None: rank 0, which makes them
    mates: tuple[int, ...]  # whom it sends the same hidden states it takes in; rank 0 only
    feeds: tuple[int, ...]  # whom it sends its stage's hidden states
    heads: tuple[int, ...]  # the ranks of the last stage, which have the logits

    @property
    def last(self) -> bool:
        """Whether its stage ends in logits."""
        return self.stage == self.n_stages - 1


def place(rank: int, stages: Sequence[int]) -> Topology:
    """The place of a rank where stage i has `stages[i]` ranks. EdgeError where there is no such rank.

    There may be one more than a group has: layers that are timed are no last stage, so there is to be one behind them.

    Every rank of a stage holds the same hidden states at its end, so that those of the next stage share them out: rank
    number t of a stage gets them from number t modulo the width of the stage before.
    """
    if min(stages, default=0) < 1 or not 0 <= rank < sum(stages) <= MAX_WORLD_SIZE + 1:
        raise EdgeError(
            f"rank {rank} is none of {len(stages)} stages with {sum(stages)} ranks; each stage has at least one, and"
            f" all together at most {MAX_WORLD_SIZE}"
        )
    ends = list(accumulate(stages))
    groups = [tuple(range(end - width, end)) for end, width in zip(ends, stages, strict=True)]
    stage = next(i for i, group in enumerate(groups) if rank in group)
    mine = groups[stage].index(rank)
    before = groups[stage - 1] if stage else ()
    after = groups[stage + 1] if stage + 1 < len(groups) else ()
    if rank == 0:
        source = None
    else:
        source = before[mine % len(before)] if before else 0
    return Topology(
        rank=rank,
        stage=stage,
        n_stages=len(stages),
        group=groups[stage],
        source=source,
        mates=groups[0][1:] if rank == 0 else (),
        feeds=tuple(peer for i, peer in enumerate(after) if i % len(groups[stage]) == mine),
        heads=groups[-1],
    )
