"""Parts shared by `edge plan` and `edge pareto`: options, devices, and the space of plans."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from apps.distributed import projector_of
from apps.errors import UsageError
from apps.options import (
    ANY_MODEL,
    add,
    add_draft_arguments,
    check_dimensions,
    check_draft_worker,
    check_onnx,
    given_options,
    in_flight,
    is_onnx,
    model_path,
    option,
    refuse,
)
from apps.show.progress import ShownSteps
from edge.units import between, items, positive, positive_int
from partition.predict.objectives import OBJECTIVES
from quant.mixes import is_type_file

if TYPE_CHECKING:
    from edge.cluster.fleet import Fleet
    from edge.planning.space import PlanSpace
    from edge.profiling.cluster import Cluster

TEXT_OPTIONS = (
    "context", "prompt_tokens", "depth", "kv_type", "memory", "draft", "draft_worker", "acceptance", "survey_seconds",
)  # fmt: skip
_OF_ONNX = ("dim", "input")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "model", help=ANY_MODEL)
    group = parser.add_argument_group("devices")
    add(group, "--cluster")
    add(group, "--workers", help="use this device and HOST[:PORT],... (default: the running lab)")
    add(group, "--transport", "--wire")
    add(group, "--threads", help="number of threads on this device")
    add(group, "--memory", help="memory limit of a language model on this device")
    add(group, "--insecure")
    add(group, "--survey-seconds")
    option(group, "--fresh", "repeat remembered measurements")
    work = parser.add_argument_group("work")
    add(work, "--context", help="tokens in the KV cache (default: 4096, or less)")
    option(work, "--concurrency C", "concurrent requests, for the throughput (default: 4)", in_flight)
    option(work, "--prompt-tokens N", "tokens in a prompt (default: 128)", positive_int)
    option(work, "--depth N", "average number of earlier tokens when a token is decoded (default: 64)", positive_int)
    add(work, "--kv-type", help="type of the KV cache (default: f16)")
    add(work, "--dim", "--input")
    add_draft_arguments(work, "off")
    words = "share of drafted tokens that are accepted (default: typical for the draft method)"
    option(work, "--acceptance A", words, between(0, 1))


def add_type_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for choosing between weight types, and for the allowed divergence."""
    group = parser.add_argument_group("types of the weights")
    words = "choose the type of the weights, too: from these types or GGUF files, such as q4_0,q8_0"
    option(group, "--types T,T", words, _types, default=())
    row = OBJECTIVES["divergence"]
    group.add_argument(
        "--max-divergence", type=positive, dest="limit_divergence", metavar=row.limit[0], help=row.limit[1]
    )
    option(group, "--text FILE", "text on which divergence is measured (default: the start of a bundled one)", Path)


@contextmanager
def spaces(args: argparse.Namespace, axes: Sequence[str] = ()) -> Iterator[tuple[list[PlanSpace], Fleet | None]]:
    """Measure the devices and yield (plan spaces, fleet of workers): one space for each weight type.

    axes: axes of a front; `divergence` can be one of them.
    """
    _check_kind(args)
    from edge.planning.plan_options import PlanOptions
    from edge.planning.spaces import spaces as of_model
    from edge.planning.type_files import divergence_text

    divergence_on = divergence_text(args.types, axes, args.limit_divergence, args.text)
    cluster = cluster_of(args)
    path = model_file(args)
    with cluster:
        if is_onnx(args.model):
            check_onnx()
            check_dimensions(args.dim or [])
        named = given_options(args, [field.name for field in fields(PlanOptions)])
        projector = None if is_onnx(args.model) else projector_of(args, path)
        options = PlanOptions(dims=dict(args.dim or []), inputs=args.input or (), projector=projector, **named)
        steps = ShownSteps()
        by_model = of_model(path, cluster, options, types=args.types, divergence_on=divergence_on, steps=steps)
        for space in by_model:
            space.title = args.model or space.title
        yield by_model, cluster.fleet


def typed_model(args: argparse.Namespace, path: Path | str) -> list[str]:
    """Return the model as an argument of the next command: as the user typed it, or the path of a type's file."""
    if args.types:
        return [str(path)]
    return [args.model] if args.model else []


def cluster_of(args: argparse.Namespace) -> Cluster:
    """Return the devices that the options name, or those of the running lab."""
    from edge.profiling.cluster import Cluster

    if args.cluster is not None and args.workers is not None:
        raise UsageError("--cluster names the devices, and so does --workers: leave one of them out")
    cluster = Cluster.of_lab(insecure=args.insecure) if args.cluster is None and args.workers is None else None
    if cluster is None:
        return Cluster(args.workers or (), file=args.cluster, insecure=args.insecure)
    # Messages and saved commands name the devices of the lab.
    args.workers, args.insecure = cluster.addresses, cluster.insecure
    print(f"using the {len(args.workers)} devices of the running lab, and this device", file=sys.stderr)
    return cluster


def _check_kind(args: argparse.Namespace) -> None:
    """Raise UsageError if an option does not apply to this kind of model."""
    if is_onnx(args.model):
        refuse(args, TEXT_OPTIONS, "is for language models; leave it out for an ONNX model")
    else:
        refuse(args, _OF_ONNX, "is for ONNX models; leave it out for a language model")
    check_draft_worker(args)
    if args.acceptance is not None and args.draft in (None, "off"):
        raise UsageError("--acceptance needs drafts: choose a method with --draft")
    if args.types and is_onnx(args.model):
        raise UsageError("--types is for language models; quantize an ONNX model with edge quantize")


def sources(args: argparse.Namespace) -> list[Path]:
    """Return the files that the command reads, which must not be overwritten."""
    named = [args.cluster, args.text, *map(Path, filter(is_type_file, args.types))]
    return [model_file(args), *(path for path in named if path is not None)]


def _types(text: str) -> tuple[str, ...]:
    types = tuple(part if is_type_file(part) else part.lower() for part in items(text))
    if not all(types) or len(set(types)) < len(types):
        raise ValueError(f"needs different types between commas, got {text[:80]!r}")
    return types


def model_file(args: argparse.Namespace) -> Path:
    """Return the file of the model. A model on the hub is downloaded if it is not here yet."""
    return Path(args.model) if is_onnx(args.model) else model_path(args.model)
