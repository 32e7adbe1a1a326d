"""An ONNX model on several devices: the options that say which and where to cut, and a pipeline that runs there."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from apps.commands.distributed import TRANSPORTS, WIRES, first_given, shares_of, worker_addresses
from apps.errors import UsageError
from apps.options import in_flight, keep_to_cores, quiet_grpc
from apps.show.progress import ShownSteps

if TYPE_CHECKING:
    from edge.onnx.model import OnnxSource
    from edge.planning.onnx_deployed import Deployed
    from partition.plan.onnx_plan import OnnxPlan

LOCAL = "local"  # partition.plan.plan.LOCAL, named here so that --help stays quick

_OF_SEVERAL = ("cut", "shares", "save_plan", "transport", "wire", "in_flight", "insecure", "no_local")
_OF_A_PLAN = ("workers", "no_local", "cut", "shares")
_BESIDE_A_PLAN = ("save_plan", "transport", "wire", "in_flight", "insecure")  # of several devices
_OF_THIS_DEVICE = ("threads", "provider")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which devices, where to cut between them, and how tensors travel."""
    group = parser.add_argument_group("several devices")
    group.add_argument(
        "--workers",
        type=worker_addresses,
        metavar="A,B",
        help="a stage on this device and on each of these, in this order: HOST[:PORT],...",
    )
    group.add_argument("--no-local", action="store_true", help="no stage on this device")
    group.add_argument("--cut", type=_cuts, metavar="LABEL,...", help="cut after these (default: by estimated work)")
    group.add_argument("--shares", type=shares_of, metavar="X,Y,Z", help="what part of the work each device is to do")
    group.add_argument("--plan", type=Path, metavar="FILE", help="run as a saved plan says, instead of --workers")
    group.add_argument("--save-plan", type=Path, metavar="FILE", help="write the plan as JSON, to be used or edited")
    group.add_argument(
        "--transport", choices=TRANSPORTS, help="of links (default: auto, tcp unless grpc is clearly faster)"
    )
    group.add_argument("--wire", choices=WIRES, help="type of floats on their way between stages (default: f32)")
    group.add_argument(
        "--in-flight", type=in_flight, metavar="N", help="inputs in flight for throughput (default: what fills it)"
    )
    group.add_argument("--insecure", action="store_true", help="allow workers that run with --insecure")


@dataclass(frozen=True)
class Devices:
    """What was asked for."""

    addresses: tuple[str, ...]  # of the stages; LOCAL can be the first
    plan: OnnxPlan | None  # where one was given

    @property
    def workers(self) -> tuple[str, ...]:
        """The addresses of workers among them."""
        return tuple(one for one in self.addresses if one != LOCAL)


def prepare(args: argparse.Namespace) -> Devices | None:
    """The devices asked for; None: this one alone, and there is no plan. UsageError for options that do not go
    together, PlanError for a plan that cannot be used."""
    if args.plan is None and args.workers is None:
        given = first_given(args, _OF_SEVERAL)
        if given:
            raise UsageError(
                f"{given} is for several devices: name them with --workers HOST:PORT,..., or give a --plan"
            )
        return None
    quiet_grpc()
    found = _prepared(args)
    if found.plan is not None and found.plan.own is not None:
        args.threads = args.threads or found.plan.own.threads
        args.provider = args.provider or found.plan.own.provider
    if not found.workers:
        given = first_given(args, _BESIDE_A_PLAN)
        if given:
            raise UsageError(f"{given} is for several devices, and {args.plan} is for this one alone; leave it out")
        return found
    given = first_given(args, _OF_THIS_DEVICE)
    if given and LOCAL not in found.addresses:
        raise UsageError(f"{given} is for a stage on this device, and there is none; leave {given} out")
    return found


def check_own(args: argparse.Namespace, devices: Devices | None) -> None:
    """PlanError where there is a plan for this device alone, and it is for another model."""
    from edge.onnx.file import load
    from edge.onnx.model import OnnxSource

    if devices is not None and devices.plan is not None:
        OnnxSource.of(load(Path(args.model)), dict(args.dim)).check(devices.plan)


def _prepared(args: argparse.Namespace) -> Devices:
    """As `prepare`, where devices are named."""
    if args.plan is not None:
        given = first_given(args, _OF_A_PLAN)
        if given:
            raise UsageError(f"--plan says which device does what, and so does {given}: leave one of them out")
        from edge.planning.plan_file import read_plan
        from partition.plan.onnx_plan import OnnxPlan

        plan = read_plan(args.plan, OnnxPlan)
        if plan.own is not None:
            keep_to_cores(plan.own.affinity, f"{args.plan}: affinity of {LOCAL}")
        return Devices(plan.devices, plan)
    addresses = args.workers if args.no_local else (LOCAL, *args.workers)
    n = len(addresses)
    if args.cut is not None and args.shares is not None:
        raise UsageError("--cut says what each device does, and so does --shares: leave one of them out")
    if args.cut is not None and len(args.cut) != n - 1:
        raise UsageError(f"--cut names {len(args.cut)} places, {n} devices need {n - 1}")
    if args.shares is not None and len(args.shares) != n:
        raise UsageError(f"--shares has {len(args.shares)} of the {n} numbers needed, one for each device")
    return Devices(addresses, None)


@contextmanager
def deployed(args: argparse.Namespace, devices: Devices, model: OnnxSource) -> Iterator[Deployed]:
    """The model on these devices until the end of the block, its stages loaded. The errors of
    `edge.planning.onnx_deployed`."""
    from edge.planning.onnx_deployed import OnnxPlacement
    from edge.planning.onnx_deployed import deployed as running
    from edge.planning.plan_file import save_plan

    placement = OnnxPlacement(
        devices.addresses,
        devices.plan,
        f"as {args.plan} says",
        args.cut,
        args.shares,
        args.transport or "auto",
        args.wire or "f32",
        args.threads,
        args.provider,
        args.insecure,
    )
    with running(model, placement, steps=ShownSteps()) as running_model:
        if args.save_plan is not None:
            save_plan(args.save_plan, running_model.deployment.plan)
        yield running_model


def _cuts(text: str) -> tuple[str, ...]:
    """Labels, or positions."""
    parts = tuple(part.strip() for part in text.split(","))  # labels may have spaces
    if not all(parts):
        raise argparse.ArgumentTypeError(f"needs the label of a cut between commas, got {text[:80]!r}")
    return parts
