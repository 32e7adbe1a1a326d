"""An ONNX model on several devices: the options that say which and where to cut, and a pipeline that runs there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.commands.distributed import MOST_WORKERS, TRANSPORTS, WIRES, first_given, save_plan, shares_of
from apps.commands.link import address
from apps.commands.options import MAX_THREADS, UsageError, in_flight, items, keep_to_cores, quiet_grpc
from edge.planning.plan_file import plan_in

if TYPE_CHECKING:
    from edge.cluster.onnx_deployment import OnnxDeployment
    from edge.onnx.model import OnnxModel
    from partition.plan.onnx_cuts import Cut
    from partition.plan.onnx_plan import OnnxPlan

LOCAL = "local"  # partition.plan.plan.LOCAL, named here so that --help stays quick

_OF_SEVERAL = ("cut", "shares", "save_plan", "transport", "wire", "in_flight", "insecure")
_OF_A_PLAN = ("workers", "cut", "shares")
_BESIDE_A_PLAN = ("save_plan", "transport", "wire", "in_flight", "insecure")  # of several devices
_OF_THIS_DEVICE = ("threads", "provider")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which devices, where to cut between them, and how tensors travel."""
    group = parser.add_argument_group("several devices")
    group.add_argument(
        "--workers",
        type=_devices,
        metavar="A,B",
        help="a stage on each of these, in this order: HOST[:PORT],...; the first can be `local`, this device",
    )
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


@dataclass(frozen=True)
class Deployed:
    """A model whose stages are on their devices."""

    deployment: OnnxDeployment
    model: OnnxModel
    why: str  # this plan
    names: tuple[str, ...]  # of the stages' devices, for people
    transport: str
    wire: str

    def stages(self, compute_ms: Sequence[float | None] = ()) -> list[dict[str, Any]]:
        """What each stage holds, sends on and takes. compute_ms: medians, where they were measured."""
        from partition.plan.onnx_cuts import routes

        plan = self.deployment.plan
        leaving = routes(self.model.graph, plan.cuts)[1:]
        return [
            {
                "device": stage.device,
                "name": name,
                "nodes": [stage.nodes.start, stage.nodes.stop],
                "until": stage.until or None,
                "weight_bytes": held.weight_bytes,
                "memory_bytes": held.memory_bytes or None,
                "provider": held.provider,
                "fell_back_from": list(held.fell_back_from),
                "threads": held.threads,
                "link": link,
                "payload_bytes": sum(value.n_bytes for value in tensors),
                "tensors": [value.name for value in tensors],
                "compute_ms_median": ms,
            }
            for stage, name, held, link, tensors, ms in zip(
                plan.stages,
                self.names,
                self.deployment.loaded,
                self.deployment.links,
                leaving,
                compute_ms if compute_ms else [None] * len(plan.stages),
                strict=True,
            )
        ]


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
        raise UsageError(f"{given} is for a stage on this device, and there is none: name {LOCAL} first in --workers")
    return found


def check_own(args: argparse.Namespace, devices: Devices | None) -> None:
    """PlanError where there is a plan for this device alone, and it is for another model."""
    from edge.onnx.file import load
    from edge.onnx.model import OnnxModel

    if devices is not None and devices.plan is not None:
        OnnxModel.of(load(Path(args.model)), dict(args.dim)).check(devices.plan)


def _prepared(args: argparse.Namespace) -> Devices:
    """As `prepare`, where devices are named."""
    if args.plan is not None:
        given = first_given(args, _OF_A_PLAN)
        if given:
            raise UsageError(f"--plan says which device does what, and so does {given}: leave one of them out")
        plan = _read_plan(args.plan)
        if plan.own is not None:
            keep_to_cores(plan.own.affinity, f"{args.plan}: affinity of {LOCAL}")
        return Devices(plan.devices, plan)
    n = len(args.workers)
    if args.cut is not None and args.shares is not None:
        raise UsageError("--cut says what each device does, and so does --shares: leave one of them out")
    if args.cut is not None and len(args.cut) != n - 1:
        raise UsageError(f"--cut names {len(args.cut)} places, {n} devices need {n - 1}")
    if args.shares is not None and len(args.shares) != n:
        raise UsageError(f"--shares has {len(args.shares)} of the {n} numbers needed, one for each device")
    return Devices(args.workers, None)


@contextmanager
def deployed(args: argparse.Namespace, devices: Devices, model: OnnxModel) -> Iterator[Deployed]:
    """The model on these devices until the end of the block, its stages loaded. The errors of Fleet and OnnxDeployment,
    and PlanError for cuts that do not exist."""
    from apps.show.progress import progress, say
    from edge.cluster.fleet import Fleet
    from edge.cluster.onnx_deployment import OnnxDeployment

    plan, why = _plan(args, devices, model)
    transport = args.transport or "auto"
    with Fleet(devices.workers, insecure=args.insecure) as fleet:
        with progress(f"Loading {model.name} on {len(set(plan.devices))} devices") as bar:
            deployment = OnnxDeployment(
                fleet,
                model,
                plan,
                transport=transport,
                threads=args.threads,
                provider=args.provider,
                progress=bar.update,
                say=say,
            )
        with deployment:
            if args.save_plan is not None:
                save_plan(args.save_plan, plan)
            names = tuple("this device" if one == LOCAL else fleet.workers[one].label for one in plan.devices)
            yield Deployed(deployment, model, why, names, transport, args.wire or "f32")


def _plan(args: argparse.Namespace, devices: Devices, model: OnnxModel) -> tuple[OnnxPlan, str]:
    """The plan, and why it is this one."""
    from partition.plan.onnx_cuts import choose, cut_at
    from partition.plan.onnx_split import split

    if devices.plan is not None:
        return devices.plan, f"as {args.plan} says"
    found: list[Cut]
    if args.cut is not None:
        found, why = [cut_at(model.graph, where) for where in args.cut], "as --cut says"
    else:
        shares = args.shares or (1.0,) * len(devices.addresses)
        places = choose(model.graph, "auto")
        if len(places) < len(shares):
            places = choose(model.graph, "all")
        found = split(model.graph, places, shares)
        why = "as --shares says, by estimated work" if args.shares else "equal parts of the estimated work"
    return model.plan(devices.addresses, found), why


def _read_plan(path: Path) -> OnnxPlan:
    from edge.net.channel import parse_address
    from partition.errors import PlanError
    from partition.plan.onnx_plan import OnnxPlan

    try:
        plan = OnnxPlan.from_json(plan_in(json.loads(path.read_text(encoding="utf-8"))))
        for stage in plan.stages:
            if stage.device != LOCAL:
                parse_address(stage.device)
            if (stage.threads or 1) > MAX_THREADS:
                raise PlanError(f"{stage.device} is to have {stage.threads} threads, {MAX_THREADS} are the most")
    except (ValueError, RecursionError) as error:  # among them PlanError, and what is not JSON
        raise PlanError(f"{path} cannot be used as a plan: {error}") from None
    return plan


def _devices(text: str) -> tuple[str, ...]:
    """HOST:PORT of each worker, or LOCAL for the first."""
    parts = items(text)
    if LOCAL in parts[1:]:
        raise argparse.ArgumentTypeError("inputs come from this device, so only the first can be `local`")
    if parts == [LOCAL]:
        raise argparse.ArgumentTypeError("this device alone needs no --workers")
    if len(parts) > MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"takes up to {MOST_WORKERS} devices, got {len(parts)}")
    return tuple(part if part == LOCAL else address(part) for part in parts)


def _cuts(text: str) -> tuple[str, ...]:
    """Labels, or positions."""
    parts = tuple(part.strip() for part in text.split(","))  # labels may have spaces
    if not all(parts):
        raise argparse.ArgumentTypeError(f"needs the label of a cut between commas, got {text[:80]!r}")
    return parts
