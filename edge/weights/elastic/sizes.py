"""Choose the size of a loaded model for a budget: its quantization, and the part that is paged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from edge.llama.llama import ContextSizes
from edge.weights.arena import Key, key_of
from edge.weights.budget import MARGIN_SHARE, BudgetOptions, Opening, measure, rows_of_experts
from edge.weights.plan import PagePlan, ReadOptions, least_parts, plan
from edge.weights.reader import DEFAULT_CHUNK, DEFAULT_THREADS
from edge.weights.roles import Roles
from partition.errors import PlanError
from partition.predict.paging import Matrix, Pages, Speed, pass_seconds
from quant.gguf.elastic import ElasticSize
from quant.text import bytes_text

Preference = Literal["speed", "quality"]


@dataclass(frozen=True)
class SizeChoice:
    """Choice for a budget: a size of the model and its paging plan."""

    number: int  # number of the size; 0: the largest
    size: ElasticSize
    roles: Roles
    plan: PagePlan
    n_bytes: int  # bytes that the process will hold
    token_s: float  # predicted seconds of a decoded token

    def is_like(self, other: SizeChoice) -> bool:
        """Return whether another choice has the same weights in memory."""
        mine, theirs = (
            (c.number, {p.name for p in c.plan.streamed}, c.plan.window, c.plan.expert_room) for c in (self, other)
        )
        return mine == theirs

    def __str__(self) -> str:
        paged = f", {bytes_text(self.plan.streamed_bytes)} read for every token" if self.plan.streamed else ""
        return (
            f"size {bytes_text(self.size.file_bytes)}{paged}: {1e3 * self.token_s:.0f} ms a token and"
            f" {self.size.divergence:.4f} nats from the original expected"
        )


class Sizes:
    """Sizes of one model. `choose` picks the size for a budget."""

    def __init__(
        self,
        opening: Opening,
        sizes: Sequence[ElasticSize],
        parts: dict[str, int],
        context: ContextSizes,
        least: int,
        prefer: Preference,
    ) -> None:
        """parts: bytes by part that a budget of `least` bytes spends on things other than weights."""
        self._sizes, self._prefer, self._batch = sizes, prefer, context.batch
        self._roles = [opening.roles(size.tensors) for size in sizes]
        self._having: dict[Key, tuple[int, ...]] = {}  # by weight: numbers of the sizes in which it is identical
        for number, roles in enumerate(self._roles):
            for piece in roles.pieces:
                self._having[key_of(piece)] = (*self._having.get(key_of(piece), ()), number)
        self._used = opening.request.file.shape.n_experts_used
        self._experts = self._used * max(2, context.sequences, context.batch)
        self.read, self._speeds = _speeds(self._roles, replace(opening.options, memory=least), opening.request.threads)
        self._parts = sum(parts.values()) - least // MARGIN_SHARE  # the margin grows with the budget
        self._whole = [  # by size: bytes of the weights if all are resident
            sum(plan(roles, 1 << 62, self.read, speed, self._batch, self._experts).parts.values())
            for roles, speed in zip(self._roles, self._speeds, strict=True)
        ]
        self.least = self._budget(sum(least_parts(self._roles[-1], self.read, self._batch, self._experts).values()))
        self.most = max(self.least, self._budget(self._whole[0]))  # budget in which the largest size is fully resident

    def choose(self, budget: int, prefer: Preference | None = None) -> SizeChoice:
        """Return the choice for a budget, or for the minimum budget if that is more.

        With "speed" this is the largest fully resident size, or else the smallest size, paged. With "quality" it is the
        largest size that can be paged.

        budget: bytes of the whole process.
        prefer: preference; None: the preference of this object.
        """
        budget = max(budget, self.least)
        last = len(self._sizes) - 1
        for number in range(last):
            if (prefer or self._prefer) == "speed" and self._whole[number] > self._room(budget):
                continue  # planning its paging takes time
            if (choice := self._within(number, budget)) is not None:
                return choice
        smallest = self._within(last, budget)
        assert smallest is not None
        return smallest

    def other(self, budget: int) -> tuple[Preference, SizeChoice] | None:
        """Return the other preference and its choice for the budget, or None if the choice is the same."""
        prefer: Preference = "speed" if self._prefer == "quality" else "quality"
        choice = self.choose(budget, prefer)
        return None if choice.is_like(self.choose(budget)) else (prefer, choice)

    def having(self, key: Key) -> tuple[int, ...]:
        """Return the numbers of the sizes that contain an identical weight; none for a part of a head."""
        return self._having.get(key, ())

    @property
    def longest_row(self) -> int:
        """Bytes of the longest repacked row of all sizes."""
        return max(roles.longest_row for roles in self._roles)

    @property
    def read_rate(self) -> float:
        """Bytes per second that the disk delivers, including repacking."""
        return min(speed.read for speed in self._speeds)

    def _within(self, number: int, budget: int) -> SizeChoice | None:
        """Return the choice of a size, paged as much as the budget requires, or None if it does not fit."""
        roles, room = self._roles[number], self._room(budget)
        if sum(least_parts(roles, self.read, self._batch, self._experts).values()) > room:
            return None
        try:
            share = plan(roles, room, self.read, self._speeds[number], self._batch, self._experts)
        except PlanError:
            return None
        if rows_of_experts(roles, share, self._used) < self._batch:
            return None
        n_bytes = self._parts + budget // MARGIN_SHARE + sum(share.parts.values())
        token_s = _token_s(roles, share, self._speeds[number], self._used)
        return SizeChoice(number, self._sizes[number], roles, share, n_bytes, token_s)

    def _room(self, budget: int) -> int:
        """Return the bytes of a budget that are available for weights."""
        return budget - self._parts - budget // MARGIN_SHARE

    def _budget(self, room: int) -> int:
        """Return the minimum budget in bytes with this room for weights."""
        return -(-(self._parts + room) * MARGIN_SHARE // (MARGIN_SHARE - 1)) + 1


def _speeds(roles: Sequence[Roles], options: BudgetOptions, threads: int) -> tuple[ReadOptions, list[Speed]]:
    """Return the read options, and the speeds of each size, because types differ in decoding speed."""
    read = ReadOptions(options.io_threads or DEFAULT_THREADS, options.io_chunk or DEFAULT_CHUNK, options.window)
    speeds = []
    for each in roles:
        read, speed, _ = measure(each, read, options, threads)
        speeds.append(speed)
    return read, speeds


def _token_s(roles: Roles, share: PagePlan, speed: Speed, used: int) -> float:
    """Predict the seconds of a decoded token. Resident experts are assumed to be chosen as often as others."""
    pieces = [*roles.factors, *(share.head_pieces or ([roles.head] if roles.head else []))]
    matrices = [Matrix(piece.name, piece.span) for piece in pieces]
    streamed = tuple(piece.name for piece in share.streamed)
    seconds = pass_seconds(matrices, Pages(streamed, 0, share.streamed_bytes, share.window), speed)
    banks = [piece for pieces in roles.experts.values() for piece in pieces]
    total = sum(piece.span for piece in banks)
    chosen = sum(piece.span * used / piece.weight.shape[0] for piece in banks)
    missing = max(0.0, 1 - share.expert_room / total) if share.expert_room else 0.0
    return seconds + chosen / speed.compute + chosen * missing / speed.read
