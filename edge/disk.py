"""How fast weights come from this disk, and how fast they are computed with: what window and threads are chosen by."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from edge.address_space import HUGE_PAGE, PAGE, AddressSpace
from edge.ggml_products import Products
from edge.ggml_weights import ROW_GROUP
from edge.pager import Piece, Source
from edge.reader import DEFAULT_CHUNK, Job, Reader

_THREADS = (2, 4)
_CHUNKS = (DEFAULT_CHUNK, 2 * HUGE_PAGE - 2 * PAGE)
_MOST_BYTES = 256 << 20  # read for one setting
_MOST_S = 0.1  # likewise; a slow card needs no more to be seen to be slow
_JOB_BYTES = 8 << 20
_AHEAD = 2  # jobs under way
_WORTH = 1.1  # more threads and larger buffers must be so much faster
_SLOW = 100e6  # bytes a second: below, one setting is as good as another
_PROMPT_ROWS = 32


def measure_reads(largest: Piece, threads: int | None, chunk: int | None) -> tuple[int, int, float]:
    """(threads, bytes of a read, bytes a second) of the fastest setting, of those given or a few; `largest` is what is
    read. WeightsError where the disk fails."""
    best = (0, 0, 0.0)
    for n in (threads,) if threads else _THREADS:
        for size in (chunk,) if chunk else _CHUNKS:
            rate = _read_rate(largest, n, size)
            if rate > best[2] * _WORTH:
                best = (n, size, rate)
            if rate < _SLOW:
                return best
    return best


def _read_rate(largest: Piece, threads: int, chunk: int) -> float:
    """Bytes a second, with some jobs under way."""
    weight, source = largest.weight, largest.source
    rows = min(largest.rows, max(1, _JOB_BYTES // weight.row_bytes // ROW_GROUP) * ROW_GROUP)
    parts = [
        Piece(
            weight,
            Source(source.file, source.offset + first * weight.row_bytes),
            rows * weight.row_bytes,
            largest.repacked,
        )
        for first in range(0, largest.rows - rows + 1, rows)
    ]
    span = max(part.span for part in parts)
    reader = Reader(weight.row_bytes, threads, chunk)
    space = AddressSpace(_AHEAD * span, huge=True)
    jobs: deque[Job] = deque()
    try:
        began, n_bytes, i = time.perf_counter(), 0, 0
        while n_bytes < _MOST_BYTES and time.perf_counter() - began < _MOST_S:
            part = parts[i % len(parts)]
            jobs.append(reader.submit(part.read(space, i % _AHEAD * span)))
            n_bytes, i = n_bytes + part.n_bytes, i + 1
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
    np.frombuffer(space.view(0, piece.span), np.uint8).fill(1)  # memory never written to would all be the same page
    try:

        def rate(n: int) -> float:
            times = []
            for _ in range(4):  # the first starts threads
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
