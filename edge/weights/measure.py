"""Measure read and compute speeds, to choose the window and the number of threads."""

from __future__ import annotations

import time
from collections import deque
from contextlib import closing

import numpy as np

from edge.llama.address_space import HUGE_PAGE, PAGE, AddressSpace
from edge.llama.buffers import ROW_GROUP
from edge.llama.products import Products
from edge.weights.reader import Job, Reader
from edge.weights.window import Piece
from partition.predict.hysteresis import READS, clearly_faster

_STEP = HUGE_PAGE - 2 * PAGE  # bytes: one huge page, including the surrounding pages
_SETTINGS = ((2, _STEP), (2, 2 * _STEP), (4, 2 * _STEP), (4, 4 * _STEP))  # threads, bytes per read
_MOST_BYTES = 256 << 20  # maximum read per setting
_MOST_S = 0.1  # maximum seconds per setting; a slow disk shows its speed within that
_JOB_BYTES = 32 << 20
_AHEAD = 2  # jobs in flight
_SLOW = 100e6  # bytes per second; below this all settings are equally good
_PROMPT_ROWS = 32


def measure_reads(largest: Piece, threads: int | None, chunk: int | None, most: int) -> tuple[int, int, float]:
    """Return (threads, bytes per read, bytes per second) of the fastest setting.

    largest: piece to read.
    threads: number of reader threads; None: try several numbers.
    chunk: bytes per read; None: try several sizes.
    most: maximum size of the buffers in bytes.
    Raises WeightsError if the disk fails.

    Few threads and small buffers stay in the CPU's caches. They are fastest if the disk writes to memory
    that is close to the CPU. On other machines, more and larger buffers are up to 50 % faster.
    """
    best = (0, 0, 0.0)
    for n, size in dict.fromkeys((threads or n, chunk or size) for n, size in _SETTINGS):
        if best[0] and Reader.memory(largest.weight.row_bytes, n, size) > most:
            break
        rate = read_rate(largest, n, size)
        if clearly_faster(rate, best[2], by=READS):
            best = (n, size, rate)
        if rate < _SLOW:
            break
    return best


def read_rate(largest: Piece, threads: int, chunk: int) -> float:
    """Return the bytes per second with several jobs in flight."""
    row_bytes = largest.weight.row_bytes
    rows = min(largest.rows, max(1, _JOB_BYTES // row_bytes // ROW_GROUP) * ROW_GROUP)
    parts = [part for part in largest.cut(rows) if part.rows == rows]
    span = max(part.span for part in parts)
    jobs: deque[Job] = deque()
    with closing(AddressSpace(_AHEAD * span, huge=True)) as space, closing(Reader(row_bytes, threads, chunk)) as reader:
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


def measure_products(piece: Piece, threads: int) -> tuple[float, float]:
    """Return the bytes of weights per second for a single row, and for one of many rows."""
    rows, columns = piece.rows, piece.weight.shape[2]
    x = np.zeros((_PROMPT_ROWS, columns), np.float32)
    out = np.zeros((_PROMPT_ROWS, rows), np.float32)
    with closing(AddressSpace(piece.span, huge=True)) as space, closing(Products(threads)) as products:
        # without a write, all pages would be the same physical page
        np.frombuffer(space.view(0, piece.span), np.uint8).fill(1)

        def rate(n: int) -> float:
            times = []
            for _ in range(4):  # the first one starts threads
                began = time.perf_counter()
                products.multiply(
                    piece.weight, space.address, rows, piece.repacked, x.ctypes.data, n, out.ctypes.data, 4 * rows
                )
                times.append(time.perf_counter() - began)
            return piece.n_bytes * n / min(times[1:])

        return rate(1), rate(_PROMPT_ROWS)
