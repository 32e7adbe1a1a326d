"""Page plan of a budget: resident and streamed weights, and the memory of each part."""

from __future__ import annotations

from dataclasses import dataclass

from edge.llama.address_space import PAGE, pages
from edge.llama.buffers import ROW_GROUP
from edge.weights.experts import Experts
from edge.weights.memory import MemoryNeed
from edge.weights.reader import Reader
from edge.weights.roles import Roles
from edge.weights.token_rows import TokenRows
from edge.weights.window import Piece
from partition.predict.paging import Matrix, Speed, plan_pages
from quant.text import bytes_text


@dataclass(frozen=True)
class ReadOptions:
    """Settings for reading weights."""

    threads: int
    chunk: int  # bytes per read
    window: int | None = None  # bytes; None: derived from measurements


@dataclass(frozen=True)
class PagePlan:
    """Division of the weights into resident and streamed ones."""

    resident: tuple[Piece, ...]
    streamed: tuple[Piece, ...]  # in the order of use
    head_pieces: tuple[Piece, ...]  # pieces of a head that is not resident as a whole; also in the two fields above
    window: int  # bytes
    expert_room: int  # bytes for cached experts; 0 if there are none, or all are resident
    parts: dict[str, int]  # bytes by part

    @property
    def pages(self) -> bool:
        """Return whether any weights are read repeatedly."""
        return bool(self.streamed or self.expert_room)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that every pass reads, without experts."""
        return sum(piece.n_bytes for piece in self.streamed)

    def describe(self, need: MemoryNeed) -> str:
        """Return a description of the budget by part, and of the bytes read for every token."""
        assert need.budget is not None
        parts = ", ".join(f"{name} {bytes_text(n)}" for name, n in need.parts.items() if n)
        line = f"{bytes_text(need.total)} of {bytes_text(need.budget)}: {parts}"
        if self.streamed:
            line += f"; {bytes_text(self.streamed_bytes)} of weights are read for every token"
        return line


def least_parts(roles: Roles, read: ReadOptions, batch: int, experts_at_once: int) -> dict[str, int]:
    """Return the minimum bytes by part, if everything that can be streamed is streamed."""
    return {
        "resident weights": sum(piece.span for piece in roles.rest),
        "window": max(read.window or 0, _largest(roles)),
        **_fixed(roles, read, batch),
        **({"experts": _experts_room(roles, experts_at_once)} if roles.experts else {}),
    }


def plan(roles: Roles, room: int, read: ReadOptions, speed: Speed, batch: int, experts_at_once: int) -> PagePlan:
    """Divide `room` bytes, at least those of `least_parts`. Dense weights precede experts, because every token uses
    them."""
    fixed = _fixed(roles, read, batch)
    rest = sum(piece.span for piece in roles.rest)
    least_experts = _experts_room(roles, experts_at_once)
    left = room - rest - sum(fixed.values()) - least_experts
    factors = {piece.name: piece for piece in roles.factors}
    head = {roles.head.name: roles.head} if roles.head else {}
    cut: tuple[Piece, ...] = ()
    total = sum(piece.span for piece in (*factors.values(), *head.values()))
    largest = _largest(roles)
    head_span = sum(piece.span for piece in head.values())
    if total > left and head and head_span + max(2 * largest, read.window or 0) > left:
        cut = roles.head_pieces(largest - PAGE)
        head, head_span = {}, 0
        factors |= {piece.name: piece for piece in cut}
    pages_ = plan_pages(
        [Matrix(name, piece.span) for name, piece in factors.items()], left - head_span, speed, read.window
    )
    streamed = set(pages_.streamed)
    staying = (*roles.rest, *head.values(), *(piece for name, piece in factors.items() if name not in streamed))
    resident = rest + head_span + pages_.resident_bytes
    expert_room = room - resident - pages_.window_bytes - sum(fixed.values())
    all_experts = sum(piece.span for pieces in roles.experts.values() for piece in pieces)
    if all_experts <= expert_room:  # treat experts like other resident weights
        staying = (*staying, *(piece for pieces in roles.experts.values() for piece in pieces))
        resident, expert_room = resident + all_experts, 0
    return PagePlan(
        resident=staying,
        streamed=tuple(factors[name] for name in pages_.streamed),
        head_pieces=cut,
        window=pages_.window_bytes,
        expert_room=expert_room if roles.experts else 0,
        parts={
            "resident weights": resident,
            "window": pages_.window_bytes,
            **fixed,
            **({"experts": expert_room} if expert_room and roles.experts else {}),
        },
    )


def _largest(roles: Roles) -> int:
    """Return the bytes of the largest streamed unit: a factor, or the smallest possible piece of a head."""
    head = pages(roles.head.weight.row_bytes * ROW_GROUP) + PAGE if roles.head else 0
    return max(head, *(piece.span for piece in roles.factors), 0)


def _fixed(roles: Roles, read: ReadOptions, batch: int) -> dict[str, int]:
    table = roles.table
    return {
        "read buffers": Reader.memory(roles.longest_row, read.threads, read.chunk),
        "token rows": TokenRows.memory(table, batch) if table is not None else 0,
    }


def _experts_room(roles: Roles, at_once: int) -> int:
    """Return the bytes for `at_once` experts of a layer, or for all that it has."""
    return max(
        (min(at_once, banks[0].weight.shape[0]) * Experts.expert_bytes(banks) for banks in roles.experts.values()),
        default=0,
    )
