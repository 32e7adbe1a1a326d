"""Options that run a model on several devices, and the configurations they lead to."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from apps.engine_options import check_engine_arguments, engine_options
from apps.errors import UsageError
from apps.options import (
    AUTO,
    MOST_WORKERS,
    add,
    address,
    check_output,
    given_options,
    keep_to_cores,
    option,
    refuse,
    workers_or_auto,
)
from apps.show.progress import ShownSteps
from apps.show.table import print_note
from transport.choice import ALGORITHMS

if TYPE_CHECKING:
    from edge.api.config import EngineConfig
    from edge.deployment.deployed_network import DeployedNetwork
    from edge.deployment.network_replicas import NetworkReplicas
    from edge.onnx.model import OnnxSource
    from partition.plan.onnx_plan import OnnxPlan
    from partition.plan.plan import Plan

AnyPlan = TypeVar("AnyPlan", "Plan", "OnnxPlan")

# Copies of names in edge and partition, so that --help stays quick; a test compares them.
LOCAL = "local"
PARALLEL = ("auto", "tensor", "pipeline")
REPLICAS = "replicas"
OF_NETWORKS = ("pipeline", REPLICAS)
ENCODER_PLACES = ("auto", "here")

_OF_SEVERAL = (
    "cut", "shares", "parallel", "save_plan", "transport", "wire", "allreduce", "in_flight", "insecure", "no_local",
)  # fmt: skip
# Options that contradict --plan, or that apply to a plan only if it has several devices.
_OF_A_PLAN = ("workers", "no_local", "cut", "shares", "parallel")
_BESIDE_A_PLAN = ("save_plan", "transport", "wire", "in_flight", "insecure")
_OF_STAGES = ("cut", "shares", "save_plan", "wire")
_OF_THIS_DEVICE = ("threads", "provider")


def add_arguments(parser: argparse.ArgumentParser, *, onnx: bool = False, serves: bool = False) -> None:
    """Add the options for running on several devices.

    onnx: the model is an ONNX network.
    serves: the model can be of either kind.
    """
    group = parser.add_argument_group("several devices")
    if onnx:
        add(group, "--workers", help="run a stage on this device, then one on each of these workers: HOST[:PORT],...")
        option(group, "--no-local", "run no stage on this device")
        option(group, "--cut LABEL,...", "cut the model after these nodes (default: balance the work of stages)", _cuts)
        add(group, "--shares", help="share of the work of each device, such as 2,1,1")
        words = "pipeline: each device computes a stage; replicas: each device has the whole network, and answers other"
        option(group, "--parallel", f"{words} inputs (default: pipeline)", choices=OF_NETWORKS)
    else:
        words = (
            "run on this device and these workers: names or HOST[:PORT],..., or auto: the workers of the cluster that"
        )
        words += " answer"
        add(group, "--workers", type=workers_or_auto, help=words)
        words = "tensor: split every layer over all devices; pipeline: give each device some layers; auto: let the"
        words += " planner choose (default: auto)"
        if serves:
            words += "; for networks in ONNX, pipeline or replicas: the whole network on each device"
        option(group, "--parallel", words, choices=(*PARALLEL, REPLICAS) if serves else PARALLEL)
        add(
            group,
            "--shares",
            help="share of the work of each device, this one first, such as 2,1 (default: measured)",
        )
    add(group, "--plan", "--save-plan", "--transport")
    if onnx:
        add(group, "--wire", help="type of the values sent between stages (default: f32)")
        add(group, "--in-flight")
    else:
        words = "type of the partial sums that devices exchange; f16 halves their bytes, q8 quarters them"
        add(group, "--wire", help=f"{words} (default: f32)")
        choices = ("auto", *ALGORITHMS)
        option(group, "--allreduce", "algorithm that adds up partial sums (default: auto)", choices=choices)
    add(group, "--insecure")


def add_media_arguments(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Add the options for the projector of pictures and sounds, and for the device that runs it."""
    add(group, "--mmproj")
    words = "device that encodes pictures and sounds: here, HOST[:PORT], or auto: the fastest (default: auto)"
    option(group, "--encoder WHERE", words, _encoder_place)


def _encoder_place(text: str) -> str:
    """Return "auto", "here", or HOST:PORT of a worker."""
    return text if text in ENCODER_PLACES else address(text)


def has_helper(args: argparse.Namespace) -> bool:
    """Return whether the options name a worker that drafts or encodes. Such a worker need not hold model layers."""
    encoder = getattr(args, "encoder", None)
    return getattr(args, "draft_worker", None) is not None or encoder not in (None, *ENCODER_PLACES)


@dataclass(frozen=True)
class Devices(Generic[AnyPlan]):
    """The devices that the options name."""

    addresses: tuple[str, ...]  # addresses of the devices, by rank or stage; the first can be LOCAL
    plan: AnyPlan | None  # the plan of --plan, or None
    joining: bool = False  # workers that are discovered later join, too

    @property
    def workers(self) -> tuple[str, ...]:
        """The addresses of all devices except this one."""
        return tuple(address for address in self.addresses if address != LOCAL)


def prepare(args: argparse.Namespace) -> Devices[Plan] | None:
    """Return the devices that the options of a language model name, or None for this device alone.

    Also binds this process to the cores that the options or the plan name, so call it before any thread starts.

    Raises UsageError if options contradict each other, and PlanError if the plan cannot be used.
    """
    from partition.plan.plan import Plan

    joining = args.workers == AUTO
    if joining:
        args.workers = _addresses(args)
    if args.parallel == REPLICAS:
        raise UsageError(
            "--parallel replicas is for networks in ONNX; the planner chooses the copies of a language model"
        )
    devices = _devices(args, Plan)
    if joining and devices is not None:
        devices = replace(devices, joining=True)
    if devices is not None and devices.plan is not None:
        first = devices.plan.shard(0)
        args.memory = args.memory or first.memory
        if not args.affinity:
            keep_to_cores(first.affinity, f"{args.plan}: affinity of {LOCAL}")
    keep_to_cores(args.affinity)
    check_engine_arguments(args)
    return devices


def prepare_onnx(args: argparse.Namespace) -> Devices[OnnxPlan] | None:
    """Do the same as `prepare`, for an ONNX network. Return None for this device alone without a plan."""
    from partition.plan.onnx_plan import OnnxPlan

    devices = _devices(args, OnnxPlan)
    if devices is None:
        return None
    own = devices.plan.own if devices.plan is not None else None
    if own is not None:
        keep_to_cores(own.affinity, f"{args.plan}: affinity of {LOCAL}")
        args.threads = args.threads or own.threads
        args.provider = args.provider or own.provider
    if args.parallel == REPLICAS:
        refuse(args, _OF_STAGES, "is for stages, but --parallel replicas has none; leave one of them out")
    if not devices.workers:
        refuse(args, _BESIDE_A_PLAN, f"is for several devices, but {args.plan} uses only this one; leave it out")
    if LOCAL not in devices.addresses:
        refuse(args, _OF_THIS_DEVICE, "is for a stage on this device, but no stage runs here; leave it out")
    return devices


def _addresses(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the addresses of the cluster's workers that answer now. Raises WorkerError if none does."""
    words = "needs workers named one by one; --workers auto finds those of your cluster: leave one of them out"
    refuse(args, ("insecure", "shares", "plan"), words)
    from edge.cluster.connect import CONNECT_TIMEOUT_S
    from edge.cluster.roster import JOINED, SLOW, roster
    from edge.errors import WorkerError

    with roster([], discover=True, insecure=False, timeout_s=CONNECT_TIMEOUT_S, steps=ShownSteps()) as entries:
        addresses = tuple(entry.address for entry in entries if entry.membership in (JOINED, SLOW))[:MOST_WORKERS]
        others = [entry.why() for entry in entries if entry.error]
    for why in others:
        print_note(why)
    if not addresses:
        raise WorkerError("no workers found; start one with `edge worker`, or name some: --workers HOST[:PORT],...")
    return addresses


def _devices(args: argparse.Namespace, kind: type[AnyPlan]) -> Devices[AnyPlan] | None:
    """Return the devices that the options name for a model of either kind, or None for this device alone."""
    if args.plan is None and args.workers is None:
        several = [name for name in _OF_SEVERAL if name != "insecure" or not has_helper(args)]
        refuse(args, several, "is for several devices: name them with --workers HOST:PORT,..., or give a --plan")
        return None
    if args.plan is not None:
        refuse(args, _OF_A_PLAN, "assigns work to devices, and so does --plan: leave one of them out")
        from edge.planning.choice import read_plan
        from partition.plan.plan import Plan

        plan = read_plan(args.plan, kind)
        return Devices(plan.all_devices if isinstance(plan, Plan) else plan.devices, plan)
    addresses = args.workers if getattr(args, "no_local", False) else (LOCAL, *args.workers)
    cut, n = getattr(args, "cut", None), len(addresses)
    if cut is not None and args.shares is not None:
        raise UsageError("--cut assigns work to devices, and so does --shares: leave one of them out")
    if cut is not None and len(cut) != n - 1:
        raise UsageError(f"{n} devices need {n - 1} cuts, but --cut names {len(cut)}: name {n - 1}")
    if args.shares is not None and len(args.shares) != n:
        order = ", this one first" if LOCAL in addresses else ""
        raise UsageError(f"{n} devices need {n} shares, but --shares has {len(args.shares)}: give one for each{order}")
    return Devices(addresses, None)


def engine_config(
    args: argparse.Namespace,
    path: Path,
    devices: Devices[Plan] | None,
    sequences: int = 1,
    *,
    draft: str = "off",
) -> EngineConfig:
    """Return the configuration of an engine, as the options state it.

    path: file of the model.
    devices: result of `prepare`.
    sequences: number of requests computed at the same time.
    draft: drafting method if --draft is not used.

    Raises UsageError if options contradict each other.
    """
    from edge.api.config import EngineConfig
    from edge.weights.adapter import checked_for

    if args.save_plan is not None:
        check_output(args.save_plan, [path], force=True)
    several: dict[str, Any] = {}
    if devices is not None:
        several = given_options(args, ("parallel", "shares", "affinity", "transport", "allreduce", "wire"))
        several |= {"workers": devices.addresses[1:], "joining": devices.joining}
        if devices.plan is not None:
            several |= {"plan": devices.plan.to_json(), "plan_name": str(args.plan)}
        if args.save_plan is not None:
            several["save_plan"] = str(args.save_plan)
    mmproj = projector_of(args, path)
    lora = checked_for(path, args.lora) if getattr(args, "lora", None) else ()
    return EngineConfig(
        str(path.absolute()),
        replace(engine_options(args), sequences=sequences, lora=lora),
        getattr(args, "prefix_cache", 0),
        draft=getattr(args, "draft", None) or draft,
        draft_worker=getattr(args, "draft_worker", None),
        insecure=args.insecure,
        reproducible=getattr(args, "reproducible", False),
        **given_options(args, ("think", "encoder")),
        mmproj=None if mmproj is None else str(mmproj.absolute()),
        **several,
    )


def projector_of(args: argparse.Namespace, path: Path) -> Path | None:
    """Return the checked projector file for the model at `path`, or None if the command or the model has none.

    Raises UsageError if --encoder is used without a projector.
    """
    from edge.media.projector import open_projector, projector_beside

    if not hasattr(args, "mmproj"):
        return None
    mmproj: Path | None = args.mmproj or projector_beside(path)
    if mmproj is not None:
        open_projector(mmproj)
    elif args.encoder is not None:
        raise UsageError("--encoder needs a projector of pictures and sounds, and there is none: add --mmproj FILE")
    return mmproj


@contextmanager
def deployed_onnx(
    args: argparse.Namespace, devices: Devices[OnnxPlan], model: OnnxSource
) -> Iterator[DeployedNetwork | NetworkReplicas]:
    """Load the stages or the copies of a network on the devices, and yield it until the block ends.

    Raises the errors of `arrange_network`, `deploy_network` and `NetworkReplicas`.
    """
    from edge.cluster.llm_ranks import Exchange
    from edge.deployment.networks import deploy_network
    from edge.planning.choice import PlanChoice, save_plan
    from edge.planning.onnx_space import arrange_network
    from edge.profiling.cluster import Cluster

    steps, exchange = ShownSteps(), Exchange(args.transport or "auto", wire=args.wire or "f32")
    own = given_options(args, ("threads", "provider"))
    if args.parallel == REPLICAS:
        from edge.deployment.network_replicas import NetworkReplicas

        addresses, insecure = devices.addresses, args.insecure
        with NetworkReplicas(model, addresses, exchange, insecure=insecure, steps=steps, **own) as replicas:
            yield replicas
        return
    if devices.plan is not None:
        choice = PlanChoice(model.file.path, devices.plan, f"as {args.plan} says", is_given=True)
    else:
        how = {"cuts": args.cut, "shares": args.shares, "threads": args.threads}
        choice = arrange_network(model, devices.addresses, steps=steps, **how)
    with (
        Cluster(devices.workers, insecure=args.insecure, needs_all=True) as cluster,
        deploy_network(choice, model, cluster, exchange, steps=steps, **own) as deployed,
    ):
        if args.save_plan is not None:
            save_plan(args.save_plan, deployed.plan)
        yield deployed


def _cuts(text: str) -> tuple[str, ...]:
    """Return labels or positions of cuts, from text with commas between them."""
    parts = tuple(part.strip() for part in text.split(","))  # labels may have spaces
    if not all(parts):
        raise ValueError(f"needs labels of cuts with commas between them, got {text[:80]!r}")
    return parts
