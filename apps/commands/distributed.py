"""A model on several devices: the options that say which and how, and an engine that runs there."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from apps.commands.link import address
from apps.errors import UsageError
from apps.options import check_output, engine_options, items, keep_to_cores, number, quiet_grpc
from apps.show.progress import ShownSteps

if TYPE_CHECKING:
    from edge.planning.deployed import Deployed
    from partition.plan.plan import Plan

# Named here and not asked of edge and transport, so that --help stays quick; a test holds them together.
PARALLEL = ("auto", "tensor", "pipeline")
TRANSPORTS = ("auto", "tcp", "grpc")
WIRES = ("f32", "f16", "q8")
ALGORITHMS = ("auto", "star", "mesh", "split", "ring")
MOST_WORKERS = 63
_NUMBERS = re.compile(r"\[[\d,\s]+\]")

# Those that mean nothing on one device, and those that a plan answers.
_OF_SEVERAL = ("shares", "parallel", "save_plan", "transport", "wire", "allreduce", "insecure")
_OF_A_PLAN = ("workers", "shares", "parallel")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which devices, what each does, and how they exchange tensors."""
    group = parser.add_argument_group("several devices")
    group.add_argument(
        "--workers", type=worker_addresses, metavar="A,B", help="run on this device and these: HOST[:PORT],..."
    )
    group.add_argument(
        "--parallel",
        choices=PARALLEL,
        help="every layer on all devices, some layers on each, or what the planner finds best (default: auto)",
    )
    group.add_argument(
        "--shares", type=shares_of, metavar="X,Y,Z", help="what part each does, this device first (default: measured)"
    )
    group.add_argument("--plan", type=Path, metavar="FILE", help="run as a saved plan says, instead of --workers")
    group.add_argument("--save-plan", type=Path, metavar="FILE", help="write the plan as JSON, to be used or edited")
    group.add_argument(
        "--transport", choices=TRANSPORTS, help="of links (default: auto, tcp unless grpc is clearly faster)"
    )
    group.add_argument("--wire", choices=WIRES, help="type of the partial sums on their way (default: f32)")
    group.add_argument("--allreduce", choices=ALGORITHMS, help="how partial sums are summed (default: auto)")
    group.add_argument("--insecure", action="store_true", help="allow workers that run with --insecure")


@dataclass(frozen=True)
class Devices:
    """What was asked for."""

    addresses: tuple[str, ...]  # of the workers, by rank from 1 on
    plan: Plan | None  # where one was given


def prepare(args: argparse.Namespace) -> Devices | None:
    """The devices asked for; None: this one alone. From then on this process keeps to the cores asked for.

    To be called before anything starts threads. UsageError for options that do not go together, PlanError for a plan
    that cannot be used.
    """
    if args.plan is None and args.workers is None:
        given = first_given(args, _OF_SEVERAL)
        if given:
            raise UsageError(
                f"{given} is for several devices: name them with --workers HOST:PORT,..., or give a --plan"
            )
        keep_to_cores(args.affinity)
        return None
    quiet_grpc()
    if args.plan is None:
        _check_shares(args.shares, args.workers)
        keep_to_cores(args.affinity)
        return Devices(args.workers, None)
    given = first_given(args, _OF_A_PLAN)
    if given:
        raise UsageError(f"--plan says which device does what, and so does {given}: leave one of them out")
    from edge.planning.plan_file import read_plan
    from partition.plan.plan import Plan

    plan = read_plan(args.plan, Plan)
    args.memory = args.memory or plan.shard(0).memory
    if args.affinity:
        keep_to_cores(args.affinity)
    else:
        keep_to_cores(plan.shard(0).affinity, f"{args.plan}: affinity of {plan.devices[0]}")
    return Devices(plan.devices[1:], plan)


@contextmanager
def deployed(args: argparse.Namespace, devices: Devices, path: Path, sequences: int = 1) -> Iterator[Deployed]:
    """The model at `path` on these devices, for so many sequences, until the end of the block.

    The errors of `edge.planning.deployed`.
    """
    from edge.cluster.deployment import Exchange
    from edge.planning.deployed import Placement
    from edge.planning.deployed import deployed as running
    from edge.planning.plan_file import save_plan

    if args.save_plan is not None:
        check_output(args.save_plan, [path], force=True)

    def save(plan: Plan) -> None:
        if args.save_plan is not None:
            save_plan(args.save_plan, plan)

    placement = Placement(
        devices.addresses,
        devices.plan,
        f"as {args.plan} says",
        args.parallel or "auto",
        args.shares,
        Exchange(args.transport or "auto", args.allreduce or "auto", args.wire or "f32"),
        args.insecure,
        {name: getattr(args, name) for name in ("threads", "affinity", "gpu_layers", "memory")},
    )
    with running(path, placement, engine_options(args, sequences), steps=ShownSteps(), on_plan=save) as model:
        yield model


def first_given(args: argparse.Namespace, names: Sequence[str]) -> str:
    """The first of these options that was given, as it was written; "" if none was."""
    return next((f"--{name.replace('_', '-')}" for name in names if getattr(args, name) not in (None, False)), "")


def _check_shares(shares: tuple[float, ...] | None, workers: tuple[str, ...]) -> None:
    if shares is not None and len(shares) != len(workers) + 1:
        raise UsageError(
            f"--shares has {len(shares)} of the {len(workers) + 1} numbers needed: one for each device, this one first"
        )


def worker_addresses(text: str) -> tuple[str, ...]:
    """HOST:PORT of each worker. This device may be named first."""
    parts = items(text)
    if "local" in parts[1:]:
        raise argparse.ArgumentTypeError("this device comes first, so only the first can be `local`")
    if parts == ["local"]:
        raise argparse.ArgumentTypeError("this device alone needs no --workers")
    parts = parts[1:] if parts[0] == "local" else parts  # it takes part as it is
    if len(parts) > MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"takes up to {MOST_WORKERS} workers, got {len(parts)}")
    return tuple(map(address, parts))


def shares_of(text: str) -> tuple[float, ...]:
    """Numbers above 0."""
    shares = tuple(map(number, items(text)))
    if min(shares) <= 0:
        raise argparse.ArgumentTypeError(f"needs a number above 0 for each device, got {text[:80]!r}")
    return shares
