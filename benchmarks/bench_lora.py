"""Cost of LoRA adapters: of a pass with an adapter, and of changing the adapter between two passes.

    python -m benchmarks.bench_lora [--rounds 12] [--rank 16] [--work DIR] [--json [FILE]] [--tiny]

| row    | where the model runs                                                          |
| one    | on this device                                                                |
| tensor | on two tensor-parallel ranks, threads of this process                         |
| stages | on two stages, threads of this process                                        |

The model has TinyLlama's shape (1.1B parameters, Q4_0) and random weights; each of the two adapters changes every
matrix of every layer. A device or rank computes with one thread. A round decodes six tokens after a prompt of 64
tokens: two without an adapter, two with the first, two with the second. The first token of each pair follows a change,
the second does not, so passes of both kinds alternate, and other work on the machine affects both. The fastest pass of
each kind counts. `swap` is the additional time of a pass after a change, the median of the three pairs; it must be less
than the time of a token.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import Section, bench, parser_of, table
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.models import synth
from edge.models.shapes import shape
from edge.models.synth import SHAPES
from edge.weights.adapter import Scales
from tests.support.adapters import write_adapter
from tests.support.ranks_here import ranks_here

MODEL, PROMPT = "tinyllama-1.1b", 64
SETS: tuple[Scales, ...] = ((), (1.0, 0.0), (0.0, 1.0))
SIDES: dict[str, dict[str, Any] | None] = {
    "one": None,
    "tensor": {"parallel": "tensor", "shares": [1, 1]},
    "stages": {"parallel": "pipeline", "shares": [1, 1]},
}


def main() -> None:
    parser = parser_of(__doc__, rounds=12)
    parser.add_argument("--rank", type=int, default=16, metavar="R", help="of the adapters (default: 16)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where the model is kept (default: nowhere)")
    bench(parser, Section(measure, text))


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The times of passes on each side."""
    model = (args.work or folder) / "model.gguf"
    if not model.exists():
        tiny = shape("llama", layers=2, embd=128, ff=256, heads=4, kv=2, vocab=512, context=512)
        synth.synthesize(model, tiny if args.tiny else SHAPES[MODEL], "q4_0")
    adapters = [write_adapter(folder / f"{name}.gguf", model, rank=args.rank, type_name="f16", seed=seed, size=0.01)
                for seed, name in enumerate(("first", "second"))]  # fmt: skip
    rounds = 2 if args.tiny else args.rounds
    rows = []
    for side, how in SIDES.items():
        with engine_of(model, adapters, how) as engine:
            rows.append({"side": side, **passes(engine, rounds)})
    return {"adapter_bytes": adapters[0].stat().st_size, "rank": args.rank, "rows": rows}


@contextmanager
def engine_of(model: Path, adapters: list[Path], how: dict[str, Any] | None) -> Iterator[TextEngine]:
    """The model on one device, or on ranks here, with all adapters loaded."""
    options = EngineOptions(context=512, threads=1, lora=tuple(map(str, adapters)))
    if how is None:
        with Engine(model, options) as engine:
            yield engine
    else:
        with (
            tempfile.TemporaryDirectory(dir=model.parent) as folder,
            ranks_here(model, how, options, Path(folder)) as engine,
        ):
            yield engine


def passes(engine: TextEngine, rounds: int) -> dict[str, float]:
    """Milliseconds of a token without an adapter, with one, and after a change."""
    tokens = np.random.default_rng(0).integers(0, engine.model.n_vocab, PROMPT, np.int32)
    engine.decode(tokens, 0, adapters=())

    def pass_ms(scales: Scales) -> float:
        began = time.perf_counter()
        engine.decode(tokens[:1], PROMPT, top=1, adapters=scales)
        took_s = time.perf_counter() - began
        engine.kv_remove(0, PROMPT)
        return 1e3 * took_s

    took_ms: dict[tuple[Scales, bool], list[float]] = {}
    for turn in range(rounds + 1):
        for scales in SETS:
            for is_change in (True, False):
                ms = pass_ms(scales)
                if turn:  # in the first round kinds of graphs come for the first time
                    took_ms.setdefault((scales, is_change), []).append(ms)
    best = {kind: min(times) for kind, times in took_ms.items()}
    swap_ms = median(best[scales, True] - best[scales, False] for scales in SETS)
    return {
        "none_ms": best[SETS[0], False],
        "adapter_ms": median(best[scales, False] for scales in SETS[1:]),
        "changed_ms": median(best[scales, True] for scales in SETS[1:]),
        "swap_ms": swap_ms,
        "swap_of_token": swap_ms / best[SETS[0], False],
    }


def text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    header = ("side", "a token, ms", "with an adapter, ms", "after a change, ms", "swap, ms", "of a token")
    figures = ("none_ms", "adapter_ms", "changed_ms", "swap_ms")
    lines = [
        [row["side"], *(f"{row[name]:.2f}" for name in figures), f"{100 * row['swap_of_token']:.1f} %"]
        for row in r["rows"]
    ]
    return f"Adapters of rank {r['rank']}, {r['adapter_bytes'] / 1e6:.1f} MB each.\n\n{table(header, lines)}"


if __name__ == "__main__":
    main()
