"""Collectives over links: broadcast, gather, barrier; all-reduce as star, mesh or split (reduce-scatter, all-gather).

Every element is added in rank order, ((x0 + x1) + x2) + ..., with any algorithm and in any order of arrival. So all
ranks hold the same bits, and every algorithm gives the same bits. With a lossy wire type each rank encodes its
tensor once and uses the decoded values itself. Sums are sent as float32. The result is the rank-order sum of the
decoded tensors.

In mesh and split a rank receives before it sends more than the peer's buffers hold, so ranks that send large tensors to
each other never block each other. In star, broadcast and gather one side sends and the other receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from transport.choice import ALGORITHMS, Algorithm, Choice, choose
from transport.link import Link, receive_parts, send_parts

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Pieces = Callable[[int, int], Floats | Bytes]  # returns floats [lo, hi) of a tensor in the wire type

BLOCK = 32  # floats; wire types encode blocks of this size, so tensors are cut at multiples of it
CHUNK_FLOATS = 32 << 10  # 128 KiB
_AHEAD = 1  # chunks sent before the first is received; three in all fit in a socket's send buffer (425,984 bytes)


class Wire(Protocol):
    """Encoding of a float32 tensor for sending. `quant.wire` has the types; None means float32 unchanged.

    Floats [lo, hi), cut at multiples of BLOCK, are bytes [n_bytes(lo), n_bytes(hi)) of the whole.
    """

    name: str

    def n_bytes(self, n: int) -> int:
        """Return the bytes of `n` floats."""

    def encode(self, x: Floats, out: Bytes) -> None:
        """Write `x` [n] to `out` [n_bytes(n)]."""

    def decode(self, data: Bytes, out: Floats) -> None:
        """Decode `data` [n_bytes(n)] to `out` [n]."""


class Group:
    """Process group: one rank's links to all other ranks, and the collectives over them.

    All ranks must call the same collectives in the same order, with tensors of the same size. They raise the errors
    of links, and the group cannot be used after an error.
    """

    def __init__(self, rank: int, links: Mapping[int, Link]) -> None:
        """links: a link to every other rank, by rank."""
        self.rank = rank
        self.world_size = len(links) + 1
        if sorted([*links, rank]) != list(range(self.world_size)):
            raise ValueError(f"rank {rank} of {self.world_size} needs a link to every other rank, has {sorted(links)}")
        self.links = dict(links)
        # Each rank sends to the next rank first, so that no two ranks send to the same rank simultaneously.
        others = range(1, self.world_size)
        self._targets = [(rank + i) % self.world_size for i in others]
        self._sources = [(rank - i) % self.world_size for i in others]
        # One-way latency, and bytes/s that a device can send, of the worst link. All ranks use the same figures.
        self.latency_s = 100e-6
        self.bandwidth = 125e6
        self._choices: dict[tuple[int, str], Choice] = {}  # choices of `auto` by floats and wire type
        self._buffers: dict[int | str, NDArray[Any]] = {}

    def agree(self, latency_s: float, bandwidth: float) -> None:
        """Adopt the worst figures that any rank measured, so that `auto` chooses the same algorithm on every rank."""
        figures = np.array([latency_s, bandwidth], np.float64)
        rows = self.gather(figures.view(np.uint8))
        if rows is not None:
            all_ = np.stack([row.view(np.float64) for row in rows])
            figures[:] = all_[:, 0].max(), all_[:, 1].min()
        self.broadcast(figures.view(np.uint8))
        self.latency_s, self.bandwidth = float(figures[0]), float(figures[1])
        self._choices.clear()

    def part(self, ranks: Sequence[int]) -> Group:
        """Return the subgroup of `ranks`, which include this one, renumbered in that order. The links are shared."""
        links = {i: self.links[rank] for i, rank in enumerate(ranks) if rank != self.rank}
        group = Group(list(ranks).index(self.rank), links)
        group.latency_s, group.bandwidth = self.latency_s, self.bandwidth
        return group

    def choice(self, n_floats: int, wire: Wire | None = None) -> Choice:
        """Return the algorithm that `auto` uses for a tensor of `n_floats`, with the times of all."""
        key = n_floats, wire.name if wire else ""
        chosen = self._choices.get(key)
        if chosen is None:
            n_bytes = 4 * n_floats
            wire_bytes = wire.n_bytes(n_floats) if wire else n_bytes
            chosen = choose(n_bytes, wire_bytes, self.world_size, self.latency_s, self.bandwidth)
            self._choices[key] = chosen
        return chosen

    # --- collectives ---

    def allreduce(
        self,
        x: Floats,
        algorithm: Algorithm | Literal["auto"] = "auto",
        wire: Wire | None = None,
        lost: Floats | None = None,
    ) -> Algorithm:
        """Replace `x` (float32, contiguous, any shape) by its sum over all ranks; return the algorithm used.

        lost: array like `x`, filled with the rounding error of this rank's `x` in the wire type.
        """
        flat = x.reshape(-1)
        if x.dtype != np.float32 or not x.flags.c_contiguous:
            raise ValueError(f"allreduce takes contiguous float32, not {x.dtype} with strides {x.strides}")
        if not x.flags.writeable:
            raise ValueError("allreduce writes the sum into its argument, and this one is read-only; give it a copy")
        chosen = self.choice(flat.size, wire).algorithm if algorithm == "auto" else algorithm
        if chosen not in ALGORITHMS:
            raise ValueError(f"{chosen!r} is not an allreduce algorithm; use auto, {', '.join(ALGORITHMS)}")
        if self.world_size > 1 and flat.size:
            with np.errstate(over="ignore", invalid="ignore"):  # sums may be infinite or NaN
                getattr(self, f"_{chosen}")(flat, self._own(flat, wire, lost), wire)
        elif lost is not None:
            lost[...] = 0
        return chosen

    def broadcast(self, data: Bytes, root: int = 0) -> None:
        """Replace `data` (uint8, contiguous, the same size everywhere) by the root's."""
        if self.rank == root:
            for rank in self._targets:
                send_parts(self.links[rank], data)
        else:
            receive_parts(self.links[root], data)

    def gather(self, data: Bytes, root: int = 0) -> list[Bytes] | None:
        """Collect the tensors of all ranks at the root, in rank order; return None elsewhere. All have the same
        size."""
        if self.rank != root:
            send_parts(self.links[root], data)
            return None
        rows = [data if rank == root else np.empty_like(data) for rank in range(self.world_size)]
        for rank, row in enumerate(rows):
            if rank != root:
                receive_parts(self.links[rank], row)
        return rows

    def barrier(self) -> None:
        """Return when every rank has called it."""
        for rank in self._targets:
            self.links[rank].send()
        for rank in self._sources:
            self.links[rank].receive_into(bytearray())

    def close(self) -> None:
        """Close all links."""
        for link in self.links.values():
            link.close()

    # --- allreduce, one method for each algorithm. x: [n], decoded from the wire type. own: pieces of x to send ---

    def _star(self, x: Floats, own: Pieces, wire: Wire | None) -> None:
        if self.rank:
            for lo, hi in _spans(x.size):
                self.links[0].send(own(lo, hi))
            for lo, hi in _spans(x.size):
                self.links[0].receive_into(x[lo:hi])
            return
        for rank in range(1, self.world_size):
            for lo, hi in _spans(x.size):
                part = self._buffer(0, hi - lo)
                self._receive_tensor(rank, part, wire)
                np.add(x[lo:hi], part, out=x[lo:hi])
        for lo, hi in _spans(x.size):
            for rank in self._targets:
                self.links[rank].send(x[lo:hi])

    def _mesh(self, x: Floats, own: Pieces, wire: Wire | None) -> None:
        if x.size <= CHUNK_FLOATS:  # every decode step is this small
            piece = own(0, x.size)
            for rank in self._targets:
                self.links[rank].send(piece)
            self._add_all(x, wire)
            return

        def send(lo: int, hi: int) -> None:
            piece = own(lo, hi)
            for rank in self._targets:
                self.links[rank].send(piece)

        def receive(lo: int, hi: int) -> None:
            self._add_all(x[lo:hi], wire)

        _windowed(x.size, send, receive)

    def _split(self, x: Floats, own: Pieces, wire: Wire | None) -> None:
        bounds = _shares(x.size, self.world_size)
        own_share = x[slice(*bounds[self.rank])]
        longest = max(hi - lo for lo, hi in bounds)

        def send_parts(lo: int, hi: int) -> None:
            for rank in self._targets:
                start, end = _within(bounds[rank], lo, hi)
                if start < end:
                    self.links[rank].send(own(start, end))

        def add_parts(lo: int, hi: int) -> None:
            self._add_all(own_share[lo:hi], wire)

        def send_sums(lo: int, hi: int) -> None:
            for rank in self._targets if lo < own_share.size else ():
                self.links[rank].send(own_share[lo:hi])

        def receive_sums(lo: int, hi: int) -> None:
            for rank in self._sources:
                start, end = _within(bounds[rank], lo, hi)
                if start < end:
                    self.links[rank].receive_into(x[start:end])

        _windowed(longest, send_parts, add_parts)
        _windowed(longest, send_sums, receive_sums)

    # --- pieces ---

    def _own(self, x: Floats, wire: Wire | None, lost: Floats | None) -> Pieces:
        """Encode our own tensor once, and replace it by the values that other ranks will decode. Return its pieces."""
        if wire is None:
            if lost is not None:
                lost[...] = 0
            return lambda lo, hi: x[lo:hi]
        data = self._buffer("own", wire.n_bytes(x.size), np.uint8)
        wire.encode(x, data)
        if lost is not None:
            np.copyto(lost.reshape(-1), x)
        wire.decode(data, x)
        if lost is not None:
            np.subtract(lost.reshape(-1), x, out=lost.reshape(-1))
        return lambda lo, hi: data[wire.n_bytes(lo) : wire.n_bytes(hi)]

    def _receive_tensor(self, rank: int, out: Floats, wire: Wire | None) -> None:
        if wire is None:
            self.links[rank].receive_into(out)
            return
        data = self._buffer("received", wire.n_bytes(out.size), np.uint8)
        self.links[rank].receive_into(data)
        wire.decode(data, out)

    def _add_all(self, x: Floats, wire: Wire | None) -> None:
        """Receive the same part from every other rank and add all of them to ours, in rank order."""
        if not x.size:
            return
        if self.world_size == 2:
            part: Floats = self._buffer(0, x.size)
            self._receive_tensor(1 - self.rank, part, wire)
            # The order matters, because the first of two NaNs is kept.
            np.add(*((part, x) if self.rank else (x, part)), out=x)
            return
        parts = {rank: self._buffer(rank, x.size) for rank in self._sources}
        for rank in self._sources:
            self._receive_tensor(rank, parts[rank], wire)
        parts[self.rank] = x
        total = self._buffer(self.rank, x.size)
        np.add(parts[0], parts[1], out=total)
        for rank in range(2, self.world_size):
            np.add(total, parts[rank], out=total)
        x[:] = total

    def _buffer(self, key: int | str, n: int, dtype: type = np.float32) -> NDArray[Any]:
        """Return an array of `n` values, reused between calls under its key. Its content is undefined."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < n:
            buffer = self._buffers[key] = np.empty(max(n, 1024), dtype)
        return buffer[:n]


def _spans(n: int) -> list[tuple[int, int]]:
    """Return [0, n) in chunks of CHUNK_FLOATS."""
    return [(lo, min(lo + CHUNK_FLOATS, n)) for lo in range(0, n, CHUNK_FLOATS)]


def _shares(n: int, parts: int) -> list[tuple[int, int]]:
    """Return [0, n) in `parts` parts of nearly equal size, cut between blocks. If n is small, some are empty."""
    edges = [min(n, n * i // parts // BLOCK * BLOCK) for i in range(parts)] + [n]
    return list(pairwise(edges))


def _within(bounds: tuple[int, int], lo: int, hi: int) -> tuple[int, int]:
    """Return floats [lo, hi) of a share as floats of the tensor, cut at the end of the share."""
    start, end = bounds
    return min(start + lo, end), min(start + hi, end)


def _windowed(n: int, send: Callable[[int, int], None], receive: Callable[[int, int], None]) -> None:
    """Send and receive [0, n) in chunks, a few sent ahead so that the wire is never idle."""
    if n <= CHUNK_FLOATS:  # one chunk
        send(0, n)
        receive(0, n)
        return
    spans = _spans(n)
    ahead = min(_AHEAD, len(spans) - 1)
    for span in spans[:ahead]:
        send(*span)
    for i, span in enumerate(spans):
        if i + ahead < len(spans):
            send(*spans[i + ahead])
        receive(*span)
