"""`edge evaluate`: what smaller models cost in quality, and whether they are faster, as a table, JSON and a picture."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.errors import UsageError
from apps.options import add_engine_arguments, engine_options, keep_to_cores, model_path, positive_int
from apps.show.format import bytes_text
from apps.show.progress import progress
from apps.show.table import print_columns, print_note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge.quantization.compare_speed import Speed
    from edge.quantization.evaluate import Quality

HELP = "Compare models with one they were made from: perplexity, divergence, size and speed."

COLUMNS = (
    "model", "size", "bits/weight", "perplexity", "mean KL", "99 % KL", "top-1", "decode tok/s", "prefill tok/s",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The models, the text, and how much of it."""
    parser.add_argument("reference", metavar="REFERENCE", help="GGUF file or REPO:FILE the others are held against")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="GGUF file or REPO:FILE with the same vocabulary")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text to predict (default: a bundled one)")
    parser.add_argument("--tokens", type=positive_int, metavar="N", help="use the first N (default: the whole text)")
    parser.add_argument(
        "--chunk-tokens", type=positive_int, default=512, metavar="N", help="computed at a time (default: 512)"
    )
    parser.add_argument(
        "--speed", action=argparse.BooleanOptionalAction, default=True, help="measure decode and prefill (default: yes)"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw size against divergence")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and show; the exit code."""
    if args.context is not None:
        raise UsageError("every chunk has a context of its own; use --chunk-tokens in place of --context")
    if args.tokens is not None and args.tokens < args.chunk_tokens:
        raise UsageError(f"--tokens {args.tokens} is less than one chunk of {args.chunk_tokens}; see --chunk-tokens")
    if args.png:
        from apps.show.picture import check_picture

        check_picture(args.png)  # before anything is computed
        if not args.models:
            raise UsageError("a picture needs models to compare with the reference; give some, or leave --png out")
    keep_to_cores(args.affinity)
    from edge.quantization.compare_speed import measure_speeds, speed_notes
    from edge.quantization.evaluate import evaluate
    from edge.quantization.text_file import BUNDLED, read_text

    options = engine_options(args)
    source = args.text or BUNDLED
    text = read_text(source)
    paths = [model_path(spec) for spec in (args.reference, *args.models)]
    with progress("Evaluating", unit="chunks") as bar:
        results = evaluate(
            paths[0],
            paths[1:],
            text,
            options,
            chunk_tokens=args.chunk_tokens,
            most=args.tokens // args.chunk_tokens if args.tokens else None,
            progress=bar.update,
        )
    speeds: list[Speed] | None = None
    notes: list[str] = []
    names = labels(paths)
    if args.speed:
        with progress("Measuring", unit="runs") as bar:
            speeds = measure_speeds(paths, options, progress=bar.update)
        notes = speed_notes(names, [result.size_bytes for result in results], speeds)
    if args.png:
        _draw(args.png, names, results)
    if args.json:
        print(json.dumps(_as_json(args, source, results, speeds, notes)))
        return 0
    print_columns(COLUMNS, rows(names, results, speeds), whole=("model",))
    scored = results[0].summary.tokens
    where = args.text or "the bundled text"
    print_note(f"{scored} predictions on {where}; KL divergence in nats from {names[0]}")
    for note in notes:
        print_note(note)
    return 0


def labels(paths: Sequence[Path]) -> list[str]:
    """Names that tell files apart: without folders where these are not needed for that."""
    names = [path.name for path in paths]
    return [str(path) if names.count(path.name) > 1 else path.name for path in paths]


def rows(names: Sequence[str], results: Sequence[Quality], speeds: Sequence[Speed] | None) -> list[list[str]]:
    """What COLUMNS name, of each model."""
    table = []
    for i, (name, result) in enumerate(zip(names, results, strict=True)):
        s = result.summary
        table.append(
            [
                name,
                bytes_text(result.size_bytes),
                f"{result.bits_per_weight:.2f}",
                f"{s.perplexity:.3f} ± {s.perplexity_error:.3f}",
                f"{s.mean_divergence:.5f}",
                f"{s.divergence_99:.4f}",
                f"{100 * s.top_1_agreement:.2f} %",
                f"{speeds[i].decode:.1f}" if speeds else "-",
                f"{speeds[i].prefill:.1f}" if speeds else "-",
            ]
        )
    return table


def model_json(result: Quality, speed: Speed | None) -> dict[str, Any]:
    """One model's figures."""
    s = result.summary
    return {
        "model": str(result.path),
        "size_bytes": result.size_bytes,
        "bits_per_weight": result.bits_per_weight,
        "perplexity": _finite(s.perplexity),
        "perplexity_error": _finite(s.perplexity_error),
        "mean_divergence": _finite(s.mean_divergence),
        "median_divergence": _finite(s.median_divergence),
        "divergence_99": _finite(s.divergence_99),
        "max_divergence": _finite(s.max_divergence),
        "top_1_agreement": s.top_1_agreement,
        "decode_tokens_per_s": speed.decode if speed else None,
        "prefill_tokens_per_s": speed.prefill if speed else None,
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _as_json(
    args: argparse.Namespace, source: Path, results: Sequence[Quality], speeds: Sequence[Speed] | None, notes: list[str]
) -> dict[str, Any]:
    scored = results[0].summary.tokens
    return {
        "reference": str(results[0].path),
        "text": str(source),
        "chunk_tokens": args.chunk_tokens,
        "scored_tokens": scored,
        "models": [model_json(result, speeds[i] if speeds else None) for i, result in enumerate(results)],
        "notes": notes,
        "png": str(args.png) if args.png else None,
    }


def _draw(path: Path, names: Sequence[str], results: Sequence[Quality]) -> None:
    from apps.show.picture import Point, size_against_divergence

    names = [name.removesuffix(".gguf") for name in names]
    points = [
        Point(name, result.size_bytes, result.summary.mean_divergence)
        for name, result in zip(without_common_start(names)[1:], results[1:], strict=True)
    ]
    size_against_divergence(points, None, path, reference=names[0])


def without_common_start(names: Sequence[str]) -> list[str]:
    """Names without the words that all begin with: "q4_0" of "demo-q4_0", where another is "demo-f16"."""
    letters = enumerate(zip(*names, strict=False))
    differ = next((i for i, some in letters if len(set(some)) > 1), min(map(len, names)))
    end = 1 + max(names[0].rfind(mark, 0, differ) for mark in "-./")
    return [name[end:] or name for name in names]
