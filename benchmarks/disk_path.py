"""Speed of reading a file, by the memory that receives the data and by concurrent computation: the losses between the
disk and a running model.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import MIB, table
from benchmarks.raw_disk import RawDisk

RINGS = (4, 8, 16, 64)  # MiB that reads land in, round and round; a window of an 8B model has 66
THREADS, CHUNK = 2, 2 * MIB  # as models read
_READY_S = 120.0


def spin(ready: Event) -> None:
    """Compute in the first-level cache."""
    a = np.arange(2048)
    ready.set()
    while _wanted():
        for _ in range(1000):
            a ^= a + 1


def copy(ready: Event) -> None:
    """Copy memory, more than a cache holds."""
    a, b = np.ones((2, 16 * MIB))
    ready.set()
    while _wanted():
        b[:] = a


def decode(ready: Event, model: str, threads: int) -> None:
    """Decode with a model that is in memory."""
    from edge.llm.engine import Engine
    from edge.llm.options import EngineOptions

    engine = Engine(model, EngineOptions(context=256, threads=threads, repack=True))
    token = np.ones(1, np.int32)
    ready.set()
    while _wanted():
        engine.kv_clear()
        for i in range(20):
            engine.decode(token, i, top=1)


def _wanted() -> bool:
    """Return whether the process that measures is still there."""
    parent = multiprocessing.parent_process()
    return parent is not None and parent.is_alive()


@contextmanager
def computing(targets: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> Iterator[None]:
    """Processes that compute for the time of the block."""
    context = multiprocessing.get_context("spawn")
    ready = [context.Event() for _ in targets]
    processes = [
        context.Process(target=run, args=(event, *arguments), daemon=True)
        for (run, arguments), event in zip(targets, ready, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        if not all(event.wait(_READY_S) for event in ready):
            raise SystemExit("what is to compute beside reads did not begin; its last words are above")
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def measure(file: Path, resident: Path, rounds: int, seconds: float, tiny: bool) -> list[dict[str, Any]]:
    """Return rates of reading `file` beside each load, by ring, in turn. resident: the model that decodes."""
    loads: dict[str, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {"nothing": []}
    for n in (1,) if tiny else (1, 2):
        loads[f"{n} in the cache"] = [(spin, ())] * n
        loads[f"{n} copying memory"] = [(copy, ())] * n
        loads[f"a model on {n}"] = [(decode, (str(resident), n))]
    samples: dict[tuple[str, int], list[dict[str, float]]] = {}
    with RawDisk(file) as disk:
        for load, targets in loads.items():
            with computing(targets):
                for _ in range(rounds):
                    for ring in RINGS[:1] if tiny else RINGS:
                        samples.setdefault((load, ring), []).append(_sample(disk, file, ring * MIB, seconds))
    rows = []
    for (load, ring), many in samples.items():
        rates = [sample["gbps"] for sample in many]
        middle = {key: statistics.median(sample[key] for sample in many) for key in many[0]}
        rows.append({"beside": load, "ring_mib": ring, **middle, "least": min(rates), "most": max(rates)})
    return rows


def _sample(disk: RawDisk, file: Path, ring: int, seconds: float) -> dict[str, float]:
    """One measurement: GB/s, this process's own processor time, and what requests took in the device."""
    cpu_s, (requests, device_ms) = time.process_time(), _device(file)
    gbps = disk.rate(THREADS, CHUNK, seconds, ring)
    after = _device(file)
    return {
        "gbps": gbps,
        "cpu_ms_per_gb": 1e3 * (time.process_time() - cpu_s) / (gbps * seconds),
        "request_ms": (after[1] - device_ms) / max(1, after[0] - requests),
    }


def _device(file: Path) -> tuple[int, int]:
    """(reads, ms that they took in all) of the file's device since it was there; zeros where Linux does not say."""
    number = file.stat().st_dev
    with suppress(OSError):
        fields = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat").read_text().split()
        return int(fields[0]), int(fields[3])
    return 0, 0


def text(r: Mapping[str, Any]) -> str:
    """The result as Markdown: a line for each load, a column for each ring."""
    rings = list(dict.fromkeys(row["ring_mib"] for row in r["cases"]))
    lines = []
    for baseline in dict.fromkeys(row["beside"] for row in r["cases"]):
        rows = [row for row in r["cases"] if row["beside"] == baseline]
        rates = [f"{row['gbps']:.2f} ({row['least']:.2f} to {row['most']:.2f})" for row in rows]
        last = rows[-1]
        lines.append([baseline, *rates, f"{last['request_ms']:.2f}", f"{last['cpu_ms_per_gb']:.0f}"])
    header = ["beside", *(f"{ring} MiB, GB/s" for ring in rings), "a request in the device, ms"]
    return table([*header, "readers' processor time, ms/GB"], lines)
