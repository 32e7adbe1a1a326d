"""Roles of a model's weights in paging: factor of one product, experts, token table, head, or small weight."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from edge.llama.buffers import ROW_GROUP, Weight
from edge.weights.direct_file import DirectFile
from edge.weights.window import Piece
from partition.model.model import block_of

HEAD, TABLE = "output.weight", "token_embd.weight"

# Factors of one matrix product each, in the order of use. They can be streamed, and repacked for this CPU. All others
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
    """Weights of a model by role."""

    factors: tuple[Piece, ...]  # in the order of use
    head: Piece | None  # None: the model has no head on this device
    tied: bool  # True: the head is the token table
    table: Piece | None  # None: tokens never arrive as ids
    experts: Mapping[int, Sequence[Piece]]  # by layer
    rest: tuple[Piece, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces that can be resident as a whole."""
        head, experts = [self.head] if self.head else [], (p for ps in self.experts.values() for p in ps)
        return *self.factors, *head, *experts, *self.rest

    @property
    def longest_row(self) -> int:
        """Bytes of the longest repacked row."""
        return max((piece.weight.row_bytes for piece in self.pieces if piece.repacked), default=0)

    def head_pieces(self, most: int) -> tuple[Piece, ...]:
        """Return the head in pieces of about `most` bytes."""
        assert self.head is not None
        group = self.head.weight.row_bytes * ROW_GROUP
        return tuple(self.head.cut(max(1, most // group) * ROW_GROUP))


def sort_weights(
    weights: Mapping[str, Weight],
    sources: Mapping[str, tuple[DirectFile, int]],
    *,
    repack: bool,
    tokens: bool,
    on_gpu: Collection[str] = (),
) -> Roles:
    """Return the roles of `weights`.

    sources: file and offset of each weight.
    on_gpu: names of weights that have no role, because they are in GPU memory.
    repack: repack factors for this CPU.
    tokens: batches contain tokens instead of hidden states.
    """

    def piece(weight: Weight, factor: bool) -> Piece:
        return Piece(weight, *sources[weight.name], weight.n_bytes, factor and repack and weight.repacks)

    factors: dict[tuple[int, int], Piece] = {}  # by order of use
    experts: dict[int, dict[int, Piece]] = {}  # by layer and order of use
    rest = []
    for name, weight in weights.items():
        if name in on_gpu:
            continue
        block = block_of(name) or 0
        if match := _FACTOR.fullmatch(name):
            factors[block, _FACTORS.index(match[1])] = piece(weight, True)
        elif match := _EXPERTS.fullmatch(name):
            experts.setdefault(block, {})[_EXPERT_KINDS.index(match[1])] = piece(weight, True)
        elif name not in (HEAD, TABLE):
            rest.append(piece(weight, False))
    tied = HEAD not in weights
    head = None if HEAD in on_gpu else weights.get(TABLE if tied else HEAD)
    table = weights.get(TABLE)
    if table is not None and not tied and not tokens:  # unused stub of a table
        rest.append(piece(table, False))
    return Roles(
        factors=tuple(factors[place] for place in sorted(factors)),
        head=piece(head, True) if head is not None else None,
        tied=tied,
        table=piece(table, False) if table is not None and tokens else None,
        experts={n: [pieces[place] for place in sorted(pieces)] for n, pieces in experts.items()},
        rest=tuple(rest),
    )
