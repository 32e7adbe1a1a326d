"""`edge bench`: how fast a model runs here, in the manner of llama-bench."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from apps import bench_onnx, distributed, step_table
from apps.memory_use import memory_json, paging_rows
from apps.options import UsageError, add_engine_arguments, engine_options, model_path, positive_int

if TYPE_CHECKING:
    from edge.bench import BenchResult
    from edge.step_times import Summary
    from edge.text_engine import TextEngine

HELP = "Measure prefill and decode of a model, beside what this machine's memory allows."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="GGUF or ONNX file, or REPO:FILE (default: the bundled model)"
    )
    parser.add_argument("--prompt-tokens", type=positive_int, default=512, metavar="N", help="default: 512")
    parser.add_argument("--gen-tokens", type=positive_int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--repeats", type=positive_int, default=5, metavar="N", help="after one warm-up (default: 5)")
    parser.add_argument(
        "--requests", type=positive_int, default=1, metavar="N", help="measure also with N in flight (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_arguments(parser)
    distributed.add_arguments(parser)
    bench_onnx.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if bench_onnx.is_onnx(args.model):
        return bench_onnx.run(args)
    bench_onnx.check_unused(args)
    from edge.engine import Engine

    args.context = args.context or args.requests * (args.prompt_tokens + args.gen_tokens)
    devices = distributed.prepare(args)
    path = model_path(args.model)
    if devices is None:
        with Engine(path, engine_options(args, args.requests)) as engine:
            _measure(args, engine, None)
    else:
        with distributed.deployed(args, devices, path, args.requests) as deployed:
            _measure(args, deployed.engine, deployed)
    return 0


def _measure(args: argparse.Namespace, engine: TextEngine, deployed: distributed.Deployed | None) -> None:
    """Measure and print. deployed: where the engine runs on several devices."""
    from apps.progress import progress
    from edge.bench import measure
    from edge.interrupt import interrupt_stops

    times: list[dict[str, Summary]] = []
    with interrupt_stops(engine), progress("Measuring", unit="runs") as bar:

        def on_step(done: int, total: int) -> None:
            nonlocal times
            if deployed and done in (1, args.repeats + 1):  # neither the warm-up is in, nor requests that share steps
                times = deployed.times(clear=True)
            if done == 1 and engine.paging is not None:
                engine.paging.clear_stats()  # of the warm-up
            bar.update(done, total)

        try:
            result = measure(
                engine,
                prompt_tokens=args.prompt_tokens,
                gen_tokens=args.gen_tokens,
                repeats=args.repeats,
                requests=args.requests,
                alone=deployed is None,
                on_step=on_step,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
    if args.json:
        values = _as_json(args, engine, result) | (deployed.to_json(times) if deployed else {})
        print(json.dumps(values | memory_json(engine)))
        return
    _print_speeds(args, engine, result)
    if deployed:
        _print_ranks(result, deployed, times)
    else:
        _print_bandwidth(result)
    for name, figures in paging_rows(engine):
        print(f"{name}: {figures}")


def _as_json(args: argparse.Namespace, engine: TextEngine, r: BenchResult) -> dict[str, Any]:
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
        "requests": args.requests,
        "throughput_tokens_per_s": r.throughput.mean if r.throughput else None,
        "throughput_tokens_per_s_deviation": r.throughput.deviation if r.throughput else None,
        "decode_bytes": r.decode_bytes,
        "bandwidth_gbps": r.bandwidth_gbps,
        "memory_bandwidth_gbps": r.memory_bandwidth_gbps,
        "peak_rss_bytes": r.peak_rss_bytes,
    }


def _print_speeds(args: argparse.Namespace, engine: TextEngine, r: BenchResult) -> None:
    """A Markdown table, so that it can be pasted into an issue."""
    from apps.format import bytes_text

    print("| model | size | threads | test | tokens/s |")
    print("| --- | ---: | ---: | --- | ---: |")
    row = f"| {engine.path.name} | {bytes_text(engine.shape.weight_bytes)} | {r.threads} |"
    print(f"{row} prefill {r.prompt_tokens} | {r.prefill.mean:.2f} ± {r.prefill.deviation:.2f} |")
    print(f"{row} decode {r.gen_tokens} | {r.decode.mean:.2f} ± {r.decode.deviation:.2f} |")
    if r.throughput:
        print(f"{row} {args.requests} requests | {r.throughput.mean:.2f} ± {r.throughput.deviation:.2f} |")
    print()


def _print_bandwidth(r: BenchResult) -> None:
    """What decoding got out of this machine's memory."""
    from apps.format import bytes_text

    print(
        f"decode: {r.decode_ms_median:.2f} ms a token (median), {r.bandwidth_gbps:.1f} GB/s of the"
        f" {r.memory_bandwidth_gbps:.1f} GB/s this machine's memory gives {r.threads} threads;"
        f" peak memory {bytes_text(r.peak_rss_bytes)}"
    )


def _print_ranks(r: BenchResult, deployed: distributed.Deployed, times: Sequence[Mapping[str, Summary]]) -> None:
    """What the steps took on every rank, and which of them the others wait for."""
    from apps.format import bytes_text
    from apps.table import printable

    names = deployed.names
    print(f"| {' | '.join(step_table.NAMES)} |")
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in step_table.rows(names, times):
        print(printable(f"| {' | '.join(row)} |"))
    print()
    print(step_table.NOTE)
    print(printable(f"plan: {deployed.line()}"))
    parts = [f"decode: {r.decode_ms_median:.2f} ms a token (median)"]
    slow = step_table.slowest(times)
    if slow is not None:
        of = times[slow]["decode"]
        parts.append(
            f"rank {slow} ({names[slow]}) computes the longest, {of.compute_ms.median:.2f} ms, and communicates for"
            f" {of.communication_ms.median:.2f} ms"
        )
    print(printable("; ".join((*parts, f"peak memory of this device {bytes_text(r.peak_rss_bytes)}"))))
