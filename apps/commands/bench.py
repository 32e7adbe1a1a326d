"""`edge bench`: measures how fast a model runs here, with tests like those of llama-bench."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from apps import bench_onnx, distributed
from apps.engine_options import add_engine_arguments
from apps.errors import UsageError
from apps.options import (
    ANY_MODEL,
    add,
    add_draft_arguments,
    check_draft_worker,
    is_onnx,
    model_path,
    option,
    refuse,
    set_common,
)
from apps.show import step_table
from apps.show.progress import ShownSteps
from apps.show.table import print_json
from edge.units import positive_int
from quant.text import bytes_text, printable

if TYPE_CHECKING:
    from edge.deployment.deployed import DeployedModel
    from edge.llm.bench import BenchResult
    from edge.llm.interface import TextEngine
    from edge.parallel.step_times import Summary

    Times: TypeAlias = Sequence[Mapping[str, Summary]]

HELP = "Measure prefill and decode speed of a model, compared with the limit that memory bandwidth sets."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common = "--prompt-tokens --gen-tokens --repeats --requests --json --context --threads --memory"
    common += " --workers --parallel"
    set_common(parser, common)
    add(parser, "model", help=ANY_MODEL)
    option(parser, "--prompt-tokens N", "tokens in the prompt (default: 512)", positive_int, default=512)
    option(parser, "--gen-tokens N", "tokens to generate (default: 128)", positive_int, default=128)
    option(parser, "--repeats N", "number of runs after one warm-up (default: 5)", positive_int, default=5)
    option(parser, "--requests N", "measure also with N concurrent requests (default: 1)", positive_int, default=1)
    add_draft_arguments(parser, "off")
    add(parser, "--lora")
    add(parser, "--json")
    add_engine_arguments(parser)
    distributed.add_arguments(parser)
    add(parser, "--survey-seconds")
    bench_onnx.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if is_onnx(args.model):
        return bench_onnx.run(args)
    refuse(args, bench_onnx.OWN, "is for ONNX models; leave it out for a language model")
    check_draft_worker(args)
    from edge.llm.bench import beside_memory
    from edge.llm.info import memory_json
    from edge.speculate.bench import SpeculationResult

    args.context = args.context or args.requests * (args.prompt_tokens + args.gen_tokens)
    devices = distributed.prepare(args)
    config = distributed.engine_config(args, model_path(args.model), devices, args.requests)
    with config.loaded(ShownSteps(), survey_seconds=args.survey_seconds) as (engine, deployed, draft):
        result, times = _measure(args, engine, deployed)
        memory = memory_json(engine)
        paging = engine.paging.figures(engine.memory) if engine.paging else []
        drafted = SpeculationResult.measure(engine, draft, args.prompt_tokens, args.gen_tokens, ShownSteps())
        if engine.gpu_layers:
            paging.append(("GPU", engine.gpu_layers.describe()))
        memory["speculation"] = drafted.to_json() if drafted else None
        paging += [("drafts", drafted.describe())] if drafted else []
        if deployed is not None:
            return _show(args, engine, result, memory, paging, deployed, times)
    return _show(args, engine, beside_memory(result, args.memory), memory, paging)


def _measure(args: argparse.Namespace, engine: TextEngine, deployed: DeployedModel | None) -> tuple[BenchResult, Times]:
    """Return the speeds and, if the engine runs on several devices, the step times of each rank."""
    from apps.show.progress import progress
    from edge.llama.interrupt import interrupt_stops
    from edge.llm.bench import measure

    times: Times = []
    with interrupt_stops(engine), progress("Measuring", unit="runs") as show:

        def on_step(done: int, total: int) -> None:
            nonlocal times
            # Leave out the warm-up, and requests that share steps.
            if deployed and done in (1, args.repeats + 1):
                times = deployed.times(clear=True)
            if done == 1 and engine.paging is not None:
                engine.paging.clear_stats()  # leave out the warm-up
            show(done, total)

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
    return result, times


def _show(
    args: argparse.Namespace,
    engine: TextEngine,
    result: BenchResult,
    memory: dict[str, Any],
    paging: list[tuple[str, str]],
    deployed: DeployedModel | None = None,
    times: Times = (),
) -> int:
    """Print the result. memory, paging: figures read from the engine before it was closed."""
    if args.json:
        about = {
            "model": str(engine.path),
            "architecture": engine.shape.architecture,
            "weight_bytes": engine.shape.weight_bytes,
            "requests": args.requests,
        }
        return print_json({**about, **result.to_json(), **(deployed.to_json(times) if deployed else {}), **memory})
    _print_speeds(args, engine, result)
    if deployed:
        _print_ranks(result, deployed, times)
    else:
        print(result.bandwidth_text())
    for name, figures in paging:
        print(printable(f"{name}: {figures}"))
    if result.scattered:
        print(result.scatter_text())
    return 0


def _print_speeds(args: argparse.Namespace, engine: TextEngine, r: BenchResult) -> None:
    """Print a Markdown table, which can be pasted into an issue."""
    print("| model | size | threads | test | tokens/s | median |")
    print("| --- | ---: | ---: | --- | ---: | ---: |")
    row = f"| {args.model or engine.path.name} | {bytes_text(engine.shape.weight_bytes)} | {r.threads} |"
    tests = [(f"prefill {r.prompt_tokens}", r.prefill), (f"decode {r.gen_tokens}", r.decode)]
    if r.throughput:
        tests.append((f"{args.requests} requests", r.throughput))
    for test, rate in tests:
        print(printable(f"{row} {test} | {rate.mean:.2f} ± {rate.deviation:.2f} | {rate.median:.2f} |"))
    print()


def _print_ranks(r: BenchResult, deployed: DeployedModel, times: Times) -> None:
    """Print the step times of every rank, and the slowest rank."""
    names = deployed.names
    print(f"| {' | '.join(step_table.NAMES)} |")
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in step_table.rows(names, times):
        print(printable(f"| {' | '.join(row)} |"))
    print()
    print(step_table.NOTE)
    print(printable(f"plan: {deployed.line()}"))
    for line in deployed.link_lines():
        print(printable(f"link: {line}"))
    parts = [f"decode: {r.decode_ms_median:.2f} ms a token (median)", *step_table.slowest_text(names, times)]
    print(printable("; ".join((*parts, f"peak memory of this device {bytes_text(r.peak_rss_bytes)}"))))
