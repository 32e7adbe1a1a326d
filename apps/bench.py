"""`edge bench`: how fast a model runs here, in the manner of llama-bench."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from apps.options import UsageError, add_engine_arguments, engine_options, model_path, positive_int

if TYPE_CHECKING:
    from edge.bench import BenchResult
    from edge.engine import Engine

HELP = "Measure prefill and decode of a model, beside what this machine's memory allows."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="GGUF file or REPO:FILE (default: the bundled model)")
    parser.add_argument("--prompt-tokens", type=positive_int, default=512, metavar="N", help="default: 512")
    parser.add_argument("--gen-tokens", type=positive_int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--repeats", type=positive_int, default=5, metavar="N", help="after one warm-up (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from apps.progress import progress
    from edge.bench import measure
    from edge.engine import Engine
    from edge.interrupt import interrupt_stops

    args.context = args.context or args.prompt_tokens + args.gen_tokens
    with Engine(model_path(args.model), engine_options(args)) as engine:
        with interrupt_stops(engine), progress("Measuring", unit="runs") as bar:
            try:
                result = measure(
                    engine,
                    prompt_tokens=args.prompt_tokens,
                    gen_tokens=args.gen_tokens,
                    repeats=args.repeats,
                    on_step=bar.update,
                )
            except ValueError as error:
                raise UsageError(str(error)) from error
        if args.json:
            print(json.dumps(_as_json(engine, result)))
        else:
            _print_table(engine, result)
    return 0


def _as_json(engine: Engine, r: BenchResult) -> dict[str, Any]:
    return {
        "model": str(engine.path),
        "architecture": engine.shape.architecture,
        "weight_bytes": engine.shape.weight_bytes,
        "threads": r.threads,
        "prompt_tokens": r.prompt_tokens,
        "gen_tokens": r.gen_tokens,
        "repeats": r.repeats,
        "prefill_tokens_per_s": r.prefill.mean,
        "prefill_tokens_per_s_deviation": r.prefill.deviation,
        "decode_tokens_per_s": r.decode.mean,
        "decode_tokens_per_s_deviation": r.decode.deviation,
        "decode_ms_median": r.decode_ms_median,
        "decode_bytes": r.decode_bytes,
        "bandwidth_gbps": r.bandwidth_gbps,
        "memory_bandwidth_gbps": r.memory_bandwidth_gbps,
        "peak_rss_bytes": r.peak_rss_bytes,
    }


def _print_table(engine: Engine, r: BenchResult) -> None:
    """A Markdown table, so that it can be pasted into an issue."""
    from apps.format import bytes_text

    print("| model | size | threads | test | tokens/s |")
    print("| --- | ---: | ---: | --- | ---: |")
    row = f"| {engine.path.name} | {bytes_text(engine.shape.weight_bytes)} | {r.threads} |"
    print(f"{row} prefill {r.prompt_tokens} | {r.prefill.mean:.2f} ± {r.prefill.deviation:.2f} |")
    print(f"{row} decode {r.gen_tokens} | {r.decode.mean:.2f} ± {r.decode.deviation:.2f} |")
    print()
    print(
        f"decode: {r.decode_ms_median:.2f} ms a token (median), {r.bandwidth_gbps:.1f} GB/s of the"
        f" {r.memory_bandwidth_gbps:.1f} GB/s this machine's memory gives {r.threads} threads;"
        f" peak memory {bytes_text(r.peak_rss_bytes)}"
    )
