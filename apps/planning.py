"""Shared by `edge plan` and `edge pareto`: the options, and the plans there are to choose from."""

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
    from edge.survey.cluster import Cluster

_OF_TEXT = ("context", "prompt_tokens", "depth", "kv_type", "memory", "draft", "draft_worker", "acceptance")
_OF_ONNX = ("dim", "input")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "model", help=ANY_MODEL)
    group = parser.add_argument_group("devices")
    add(group, "--cluster")
    add(group, "--workers", help="this device and HOST[:PORT],... (default: the lab that is up)")
    add(group, "--transport", "--wire")
    add(group, "--threads", help="of this device")
    add(group, "--memory", help="that a language model may take on this device")
    add(group, "--insecure")
    option(group, "--fresh", "measure again what was measured in the last day")
    work = parser.add_argument_group("work")
    add(work, "--context", help="tokens of KV cache (default: 4096, or less)")
    option(work, "--concurrency C", "requests at once, for the throughput (default: 4)", in_flight)
    option(work, "--prompt-tokens N", "of a prompt (default: 128)", positive_int)
    option(work, "--depth N", "tokens behind one that is decoded, on average (default: 64)", positive_int)
    add(work, "--kv-type", help="of stored keys and values (default: f16)")
    add(work, "--dim", "--input")
    add_draft_arguments(work, "off")
    words = "of drafts, the part that is right (default: as usual for such drafts)"
    option(work, "--acceptance A", words, between(0, 1))


def add_type_arguments(parser: argparse.ArgumentParser) -> None:
    """The types to choose between, and what divergence they may have."""
    group = parser.add_argument_group("types of the weights")
    option(group, "--types T,T", "also choose between these types, or GGUF files: q4_0,q8_0", _types, default=())
    row = OBJECTIVES["divergence"]
    group.add_argument(
        "--max-divergence", type=positive, dest="limit_divergence", metavar=row.limit[0], help=row.limit[1]
    )
    option(group, "--text FILE", "to measure divergence on (default: the start of a bundled one)", Path)


@contextmanager
def spaces(args: argparse.Namespace, axes: Sequence[str] = ()) -> Iterator[tuple[list[PlanSpace], Fleet | None]]:
    """The plans of the model, measured; one space for each of its types, where they are given. And the workers.

    axes: of a front, of which one may be divergence.
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
        yield by_model, cluster.fleet


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The devices that the options name, or those of the lab that is up."""
    from edge.survey.cluster import Cluster

    if args.cluster is not None and args.workers is not None:
        raise UsageError("--cluster names the devices, and so does --workers: leave one of them out")
    cluster = Cluster.of_lab(insecure=args.insecure) if args.cluster is None and args.workers is None else None
    if cluster is None:
        return Cluster(args.workers or (), file=args.cluster, insecure=args.insecure)
    args.workers, args.insecure = cluster.addresses, cluster.insecure  # as the command would name them
    print(f"{len(args.workers)} devices of the lab that is up, and this one", file=sys.stderr)
    return cluster


def _check_kind(args: argparse.Namespace) -> None:
    """UsageError for options that mean nothing for this kind of model."""
    if is_onnx(args.model):
        refuse(args, _OF_TEXT, "is of language models")
    else:
        refuse(args, _OF_ONNX, "is of ONNX models")
    check_draft_worker(args)
    if args.acceptance is not None and args.draft in (None, "off"):
        raise UsageError("--acceptance is of drafts: say what drafts, with --draft")
    if args.types and is_onnx(args.model):
        raise UsageError("--types is of language models; quantize an ONNX model with edge quantize")


def sources(args: argparse.Namespace) -> list[Path]:
    """The files that are read, which nothing may overwrite."""
    named = [args.cluster, args.text, *map(Path, filter(is_type_file, args.types))]
    return [model_file(args), *(path for path in named if path is not None)]


def _types(text: str) -> tuple[str, ...]:
    types = tuple(part if is_type_file(part) else part.lower() for part in items(text))
    if not all(types) or len(set(types)) < len(types):
        raise ValueError(f"needs different types between commas, got {text[:80]!r}")
    return types


def model_file(args: argparse.Namespace) -> Path:
    """Where the model is; it is fetched where it has to be."""
    return Path(args.model) if is_onnx(args.model) else model_path(args.model)
