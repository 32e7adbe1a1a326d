"""Roles of a model's weights in paging: a factor of one product, experts, the token table, the head, or small."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge.llama.buffers import ROW_GROUP, Weight
from edge.paging.window import Piece, Source
from partition.model.model import block_of

HEAD, TABLE = "output.weight", "token_embd.weight"

# Factors of one matrix product each, in the order of use: they can be streamed, and laid out for this CPU. All others
# (norms, biases, routers, convolutions) are small.
_FACTORS = (
    "attn_q", "attn_v", "attn_k", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
    "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp",
)  # fmt: skip
_FACTOR = re.compile(rf"blk\.\d+\.({'|'.join(_FACTORS)})\.weight")
_EXPERT_KINDS = ("gate_up", "gate", "up", "down")  # in the order of use
_EXPERTS = re.compile(rf"blk\.\d+\.ffn_({'|'.join(_EXPERT_KINDS)})_exps\.weight")


@dataclass(frozen=True)
class Roles:
    """The weights of a model, sorted."""

    factors: tuple[Piece, ...]  # in the order of use
    head: Piece | None  # None where the model has none here
    tied: bool  # the head is the token table
    table: Piece | None  # None where tokens never come as such
    experts: Mapping[int, Sequence[Piece]]  # by layer
    rest: tuple[Piece, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Return all that may be in memory as a whole."""
        head, experts = [self.head] if self.head else [], (p for ps in self.experts.values() for p in ps)
        return *self.factors, *head, *experts, *self.rest

    @property
    def longest_row(self) -> int:
        """Bytes of the longest row of all that is laid out anew."""
        return max((piece.weight.row_bytes for piece in self.pieces if piece.repacked), default=0)

    def head_pieces(self, most: int) -> tuple[Piece, ...]:
        """The head cut into pieces of at most `most` bytes, or little more."""
        assert self.head is not None
        whole = self.head
        row = whole.weight.row_bytes
        rows = max(1, most // (row * ROW_GROUP)) * ROW_GROUP
        cuts = range(0, whole.weight.rows, rows)
        return tuple(
            Piece(
                whole.weight,
                Source(whole.source.file, whole.source.offset + first * row),
                min(rows, whole.weight.rows - first) * row,
                whole.repacked,
            )
            for first in cuts
        )


def sort_weights(weights: Mapping[str, Weight], sources: Mapping[str, Source], *, repack: bool, tokens: bool) -> Roles:
    """The roles of `weights`. repack: lay factors out for this CPU. tokens: batches bring tokens, not hidden states."""

    def piece(weight: Weight, factor: bool) -> Piece:
        return Piece(weight, sources[weight.name], weight.n_bytes, factor and repack and weight.repacks)

    factors, experts, rest = [], dict[int, list[Piece]](), []
    for name, weight in weights.items():
        block = block_of(name)
        if _FACTOR.fullmatch(name):
            factors.append(piece(weight, True))
        elif _EXPERTS.fullmatch(name) and block is not None:
            experts.setdefault(block, []).append(piece(weight, True))
        elif name not in (HEAD, TABLE):
            rest.append(piece(weight, False))
    tied = HEAD not in weights
    head = weights.get(TABLE if tied else HEAD)
    table = weights.get(TABLE)
    if table is not None and not tied and not tokens:  # a stub, which nobody looks up
        rest.append(piece(table, False))
    return Roles(
        factors=tuple(sorted(factors, key=_place)),
        head=piece(head, True) if head is not None else None,
        tied=tied,
        table=piece(table, False) if table is not None and tokens else None,
        experts={n: sorted(pieces, key=_place_of_experts) for n, pieces in experts.items()},
        rest=tuple(rest),
    )


def _place_of_experts(piece: Piece) -> int:
    match = _EXPERTS.fullmatch(piece.weight.name)
    assert match is not None
    return _EXPERT_KINDS.index(match[1])


def _place(piece: Piece) -> tuple[int, int]:
    match = _FACTOR.fullmatch(piece.weight.name)
    assert match is not None
    return block_of(piece.weight.name) or 0, _FACTORS.index(match[1])
