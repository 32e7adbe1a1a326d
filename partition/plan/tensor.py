"""Tensor-parallel shares of a stage: the query heads, FFN columns and vocabulary rows of each rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, lcm

from partition.errors import PlanError
from partition.plan.apportion import apportion, checked_shares
from partition.plan.plan import NOTHING, Range, Shard, Sizes

ROWS = 32  # the head's rows are divided in multiples of this, which suits kernels


@dataclass(frozen=True, slots=True)
class Limits:
    """Constraints on cutting a model, and the weights of each part; made by `partition.slices.gguf_slice.limits`.

    Bytes may be fractions, because several heads or columns share a quantization block.
    """

    sizes: Sizes
    head_unit: int  # heads of a rank are a multiple of this, so that attn_output is cut between quantization blocks
    ff_unit: int  # the same for FFN columns and ffn_down
    head_bytes: float  # bytes of one query head in one layer: its rows of attn_q, its columns of attn_output
    kv_head_bytes: float  # bytes of one KV head in one layer: its rows of attn_k and attn_v
    ff_bytes: float  # bytes of one FFN column in one layer: gate, up and down; of the experts that one token uses
    vocab_bytes: float  # bytes of one row of the output head
    layer_bytes: tuple[float, ...]  # bytes of each whole layer
    starts: tuple[int, ...] = ()  # layers that stages can begin with, 0 first; empty: any layer
    no_stage_of: tuple[int, ...] = ()  # numbers of layers that a stage cannot have
    shares_heads: bool = True  # false if each rank has all heads, and only FFN columns are divided

    def __post_init__(self) -> None:
        if self.head_unit < 1 or self.ff_unit < 1:
            raise PlanError(f"units of {self.head_unit} heads and {self.ff_unit} columns; expected 1 or more")
        if len(self.layer_bytes) != self.sizes.layers:
            raise PlanError(f"bytes of {len(self.layer_bytes)} layers of a model that has {self.sizes.layers}")

    @property
    def sums_a_layer(self) -> int:
        """Number of all-reduces in each layer: after the FFN or the experts, and after attention if ranks share it."""
        return 2 if self.shares_heads else 1

    @property
    def most_ranks(self) -> int:
        """Maximum number of ranks that can share a layer."""
        columns = self.sizes.ff // self.ff_unit
        return min(self.sizes.heads // self.head_unit, columns) if self.shares_heads else columns

    @property
    def begins(self) -> tuple[int, ...]:
        """Layers that stages can begin with."""
        return self.starts or tuple(range(self.sizes.layers))

    def can_be_stage(self, start: int, stop: int) -> bool:
        """Return whether the layers [start, stop) can be a stage."""
        edges = (*self.begins, self.sizes.layers)
        return start in self.begins and stop in edges and stop - start > 0 and stop - start not in self.no_stage_of


def kv_heads(heads: Range, n_heads: int, n_heads_kv: int) -> tuple[int, ...]:
    """Return the model's KV head for each KV head of a rank with these query heads, in order.

    llama.cpp uses local KV head `i // (local heads / local KV heads)` for local query head `i`. Each local KV head
    therefore serves the same number of consecutive query heads. If `heads` cuts through a group, KV heads are repeated
    to achieve this. The result is () for a model without KV heads. Raises PlanError if the groups are not equal, or if
    `heads` is outside the model.
    """
    if n_heads_kv == 0:
        return ()
    if n_heads % n_heads_kv:
        raise PlanError(f"{n_heads} query heads cannot share {n_heads_kv} KV heads equally; run the model whole")
    if heads.stop > n_heads:
        raise PlanError(f"heads {heads.start} to {heads.stop} of a model that has {n_heads}")
    group = n_heads // n_heads_kv
    serves = len(heads)  # consecutive query heads that each local KV head serves
    for edge in range(heads.start // group * group + group, heads.stop, group):
        serves = gcd(serves, edge - heads.start)
    return tuple(start // group for start in range(heads.start, heads.stop, serves)) if serves else ()


def shards(
    limits: Limits,
    devices: Sequence[str],
    shares: Sequence[float],
    last: bool = True,
) -> tuple[Shard, ...]:
    """Divide one stage among `devices` in proportion to `shares`. The last stage's vocabulary rows are divided, too.

    All ranks wait for each other after attention, and again after the FFN. Heads and FFN columns are therefore divided
    independently, because neither can compensate for the other. Heads are divided in whole KV groups or in parts of
    groups, whichever lets the last rank finish first. KV heads that ranks repeat count as work. Raises PlanError if
    there are more ranks than units of the model, or for bad shares.
    """
    parts = checked_shares(shares, len(devices))
    heads, ff = [Range(0, limits.sizes.heads)], [Range(0, limits.sizes.ff)]
    if len(devices) > 1:
        _check_units(limits, len(devices))
        heads = _heads(limits, parts) if limits.shares_heads else heads * len(devices)
        ff = _ranges(apportion(limits.sizes.ff // limits.ff_unit, parts), limits.ff_unit, limits.sizes.ff)
    vocab = [NOTHING] * len(devices)
    if last:
        vocab = _vocab(limits.sizes.vocab, parts)
    return tuple(Shard(*fields) for fields in zip(devices, heads, ff, vocab, strict=True))


def attention_bytes(limits: Limits, heads: Range) -> float:
    """Return the bytes of these heads in one layer, including the KV heads that they need."""
    n_kv = len(kv_heads(heads, limits.sizes.heads, limits.sizes.heads_kv))
    return len(heads) * limits.head_bytes + n_kv * limits.kv_head_bytes


def _heads(limits: Limits, shares: Sequence[float]) -> list[Range]:
    """Return the heads of each rank."""
    candidates = []
    for unit in _head_units(limits, len(shares)):
        heads = _ranges(apportion(limits.sizes.heads // unit, shares), unit, limits.sizes.heads)
        work = [attention_bytes(limits, part) for part in heads]
        candidates.append((_slowest(work, shares), heads))
    return min(candidates, key=lambda cut: cut[0])[1]


def _slowest(work: Sequence[float], shares: Sequence[float]) -> float:
    slowest = max(w / share for w, share in zip(work, shares, strict=True))
    return float(f"{slowest:.9g}")  # rounding makes equal values equal


def _head_units(limits: Limits, ranks: int) -> list[int]:
    """Return possible numbers of heads in a unit, largest first, that give at least one unit to each rank.

    These are whole KV groups, then parts of a group, then the least number that the quantization permits.
    """
    sizes, least = limits.sizes, limits.head_unit
    group = sizes.heads // sizes.heads_kv if sizes.heads_kv else 1
    units = {least, lcm(group, least)} | {unit for unit in range(least, group, least) if group % unit == 0}
    return [unit for unit in sorted(units, reverse=True) if sizes.heads // unit >= ranks]


def _check_units(limits: Limits, ranks: int) -> None:
    """Raise PlanError unless each rank can have a unit of heads and a unit of FFN columns."""
    for what, tensor, total, unit in (
        ("attention heads", "attn_output", limits.sizes.heads, limits.head_unit),
        ("FFN columns", "ffn_down", limits.sizes.ff, limits.ff_unit),
    ):
        units = total // unit
        if units >= ranks or (what == "attention heads" and not limits.shares_heads):
            continue
        fewer = "one rank" if units < 2 else f"at most {units} ranks"
        block, smaller = "", ""
        if unit > 1:
            block = f", of which the quantization blocks of {tensor} allow {units} pieces of {unit}"
            smaller = ", a quantization with smaller blocks"
        raise PlanError(
            f"{ranks} ranks share {total} {what}{block}; use {fewer} a stage{smaller}, or --parallel pipeline"
        )


def _vocab(rows: int, shares: Sequence[float]) -> list[Range]:
    """Return the head's rows of each rank."""
    if rows < len(shares):
        raise PlanError(
            f"{len(shares)} ranks share {rows} rows of the head; use at most {rows} ranks in the last stage"
        )
    unit = ROWS if rows // ROWS >= len(shares) else 1
    return _ranges(apportion(rows // unit, shares), unit, rows)


def _ranges(counts: Sequence[int], unit: int, total: int) -> list[Range]:
    """Return consecutive ranges with these numbers of units. The last range ends at `total`."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count * unit)
    ends[-1] = total
    return [Range(start, stop) for start, stop in pairwise(ends)]
