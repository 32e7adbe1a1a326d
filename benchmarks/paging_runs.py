"""Shared parts of the sections of bench_paging.py: model files, a process under a limit, and the speed of the disk."""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import GIB
from benchmarks.processes import Grouped, RankFailed, memory_group
from benchmarks.raw_disk import RawDisk, forget
from edge.models import synth
from edge.models.shapes import Shape, shape
from edge.models.synth import SHAPES
from quant.gguf.file import GgufFile

SIDE = Path(__file__).with_name("paging_side.py")
CONTEXT = 512  # tokens; enough for everything here, and the same for both sides of a comparison
PROMPT = 32  # tokens
RUN_S = 7200.0  # what a load or a run may take at most
DISK_S = 2.5  # of one measurement of the disk

_TINY = shape("llama", layers=16, embd=512, ff=2048, heads=8, kv=4, vocab=4096)  # 64 MB at Q8_0

_TINY_MOE = shape(
    "qwen3moe", layers=4, embd=512, ff=512, heads=8, kv=2, vocab=2048, experts=16, experts_used=2, expert_ff=256
)


@dataclass(frozen=True)
class Model:
    """A file with random weights of a shape."""

    shape: Shape
    type_name: str = "q4_0"
    large: bool = False  # not kept, unless it was asked for


MODELS = {
    "1b": Model(SHAPES["tinyllama-1.1b"]),
    "8b": Model(SHAPES["llama-3.1-8b"]),
    "70b": Model(SHAPES["llama-3.1-70b"], large=True),
    "tiny": Model(_TINY, "q8_0"),
    "half-8b": Model(replace(SHAPES["llama-3.1-8b"], layers=16)),
    "moe": Model(replace(SHAPES["qwen3-30b-a3b"], layers=12, vocab=32768)),  # a quarter of its layers
    "tiny-moe": Model(_TINY_MOE),
}


class Models:
    """Model files in a folder, written when they are first asked for."""

    def __init__(self, folder: Path, keep: bool) -> None:
        """keep: do not delete large files that were written here."""
        self._folder, self._keep = folder, keep
        self._written: list[Path] = []

    def __call__(self, name: str) -> Path:
        """The file of that name. SystemExit where one is there that is not it."""
        model, path = MODELS[name], self._folder / f"{name}.gguf"
        if not path.exists():
            print(f"Writing {path.name}", file=sys.stderr)
            synth.synthesize(path, model.shape, model.type_name)
            if model.large:
                self._written.append(path)
        expected = {item.name: item.n_bytes for item in synth.layout(model.shape, model.type_name)}
        if {tensor: t.n_bytes for tensor, t in GgufFile.open(path).tensors.items()} != expected:
            raise SystemExit(f"{path} is not a file of the shape of {name}; delete it, or choose another --work")
        return path

    def close(self) -> None:
        """Delete the large ones that were written here."""
        for path in () if self._keep else self._written:
            path.unlink(missing_ok=True)


@functools.cache
def half_of(model: Path, context: int = CONTEXT, batch: int | None = None) -> int:
    """A budget that half of a small model's weights fit into."""
    with Grouped(SIDE, None) as side:
        options = {"context": context, "batch": batch, "memory": GIB // 2}
        [loaded] = side.tell("load", model=str(model), options=options)
    return int(loaded["memory"]["total_bytes"]) - model.stat().st_size // 2


def alone(
    model: Path, options: Mapping[str, Any], limit: int | None, sizes: Mapping[str, int], disk: RawDisk, disk_s: float
) -> dict[str, Any]:
    """A process of its own that loads the model and runs, inside a memory group of `limit` bytes where one is given;
    all caches are dropped before, and the disk is measured before and after.

    The answer has "loaded" and "run" as the side gives them, "group" as the memory group reports, "disk_gbps" (by
    setting: before, after) and "killed"; where it did not come to its end, "failed" says how.
    """
    before = disk.gbps(disk_s)
    forget(model)
    results: dict[str, Any] = {"killed": False}
    with ExitStack() as stack:
        group = stack.enter_context(memory_group(limit)) if limit else None
        side = Grouped(SIDE, group)
        with side:
            try:
                [results["loaded"]] = side.tell("load", RUN_S, model=str(model), options=dict(options))
                [results["run"]] = side.tell("run", RUN_S, **sizes)
                side.tell("close")
            except RankFailed as failed:
                results["failed"] = str(failed)
        results["killed"] = side.killed
        if group:
            results["group"] = group.memory_report()
    after = disk.gbps(disk_s)
    results["disk_gbps"] = {setting: (rate, after[setting]) for setting, rate in before.items()}
    return results


def disk_bounds(rounds: Sequence[Mapping[str, Any]]) -> tuple[str, list[float]]:
    """The setting that is best for the disk on the median of all rounds, and its GB/s beside each round. The best of
    every single measurement would be higher than the disk is, for one of many is always lucky."""
    rates = {name: [rate for item in rounds for rate in item["disk_gbps"][name]] for name in rounds[0]["disk_gbps"]}
    best = max(rates, key=lambda name: statistics.median(rates[name]))
    return best, [statistics.median(item["disk_gbps"][best]) for item in rounds]


def middle(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Medians of what the runs measured; None where not all came to their end."""
    if not all("run" in item for item in rounds):
        return None
    return {key: statistics.median(item["run"][key] for item in rounds) for key in rounds[0]["run"]}
