"""How fast weights come from this disk, and how fast they are computed with: what window and threads are chosen by."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from edge.address_space import HUGE_PAGE, PAGE, AddressSpace
from edge.ggml_products import Products
from edge.pager import Piece
from edge.reader import DEFAULT_CHUNK, Job, Reader

_THREADS = (1, 2, 4)
_CHUNKS = (DEFAULT_CHUNK, 2 * HUGE_PAGE - 2 * PAGE)
_MOST_BYTES = 256 << 20  # read for one setting
_MOST_S = 0.1  # likewise; a slow card needs no more to be seen to be slow
_AHEAD = 2  # jobs under way
_PROMPT_ROWS = 32


def measure_reads(pieces: Sequence[Piece], threads: int | None, chunk: int | None) -> tuple[int, int, float]:
    """(threads, bytes of a read, bytes a second) of the fastest setting, of those given or a few. WeightsError where
    the disk fails."""
    best = (0, 0, 0.0)
    for n in (threads,) if threads else _THREADS:
        for size in (chunk,) if chunk else _CHUNKS:
            rate = _read_rate(pieces, n, size)
            if rate > best[2] * 1.05:  # fewer threads and smaller buffers, where more bring nothing
                best = (n, size, rate)
    return best


def _read_rate(pieces: Sequence[Piece], threads: int, chunk: int) -> float:
    """Bytes a second, with as much under way as a window holds."""
    reader = Reader(max(piece.weight.row_bytes for piece in pieces), threads, chunk)
    largest = max(piece.span for piece in pieces)
    space = AddressSpace(_AHEAD * largest, huge=True)
    jobs: deque[Job] = deque()
    try:
        began, n_bytes, i = time.perf_counter(), 0, 0
        while n_bytes < _MOST_BYTES and time.perf_counter() - began < _MOST_S:
            piece = pieces[i % len(pieces)]
            jobs.append(reader.submit(piece.read(space, i % _AHEAD * largest)))
            n_bytes, i = n_bytes + piece.n_bytes, i + 1
            if len(jobs) == _AHEAD:
                reader.wait(jobs.popleft())
        while jobs:
            reader.wait(jobs.popleft())
        return n_bytes / (time.perf_counter() - began)
    finally:
        reader.close()
        space.close()


def measure_products(piece: Piece, threads: int) -> tuple[float, float]:
    """Bytes of weights a second that one row passes, and that one of many rows passes."""
    space = AddressSpace(piece.span, huge=True)
    products = Products(threads)
    rows, columns = piece.rows, piece.weight.shape[2]
    x = np.zeros((_PROMPT_ROWS, columns), np.float32)
    out = np.zeros((_PROMPT_ROWS, rows), np.float32)
    try:

        def rate(n: int) -> float:
            times = []
            for _ in range(4):  # the first touches the memory
                began = time.perf_counter()
                products.multiply(
                    piece.weight, space.address, rows, piece.repacked, x.ctypes.data, n, out.ctypes.data, 4 * rows
                )
                times.append(time.perf_counter() - began)
            return piece.n_bytes * n / min(times[1:])

        return rate(1), rate(_PROMPT_ROWS)
    finally:
        products.close()
        space.close()
