"""`edge bench MODEL.onnx`: what each stage and each cut of a model gives, on this device or on two."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.commands.distributed import first_given
from apps.errors import UsageError
from apps.options import check_dimensions, check_onnx, dimension, in_flight, quiet_grpc
from apps.show.format import ms_text
from apps.show.table import print_columns, print_note, print_table

if TYPE_CHECKING:
    from edge.onnx.bench import Speed
    from edge.onnx.model import OnnxSource
    from edge.planning.onnx_sweep import CutSpeed
    from partition.plan.onnx_cuts import Cut

_LOCAL = "local"
_OWN = ("cuts", "dim", "in_flight", "no_local")
_OF_TEXT = {"prompt_tokens": 512, "gen_tokens": 128, "requests": 1, "kv_type": "f16", "flash_attention": "auto"}
_OF_TEXT |= dict.fromkeys(("context", "batch", "affinity", "gpu_layers", "repack", "memory", "window", "io_threads"))
_OF_TEXT |= dict.fromkeys(("io_chunk", "parallel", "shares", "plan", "save_plan", "allreduce")) | {"verify": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is for ONNX models alone."""
    group = parser.add_argument_group("ONNX models", "on this device, or on this one and a worker, or on two workers")
    group.add_argument(
        "--cuts", metavar="WHICH", help="all, distinct, blocks, or labels: A,B (default: blocks, where there are any)"
    )
    group.add_argument(
        "--dim", action="append", type=dimension, metavar="NAME=N", help="value of an open dimension (default: 1)"
    )
    group.add_argument("--no-local", action="store_true", help="no stage on this device: --workers names two")
    group.add_argument(
        "--in-flight", type=in_flight, metavar="N", help="inputs in flight for throughput (default: what fills it)"
    )


def is_onnx(model: str | None) -> bool:
    """Whether this names an ONNX file."""
    return model is not None and model.endswith(".onnx")


def check_unused(args: argparse.Namespace) -> None:
    """UsageError for options of ONNX models, where the model is none."""
    if given := first_given(args, _OWN):
        raise UsageError(f"{given} is for ONNX models")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    _check(args)
    check_onnx()
    from apps.show.progress import progress
    from partition.errors import PlanError
    from partition.plan.onnx_cuts import choose

    model = _model(args)
    cuts = choose(model.graph, args.cuts or "auto")
    if not cuts:
        raise PlanError(f"{model.name} has no cuts of that kind; --cuts all shows every one")
    results: list[CutSpeed] = []
    with progress(f"Measuring cuts of {model.name}", len(cuts), "cuts") as bar:
        whole, devices, found = _here(args, model, cuts) if args.workers is None else _there(args, model, cuts)
        for one in found:
            results.append(one)
            bar.update(len(results), len(cuts), one.cut.label)
    if args.json:
        print(json.dumps(_as_json(args, model, whole, devices, results)))
    else:
        _show(model, whole, devices, results)
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, default in _OF_TEXT.items():
        if getattr(args, name, default) != default:
            raise UsageError(f"--{name.replace('_', '-')} is for language models; this one is in ONNX")
    if args.workers is None:
        if given := first_given(args, ("wire", "transport", "in_flight", "insecure", "no_local")):
            raise UsageError(f"{given} is for several devices: name one with --workers HOST:PORT")
    elif (n := len(_devices(args))) != 2:
        raise UsageError(f"a cut is between two devices, not {n}: this one and one worker, or two with --no-local")
    elif args.no_local and args.threads is not None:
        raise UsageError("--threads is for a stage on this device, and there is none: leave --no-local out")
    check_dimensions(args.dim or ())


def _devices(args: argparse.Namespace) -> tuple[str, ...]:
    """Those that a cut is between."""
    workers: tuple[str, ...] = args.workers
    return workers if args.no_local else (_LOCAL, *workers)


def _model(args: argparse.Namespace) -> OnnxSource:
    """The model, with 1 for open dimensions that have no value."""
    from edge.onnx.file import load
    from edge.onnx.model import OnnxSource, declared_inputs, dims_of, with_dims
    from edge.onnx.samples import made_up

    file = load(Path(args.model))
    declared = declared_inputs(file)
    fixed = with_dims(declared, dict(args.dim or ()))
    return OnnxSource.of(file, dims_of(declared, next(made_up(fixed, 1))))


Measured = tuple["Speed", tuple[str, ...], "Iterator[CutSpeed]"]  # the whole model, the devices, and the cuts to come


def _here(args: argparse.Namespace, model: OnnxSource, cuts: Sequence[Cut]) -> Measured:
    """The whole model and every stage on this device alone."""
    from edge.onnx.bench import in_turn, measure
    from edge.onnx.engine import OnnxEngine
    from edge.planning.onnx_sweep import stages_here

    with OnnxEngine(model.file.path, args.threads) as engine:
        whole = measure(in_turn(engine.run), model.noise(), args.repeats, 1)
    return whole, (_LOCAL,), stages_here(model, cuts, args.repeats, args.threads)


def _there(args: argparse.Namespace, model: OnnxSource, cuts: Sequence[Cut]) -> Measured:
    """The whole model on the last device, and every cut as a pipeline."""
    quiet_grpc()
    from edge.cluster.fleet import Fleet
    from edge.cluster.onnx_deployment import OnnxDeployment
    from edge.onnx.bench import measure
    from edge.planning.onnx_sweep import sweep

    devices = _devices(args)
    transport, wire = args.transport or "auto", args.wire or "f32"
    feeds = model.noise()

    def cut_by_cut() -> Iterator[CutSpeed]:
        with (
            Fleet(args.workers, insecure=args.insecure) as fleet,
            OnnxDeployment(
                fleet, model, model.plan(devices, cuts[:1]), transport=transport, threads=args.threads
            ) as deployment,
        ):
            yield from sweep(deployment, model, cuts, feeds, repeats=args.repeats, window=args.in_flight, wire=wire)

    with (
        Fleet(args.workers[-1:], insecure=args.insecure) as fleet,
        OnnxDeployment(fleet, model, model.plan(args.workers[-1:], []), transport=transport) as deployment,
    ):
        whole = measure(deployment.start().map, feeds, args.repeats, args.in_flight)
    return whole, devices, cut_by_cut()


def _as_json(
    args: argparse.Namespace, model: OnnxSource, whole: Speed, devices: Sequence[str], results: Sequence[CutSpeed]
) -> dict[str, Any]:
    return {
        "model": args.model,
        "nodes": len(model.graph.nodes),
        "flops": model.graph.flops,
        "weight_bytes": model.graph.stage_weight_bytes(0, len(model.graph.nodes)),
        "repeats": args.repeats,
        "devices": list(devices),
        "wire": args.wire or "f32",
        "whole": _speed_json(whole),
        "cuts": [
            {
                "label": one.cut.label,
                "position": one.cut.position,
                "tensors": [value.name for value in one.cut.tensors],
                "payload_bytes": one.cut.payload_bytes,
                "weight_bytes": list(one.cut.weight_bytes),
                "flops": list(one.cut.flops),
                "stage_ms": [1e3 * seconds for seconds in one.stage_s],
                "transfer_ms": [1e3 * seconds for seconds in one.transfer_s],
                "expected_latency_ms": 1e3 * one.expected_latency_s,
                "expected_throughput_per_s": one.expected_throughput_per_s,
                **_speed_json(one.speed),
            }
            for one in results
        ],
    }


def _speed_json(speed: Speed | None) -> dict[str, Any]:
    return {
        "latency_ms_median": speed.latency_ms_median if speed else None,
        "throughput_per_s": speed.throughput_per_s if speed else None,
        "in_flight": speed.window if speed else None,
    }


def _show(model: OnnxSource, whole: Speed, devices: Sequence[str], results: Sequence[CutSpeed]) -> None:
    from apps.show.format import bytes_text

    print_table(
        model.name,
        [
            ("graph", f"{len(model.graph.nodes)} nodes, {model.graph.flops / 1e9:.3g} GFLOP"),
            ("whole", f"{whole.latency_ms_median:.4g} ms, {whole.throughput_per_s:.4g}/s on {devices[-1]}"),
        ],
    )
    names = ["cut after", "payload", "stage 0", "stage 1", "links", "expected"]
    pipelined = len(devices) > 1
    names += ["measured", "latency", "in flight"] if pipelined else []
    rows = []
    for one in results:
        row = [one.cut.label, bytes_text(one.cut.payload_bytes), *(f"{1e3 * s:.4g} ms" for s in one.stage_s)]
        row.append(f"{ms_text(1e3 * max(one.transfer_s, default=0.0))} ms" if pipelined else "-")
        row.append(f"{one.expected_throughput_per_s:.4g}/s")
        if one.speed:
            speed = one.speed
            row += [f"{speed.throughput_per_s:.4g}/s", f"{speed.latency_ms_median:.4g} ms", str(speed.window)]
        rows.append(row)
    print_columns(names, rows, whole=("cut after",))
    best = max(results, key=lambda one: one.speed.throughput_per_s if one.speed else one.expected_throughput_per_s)
    if pipelined:
        print_note(f"Best for throughput: after {best.cut.label}. Expected: one over the slowest of stages and links.")
    else:
        print_note(f"Best for two such devices: after {best.cut.label}, with a link that is never the slowest.")
