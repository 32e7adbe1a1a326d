"""Test the figures of disks, memory, kernels and reads under a budget, with a simulated clock."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from devices import machine_disk, probe
from edge.llama.address_space import PAGE
from edge.quantization import kernels
from edge.quantization.kernels import measure_kernels
from edge.weights import measure, reader
from edge.weights.experts import ExpertCounts
from edge.weights.reader import Job, ReaderCounts
from edge.weights.stats import Passes
from quant.types import TYPES
from tests.support.clock import Clock
from tests.support.helpers import TIMEOUT_S, until

MIB = 1 << 20


def test_memory_bandwidth_is_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(tick_s=0.25).install(monkeypatch, probe)
    monkeypatch.setattr(probe, "available_memory", lambda: 1 << 40)
    assert probe.memory_bandwidth_gbps(2, 64_000_000, repeats=3) == pytest.approx(64e6 / 0.25 / 1e9)


def test_a_disks_rate_is_bytes_over_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks that each take half a second, by two threads in turn."""
    clock = Clock().install(monkeypatch, machine_disk)
    block = machine_disk._BLOCK
    monkeypatch.setattr(machine_disk, "_THREADS", 1)
    monkeypatch.setattr(machine_disk, "_MOST_READ_S", 9.0)
    monkeypatch.setattr(os, "preadv", clock.while_it_runs(os.preadv, lambda *_: 0.5))
    path = tmp_path / "blocks"
    path.write_bytes(bytes(3 * block))
    with path.open("rb") as file:
        assert machine_disk._rate(file.fileno(), 3 * block, again=False) == pytest.approx(block / 0.5)
        clock.now = 0.0
        assert machine_disk._rate(file.fileno(), 3 * block, again=True) == pytest.approx(block / 0.5)
        assert clock.now == 9.0


@pytest.mark.parametrize("n_bytes", [1 * MIB, 3 * MIB])
def test_weights_come_at_bytes_over_seconds(n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate that windows are chosen by: jobs are under way until the clock says so."""
    clock = Clock().install(monkeypatch, measure)
    weight = SimpleNamespace(row_bytes=4096, name="w", n_bytes=n_bytes)

    class Part(SimpleNamespace):
        span = n_bytes

        def read(self, space: Any, start: int) -> int:
            return self.n_bytes

    class Reads:
        """A disk of 50 MB a second."""

        def __init__(self, *_: Any) -> None:
            pass

        def submit(self, job: int) -> int:
            return job

        def wait(self, job: int) -> None:
            clock.now += job / 50e6

        def close(self) -> None:
            pass

    monkeypatch.setattr(measure, "Reader", Reads)
    largest: Any = SimpleNamespace(
        weight=weight, rows=n_bytes // 4096, cut=lambda rows: [Part(rows=rows, n_bytes=n_bytes)]
    )
    assert measure.read_rate(largest, 2, 1 << 16) == pytest.approx(50e6)


def multiplying(clock: Clock, seconds_a_row: float) -> type:
    class Products:
        """Kernels that take so long for each row."""

        def __init__(self, threads: int) -> None:
            pass

        def multiply(self, *args: Any) -> None:
            clock.now += seconds_a_row * args[5]

        def close(self) -> None:
            pass

    return Products


def test_rates_of_products_count_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch, measure)
    monkeypatch.setattr(measure, "Products", multiplying(clock, 0.5))
    weight = SimpleNamespace(shape=(1, 8, 256), row_bytes=1024)
    piece: Any = SimpleNamespace(span=8192, n_bytes=8192, rows=8, repacked=False, weight=weight)
    assert measure.measure_products(piece, 1) == pytest.approx((8192 / 0.5, 8192 / 0.5))


def test_kernels_speeds_count_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch, kernels)
    monkeypatch.setattr(kernels, "Products", multiplying(clock, 0.125))
    monkeypatch.setattr(kernels, "_MATRIX_BYTES", 1 << 16)
    (result,) = measure_kernels([TYPES["f16"]], 256, 1, prompts=True)
    values = (1 << 16) // 2
    assert result.decode == pytest.approx(values / 0.125 / 1e9)
    assert result.prefill == pytest.approx(values / 0.125 / 1e9)  # so many for each row, and 32 rows take 32 times


def test_what_paging_cost_by_known_reads() -> None:
    """Two tokens of decode, then a prompt of four: each has its own figures, and those before a `clear` are gone."""
    reads, experts = [ReaderCounts()], [ExpertCounts()]
    now_s = [5.0]
    passes = Passes(SimpleNamespace(counts=lambda: reads[0]), lambda: experts[0], lambda: now_s[0])  # type: ignore[arg-type]

    def a_pass(sequences: list[int], **read: Any) -> None:
        passes.begin(np.array(sequences, np.int32))
        reads[0] = ReaderCounts(**{name: n + read[name] for name, n in reads[0]._asdict().items()})
        experts[0] = ExpertCounts(*(n + more for n, more in zip(experts[0], (8, 6), strict=True)))
        now_s[0] += 0.016
        passes.end()
        now_s[0] += 100.0  # not of any pass

    a_pass([0], n_bytes=999, busy_s=9.0, wait_s=9.0)
    passes.clear()
    a_pass([0, 1], n_bytes=4_000_000, busy_s=0.010, wait_s=0.004)
    a_pass([0, 0, 0, 0], n_bytes=8_000_000, busy_s=0.010, wait_s=0.012)
    result = passes.stats()
    assert result.decode.tokens == 2
    assert result.decode.to_json() == pytest.approx(
        {
            "bytes_per_token": 2e6,
            "disk_gbps": 0.4,
            "stall_ms": 2.0,
            "hidden_ms": 3.0,
            "compute_ms": 6.0,  # a pass takes 16 ms, 4 of them waiting, for two tokens
            "hit_rate": 0.75,
        }
    )
    assert result.prefill.tokens == 4
    assert (result.prefill.bytes_per_token, result.prefill.disk_gbps) == pytest.approx((2e6, 0.8))
    assert (result.prefill.stall_ms, result.prefill.hidden_ms) == pytest.approx((3.0, 0.0))
    assert result.prefill.compute_ms == pytest.approx(1.0)
    costs = "1.91 MiB read a token at 0.40 GB/s, 2.0 ms waiting, 6.0 ms computing, 3.0 ms of reading hidden behind that"
    assert result.decode.describe() == f"{costs}, 75% of the experts were in memory"


def test_a_readers_seconds_are_those_it_read_and_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks that take a second each, while the engine waits, and a second job later that nobody waits for."""
    clock = Clock().install(monkeypatch, reader)
    go = threading.Event()

    def bring(self: reader.Reader, *_: Any) -> None:
        assert go.wait(TIMEOUT_S)
        clock.now += 1.0

    monkeypatch.setattr(reader.Reader, "_bring", bring)
    first = reader.Reader(1024, 1, PAGE)
    waited = first._until_done

    def until_done(job: Job) -> None:
        go.set()
        waited(job)

    monkeypatch.setattr(first, "_until_done", until_done)

    def job(n_bytes: int) -> Job:
        weight: Any = SimpleNamespace(row_bytes=1024)
        nowhere: Any = None
        return Job(weight, nowhere, 0, n_bytes, nowhere, 0, False)

    try:
        two_chunks = first.submit(job(PAGE + 1024))
        first.wait(two_chunks)
        assert first.counts() == ReaderCounts(PAGE + 1024, pytest.approx(2.0), pytest.approx(2.0))
        clock.now += 5.0  # nothing is read
        alone = first.submit(job(1024))
        until(lambda: alone.done, "the second job")
        first.wait(alone)
        assert first.counts() == ReaderCounts(PAGE + 2048, pytest.approx(3.0), pytest.approx(2.0))
    finally:
        first.close()
