"""The quantizer: what types cost in quality, sizes between them, memory, and whether kernels foretell a model's speed.

    python benchmarks/bench_quantize.py [--only SECTION] [--model FILE] [--work DIR] [--json [FILE]]

| section | question                                                                                            |
| types   | what does each type cost the bundled model in quality, with and without an importance matrix?        |
| fit     | is a file that is fitted to a size better than the best uniform type of no greater size?             |
| trained | the same of a model with trained weights, as it is and off every grid, on prose nothing was chosen with |
| memory  | how much memory does a 7B shape take to quantize, a 1.1B folder to convert, and how long beside the  |
|         | disk and beside llama.cpp's quantizer called directly?                                               |
| kernels | is a type's decode speed in a model what its kernel's speed says?                                    |

Quality is measured on text that nothing was chosen with: sentences of the bundled model's grammar, of another seed than
those of the importance matrix and of the fit. `types` and `fit` compute with one thread, so that other work on the
machine does not matter. A side of `memory` is a process of its own in a memory group of its own (Linux and root). Model
files of the last two sections have random weights; they are written to DIR and used again where they are there: 14 GB
for `memory`, and 7 GB more while it runs; 8 GB for `kernels`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import quantize_runs
import quantize_tables
import quantize_trained
from report import environment, run_section, write_json

from devices.probe import default_threads
from edge.errors import EngineError
from edge.llm.options import EngineOptions
from edge.quantization import imatrix as calibrate
from edge.quantization.evaluate import Quality, evaluate
from edge.quantization.fit import FitOptions, fit_file
from edge.quantization.gguf import quantize
from quant.gguf.file import GgufFile
from quant.mixes import MIXES
from quant.types import TYPES
from tools.demo_model.grammar import statements

SECTIONS = ("types", "fit", "trained", "memory", "kernels")
MODEL = Path(__file__).parent.parent / "tests" / "data" / "edge-demo-f16.gguf"
CALIBRATION_SEED, HELD_OUT_SEED = 1, 2
SENTENCES = 3000
CALIBRATION_CHUNKS = 32  # of the importance matrix, as `edge quantize` takes them
CHUNKS = 24  # of the text that quality is measured on
OPTIONS = EngineOptions(threads=1)

COMMON = ("q8_0", "q6_k", "q5_k_m", "q5_0", "q4_k_m", "q4_0", "iq4_xs", "q3_k_m", "q2_k")
# Budgets lie between these, and a fitted file is compared with every mix of UNIFORM that is no larger.
NEIGHBOURS = ("iq2_xs", "q2_k", "q3_k_s", "q3_k_m", "iq4_xs", "q4_k_m", "q5_k_m", "q6_k", "q8_0")
UNIFORM = (
    "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "q2_k_s", "q2_k", "iq3_xxs", "iq3_xs", "iq3_s", "q3_k_s", "iq3_m", "q3_k_m",
    "q3_k_l", "iq4_xs", "iq4_nl", "q4_0", "q4_k_s", "q4_k_m", "q4_1", "q5_0", "q5_k_s", "q5_k_m", "q5_1", "q6_k",
    "q8_0",
)  # fmt: skip


def main() -> None:
    args = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what was started, as Ctrl-C does
    result: dict[str, Any] = {
        **environment(),
        "command": " ".join(["python", "benchmarks/bench_quantize.py", *sys.argv[1:]]),
    }
    if args.json != "-":
        print(quantize_tables.head(result), flush=True)
    with tempfile.TemporaryDirectory(dir=args.work) as name:
        folder = Path(name)
        args.work = args.work or folder
        os.environ.update({f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CONFIG", "CACHE", "STATE")})
        args.trained = args.model
        args.model = quantize_runs.tiny_model(folder) if args.tiny else MODEL
        for section in [args.only] if args.only else SECTIONS:
            run = partial(RUNS[section], folder, args)
            result[section] = run_section(section, run, getattr(quantize_tables, section), args.json)
    if args.png and "fit" in result:
        quantize_tables.draw_fit(result["fit"], args.png)
    write_json(result, args.json)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--work", type=Path, metavar="DIR", help="for model files (default: a folder that is deleted)")
    parser.add_argument("--model", type=Path, metavar="FILE", help="of `trained` (default: the bundled one)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each fit (default: 10)")
    parser.add_argument("--rounds", type=int, default=3, help="of `kernels` (default: 3)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw what `fit` found")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write all figures")
    parser.add_argument("--tiny", action="store_true", help="see that it works; the figures mean nothing")
    args = parser.parse_args()
    if args.work:
        args.work.mkdir(parents=True, exist_ok=True)
    return args


def text(seed: int) -> str:
    """Sentences that the bundled model was made for."""
    return " ".join(islice(statements(random.Random(seed)), SENTENCES))


def figures(name: str, quality: Quality) -> dict[str, Any]:
    """A file and how it did."""
    s = quality.summary
    return {
        "name": name,
        "size_bytes": quality.size_bytes,
        "perplexity": s.perplexity,
        "mean_divergence": s.mean_divergence,
        "divergence_99": s.divergence_99,
        "top_1_agreement": s.top_1_agreement,
    }


def importance(folder: Path, args: argparse.Namespace) -> Path:
    """The file of an importance matrix of the calibration text."""
    path = folder / "imatrix.gguf"
    most = 1 if args.tiny else CALIBRATION_CHUNKS
    calibrate.collect(args.model, text(CALIBRATION_SEED), OPTIONS, most=most).write(path)
    return path


def uniform(folder: Path, model: Path, names: Iterable[str], imatrix: Path | None) -> dict[str, Path]:
    """The model in these mixes, by name; those that need an importance matrix are left out without one."""
    made = {}
    for name in names:
        path = folder / f"{name}-{'with' if imatrix else 'without'}.gguf"
        try:
            quantize(GgufFile.open(model), path, MIXES[name], imatrix=imatrix, threads=1)
        except EngineError:
            if imatrix is not None:
                raise
        else:
            made[name] = path
    return made


def judged(files: Sequence[Path], args: argparse.Namespace) -> tuple[Quality, list[Quality]]:
    """How the model as it was trained and these files predict the text that was held out."""
    first, *others = evaluate(args.model, files, text(HELD_OUT_SEED), OPTIONS, most=1 if args.tiny else CHUNKS)
    return first, others


# --- types ---


def types(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Uniform types, as llama.cpp mixes them."""
    names = ("q8_0", "q2_k") if args.tiny else COMMON
    matrix = importance(folder, args)
    sides = {kind: uniform(folder, args.model, names, one) for kind, one in (("without", None), ("with", matrix))}
    reference, qualities = judged([path for side in sides.values() for path in side.values()], args)
    found = iter(qualities)
    return {
        "tokens": reference.summary.tokens,
        "reference": figures("f16", reference),
        **{kind: [figures(name, next(found)) for name in side] for kind, side in sides.items()},
    }


# --- fit ---


def fit(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Files fitted to sizes between uniform types, beside the best uniform type of no greater size."""
    tiny = args.tiny
    matrix = importance(folder, args)
    names = ("q2_k", "q4_k_m", "q8_0") if tiny else UNIFORM
    sides = {kind: uniform(folder, args.model, names, one) for kind, one in (("with", matrix), ("without", None))}
    sizes = sorted(sides["with"][name].stat().st_size for name in (names if tiny else NEIGHBOURS))
    budgets = [(a + b) // 2 for a, b in pairwise(sizes)][: 1 if tiny else None]
    kinds = tuple(TYPES[name] for name in ("q2_k", "q4_k", "q8_0")) if tiny else ()
    options = FitOptions(matrix, kinds, within_s=0.5 if tiny else 60 * args.minutes, threads=1)
    choices = {"default": options} if tiny else {"default": options, "fast": replace(options, fast=True)}
    sentences = text(CALIBRATION_SEED)
    rows, paths = [], []
    for choice, chosen in choices.items():
        for budget in budgets:
            out = folder / f"fitted-{choice}-{budget}.gguf"
            began = time.monotonic()
            fitted = fit_file(GgufFile.open(args.model), out, budget, sentences, chosen)
            rows.append(
                {
                    "choice": choice,
                    "budget_bytes": budget,
                    "took_s": time.monotonic() - began,
                    "expected": fitted.expected_divergence,
                    "measured": fitted.measured_divergence,
                    "gap": fitted.gap,
                    "slow": dict(fitted.slow),
                }
            )
            paths.append(out)
    _, qualities = judged([*paths, *(path for side in sides.values() for path in side.values())], args)
    found = iter(qualities)
    for row in rows:
        row.update(figures(row["choice"], next(found)))
    beside = {kind: [figures(name, next(found)) for name in side] for kind, side in sides.items()}
    for row in rows:
        row["of_budget"] = row["size_bytes"] / row["budget_bytes"]
        for kind, many in beside.items():
            no_larger = [one for one in many if one["size_bytes"] <= row["size_bytes"]]
            if no_larger:
                best = row[kind] = min(no_larger, key=lambda one: float(one["mean_divergence"]))
                row[f"of_{kind}"] = row["mean_divergence"] / best["mean_divergence"]
    return {"tokens": qualities[0].summary.tokens, "rows": rows, "uniform": beside}


# --- trained ---


def trained(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Fitted files of a model with trained weights beside types of their size."""
    model = args.trained or MODEL
    how = {"minutes": 0.01 if args.tiny else args.minutes, "chunks": 1 if args.tiny else CHUNKS}
    return quantize_trained.trained(model, folder, **how, threads=default_threads(), tiny=args.tiny)


# --- what depends on the machine ---


def memory(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Memory and time of quantizing a large model, and of converting one."""
    return quantize_runs.memory(args.work, folder, args.tiny)


def kernels(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The speed of models beside that of kernels."""
    return quantize_runs.kernels(args.work, 1 if args.tiny else args.rounds, args.tiny)


RUNS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "types": types,
    "fit": fit,
    "trained": trained,
    "memory": memory,
    "kernels": kernels,
}

if __name__ == "__main__":
    main()
