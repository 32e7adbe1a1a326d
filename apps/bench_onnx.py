"""`edge bench MODEL.onnx`: measures an ONNX model cut into two stages, at each cut, on one device or on two."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from apps.distributed import LOCAL
from apps.engine_options import ENGINE_OPTIONS
from apps.errors import UsageError
from apps.options import AUTO, add, check_dimensions, check_onnx, option, refuse
from apps.show.table import print_columns, print_json, print_note, print_table
from quant.text import bytes_text, number_text, seconds_text

if TYPE_CHECKING:
    from edge.onnx.bench import FlowSpeed
    from edge.onnx.model import OnnxSource
    from edge.planning.onnx_sweep import CutSpeed

OWN = ("cuts", "dim", "input", "in_flight", "no_local")
_OF_TEXT = (
    *(name for name in ENGINE_OPTIONS if name != "threads"), "prompt_tokens", "gen_tokens", "requests", "affinity",
    "parallel", "shares", "plan", "save_plan", "allreduce", "draft", "draft_worker", "survey_seconds",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = "Measure each cut into two stages on this device, on this device and one worker, or on two workers."
    group = parser.add_argument_group("ONNX models", words)
    words = "cuts to measure: all, distinct, blocks, or labels A,B (default: blocks if the model has any)"
    option(group, "--cuts WHICH", words)
    add(group, "--dim", "--input")
    option(group, "--no-local", "run no stage on this device; --workers must name two workers")
    add(group, "--in-flight")


def run(args: argparse.Namespace) -> int:
    _check(args)
    check_onnx()
    from apps.show.progress import progress
    from edge.onnx.bench import speed_json
    from edge.onnx.model import load_source
    from edge.planning.onnx_sweep import sweep_devices, sweep_here
    from partition.errors import PlanError
    from partition.plan.onnx_cuts import choose

    model = load_source(Path(args.model), dict(args.dim or ()), args.input or ())
    model.check_places(2)
    cuts = choose(model.graph, args.cuts or "auto")
    if not cuts:
        raise PlanError(f"{model.name} has no cuts of the kind {args.cuts!r}; --cuts all measures every cut")
    wire, results = args.wire or "f32", list["CutSpeed"]()
    with progress(f"Measuring cuts of {model.name}", len(cuts), "cuts") as show:
        if args.workers is None:
            devices: tuple[str, ...] = (LOCAL,)
            whole, measured = sweep_here(model, cuts, args.repeats, args.threads)
        else:
            devices = _devices(args)
            how = {"transport": args.transport or "auto", "threads": args.threads, "insecure": args.insecure}
            how |= {"repeats": args.repeats, "window": args.in_flight, "wire": wire}
            whole, measured = sweep_devices(devices, model, cuts, **how)
        for timed in measured:
            results.append(timed)
            show(len(results), len(cuts), timed.cut.label)
    replicas = None if args.workers is None else _replicas(args, devices, model)
    if args.json:
        graph = {
            "model": args.model,
            "nodes": len(model.graph.nodes),
            "flops": model.graph.flops,
            "weight_bytes": model.graph.stage_weight_bytes(0, len(model.graph.nodes)),
        }
        settings = {"repeats": args.repeats, "devices": list(devices), "wire": wire}
        speeds = {"whole": speed_json(whole), "replicas": speed_json(replicas)}
        return print_json({**graph, **settings, **speeds, "cuts": [timed.to_json() for timed in results]})
    _show(model, whole, devices, results, replicas)
    return 0


def _replicas(args: argparse.Namespace, devices: Sequence[str], model: OnnxSource) -> FlowSpeed:
    """Measure a whole copy on each device."""
    from edge.cluster.llm_ranks import Exchange
    from edge.deployment.network_replicas import NetworkReplicas
    from edge.onnx.bench import measure

    exchange = Exchange(args.transport or "auto")
    with NetworkReplicas(model, devices, exchange, threads=args.threads, insecure=args.insecure) as replicas:
        return measure(replicas.pipeline.map, model.sample, args.repeats, args.in_flight)


def _check(args: argparse.Namespace) -> None:
    for name in _OF_TEXT:
        if getattr(args, name, None) != args.parser.get_default(name):
            raise UsageError(f"--{name.replace('_', '-')} is for language models; {args.model} is an ONNX model")
    if args.workers is None:
        several = ("wire", "transport", "in_flight", "insecure", "no_local")
        refuse(args, several, "is for several devices: name a worker with --workers HOST:PORT")
    elif (n := len(_devices(args))) != 2:
        raise UsageError(f"a cut needs 2 devices, got {n}: name one worker, or two workers with --no-local")
    elif args.no_local and args.threads is not None:
        raise UsageError("--threads is for a stage on this device, but --no-local runs none here: leave one out")
    check_dimensions(args.dim or ())


def _devices(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the two devices on either side of a cut."""
    workers: tuple[str, ...] = args.workers
    if workers == AUTO:
        raise UsageError("--workers auto is for language models; name the devices of the stages with --workers A,B")
    return workers if args.no_local else (LOCAL, *workers)


def _show(
    model: OnnxSource,
    whole: FlowSpeed,
    devices: Sequence[str],
    results: Sequence[CutSpeed],
    replicas: FlowSpeed | None,
) -> None:
    graph = f"{len(model.graph.nodes)} nodes, {number_text(model.graph.flops / 1e9)} GFLOP"
    speed = f"{number_text(whole.latency_ms_median)} ms, {number_text(whole.throughput_per_s)}/s on {devices[-1]}"
    rows_of_whole = [("graph", graph), ("whole", speed)]
    if replicas is not None:
        text = f"{number_text(replicas.throughput_per_s)}/s, {number_text(replicas.latency_ms_median)} ms"
        rows_of_whole.append(("replicas", f"{text}, {replicas.window} in flight: a whole copy on each device"))
    print_table(model.name, rows_of_whole)
    names = ["cut after", "payload", "stage 0", "stage 1", "links", "expected"]
    pipelined = len(devices) > 1
    names += ["measured", "latency", "in flight"] if pipelined else []
    rows = []
    for result in results:
        row = [result.cut.label, bytes_text(result.cut.payload_bytes), *map(seconds_text, result.stage_s)]
        row.append(seconds_text(max(result.transfer_s, default=0.0)) if pipelined else "-")
        row.append(f"{number_text(result.expected_throughput_per_s)}/s")
        if result.speed:
            latency = f"{number_text(result.speed.latency_ms_median)} ms"
            row += [f"{number_text(result.speed.throughput_per_s)}/s", latency, str(result.speed.window)]
        rows.append(row)
    print_columns(names, rows, whole=("cut after",))
    best = max(
        results, key=lambda result: result.speed.throughput_per_s if result.speed else result.expected_throughput_per_s
    )
    if replicas is not None and best.speed is not None and replicas.throughput_per_s > best.speed.throughput_per_s:
        print_note(f"Best for throughput: --parallel replicas. The best cut is after {best.cut.label}.")
    elif pipelined:
        print_note(f"Best for throughput: after {best.cut.label}. Expected: limited by the slowest stage or link.")
    else:
        print_note(f"Best for two such devices: after {best.cut.label}, if the link is never the slowest part.")
