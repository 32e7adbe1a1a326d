"""What `edge plan` and `edge pareto` have in common: the options, and the plans there are to choose from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from apps.commands.bench_onnx import is_onnx
from apps.commands.distributed import MOST_WORKERS, TRANSPORTS, WIRES, first_given, worker_addresses
from apps.errors import UsageError
from apps.options import (
    KV_TYPES,
    byte_size,
    check_dimensions,
    check_onnx,
    context_size,
    dimension,
    in_flight,
    model_path,
    positive_int,
    quiet_grpc,
    thread_count,
)
from apps.show.progress import ShownSteps

if TYPE_CHECKING:
    from devices.cluster_file import Cluster
    from edge.cluster.fleet import Fleet
    from edge.planning.spaces import PlanOptions, PlanSpace

_OF_TEXT = ("context", "prompt_tokens", "kv_type", "memory")
_OF_ONNX = ("dim",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the devices, and what is to be done with it."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="GGUF or ONNX file, or REPO:FILE (default: the bundled model)"
    )
    group = parser.add_argument_group("devices")
    group.add_argument("--cluster", type=Path, metavar="FILE", help="devices and links: cluster.toml")
    group.add_argument(
        "--workers",
        type=worker_addresses,
        metavar="A,B",
        help="this device and HOST[:PORT],... (default: the lab that is up)",
    )
    group.add_argument(
        "--transport", choices=TRANSPORTS, help="of links (default: auto, tcp unless grpc is clearly faster)"
    )
    group.add_argument("--wire", choices=WIRES, help="type of floats between devices (default: f32)")
    group.add_argument("--threads", type=thread_count, metavar="N", help="of this device")
    group.add_argument("--memory", type=byte_size, metavar="SIZE", help="that a language model may take on this device")
    group.add_argument("--insecure", action="store_true", help="allow workers that run with --insecure")
    group.add_argument("--fresh", action="store_true", help="measure again what was measured in the last day")
    work = parser.add_argument_group("work")
    work.add_argument("--context", type=context_size, metavar="N", help="tokens of KV cache (default: 4096, or less)")
    work.add_argument(
        "--concurrency", type=in_flight, metavar="C", help="requests at once, for the throughput (default: 4)"
    )
    work.add_argument("--prompt-tokens", type=positive_int, metavar="N", help="of a prompt (default: 128)")
    work.add_argument("--kv-type", choices=KV_TYPES, help="of stored keys and values (default: f16)")
    work.add_argument("--dim", type=dimension, action="append", metavar="NAME=N", help="size of an open ONNX dimension")


@contextmanager
def spaces(args: argparse.Namespace, types: tuple[str, ...] = ()) -> Iterator[tuple[list[PlanSpace], Fleet | None]]:
    """The plans of the model, measured; one space for each of `types`, where they are given. And the workers."""
    from devices.cluster_file import Cluster, read_cluster
    from edge.planning.spaces import spaces as of_model
    from edge.survey.profile import reachable

    quiet_grpc()
    if args.cluster is not None and args.workers is not None:
        raise UsageError("--cluster names the devices, and so does --workers: leave one of them out")
    _check_kind(args, types)
    insecure = args.insecure
    if args.cluster is None and args.workers is None:
        args.workers, insecure = _of_the_lab(insecure)
    cluster = read_cluster(args.cluster) if args.cluster else Cluster.of_addresses(args.workers or ())
    _check_number(cluster)
    path = model_file(args)
    with ExitStack() as stack:
        fleet, notes = stack.enter_context(reachable(cluster, insecure=insecure))
        if args.cluster is None and fleet is not None:
            cluster = _named(cluster, fleet)
        yield of_model(path, cluster, fleet, notes, _options(args), types=types, steps=ShownSteps()), fleet


def _options(args: argparse.Namespace) -> PlanOptions:
    from edge.planning.spaces import PlanOptions

    if is_onnx(args.model):
        check_onnx()
        check_dimensions(args.dim or [])
    return PlanOptions(
        context=args.context,
        prompt_tokens=args.prompt_tokens,
        kv_type=args.kv_type or "f16",
        concurrency=args.concurrency,
        dims=dict(args.dim or []),
        wire=args.wire or "f32",
        transport=args.transport or "auto",
        threads=args.threads,
        memory=args.memory,
        fresh=args.fresh,
    )


def _check_kind(args: argparse.Namespace, types: tuple[str, ...]) -> None:
    """UsageError for options that mean nothing for this kind of model."""
    given = first_given(args, _OF_TEXT if is_onnx(args.model) else _OF_ONNX)
    if given:
        raise UsageError(f"{given} is of {'language' if is_onnx(args.model) else 'ONNX'} models")
    if types and is_onnx(args.model):
        raise UsageError("--types is of language models; quantize an ONNX model with edge quantize")


def _check_number(cluster: Cluster) -> None:
    """UsageError for more devices than can take part."""
    others = sum(not device.is_local for device in cluster.devices)
    if others > MOST_WORKERS:
        raise UsageError(f"{MOST_WORKERS} devices beside this one are the most, got {others}; leave some out")


def sources(args: argparse.Namespace) -> list[Path]:
    """The files that are read, which nothing may overwrite."""
    return [model_file(args), *([args.cluster] if args.cluster is not None else [])]


def model_file(args: argparse.Namespace) -> Path:
    """Where the model is; it is fetched where it has to be."""
    return Path(args.model) if is_onnx(args.model) else model_path(args.model)


def _of_the_lab(insecure: bool) -> tuple[tuple[str, ...], bool]:
    """The workers of the lab that is up, and whether they may be in the clear; none where no lab is."""
    from devices.lab.lab import status

    state = status()
    if state is None:
        return (), insecure
    print(f"{len(state.addresses)} devices of the lab that is up, and this one", file=sys.stderr)
    return tuple(state.addresses.values()), insecure or state.shaped


def _named(cluster: Cluster, fleet: Fleet) -> Cluster:
    """The same with the names that workers have, where these are different."""
    names = {address: worker.name for address, worker in fleet.workers.items()}
    if len({"local", *names.values()}) <= len(names):
        return cluster
    return replace(cluster, devices=tuple(replace(d, name=names.get(d.address or "", d.name)) for d in cluster.devices))
