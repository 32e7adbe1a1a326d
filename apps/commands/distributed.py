"""A model on several devices: the options that say which and how, and an engine that runs there."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.commands.link import address
from apps.commands.options import (
    MAX_THREADS,
    UsageError,
    check_output,
    engine_options,
    items,
    keep_to_cores,
    number,
    quiet_grpc,
)
from apps.show.table import printable
from edge.planning.plan_file import plan_in

if TYPE_CHECKING:
    from edge.cluster.deployment import Deployment, Exchange
    from edge.cluster.fleet import Fleet
    from edge.llm.engine import Engine
    from edge.llm.interface import TextEngine
    from edge.llm.options import EngineOptions
    from edge.parallel.step_times import Summary
    from edge.planning.arrange import Arrangement
    from partition.plan.onnx_plan import OnnxPlan
    from partition.plan.plan import Plan
    from quant.gguf.file import GgufFile

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
    group.add_argument("--workers", type=_workers, metavar="A,B", help="run on this device and these: HOST[:PORT],...")
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


@dataclass(frozen=True)
class Deployed:
    """A model that runs on several devices."""

    engine: TextEngine
    plan: Plan
    why: str  # this plan
    exchange: Exchange
    names: tuple[str, ...]  # of the devices by rank, for people

    def times(self, *, clear: bool = False) -> list[dict[str, Summary]]:
        """As `DistributedEngine.times`; nothing is known of a plan for this device alone."""
        from edge.parallel.engine import DistributedEngine

        return self.engine.times(clear=clear) if isinstance(self.engine, DistributedEngine) else [{}]

    def link_lines(self) -> list[str]:
        """How this device is linked to the others, how others are where it is unusual, and what was changed."""
        from edge.parallel.engine import DistributedEngine

        if not isinstance(self.engine, DistributedEngine):
            return []
        states = [state for state in self.engine.link_states if state.ranks[0] == 0 or not state.usual]
        links = [f"ranks {low} and {high}: {state.why}" for state in states for low, high in (state.ranks,)]
        return [*links, *self.engine.link_watch.changes]

    def line(self) -> str:
        """The devices, what each holds, and why, in one line."""
        if len(self.names) == 1:
            return self.why
        staged = len(self.plan.stages) > 1
        parts = []
        for rank, name in enumerate(self.names):
            cut = self.plan.slice(rank)
            held = [f"layers {cut.layers}"] if staged else []
            if len(self.plan.group(rank)) > 1:
                held += [f"heads {cut.heads}", f"ff {cut.ff}"]
            parts.append(f"{name} {', '.join(held)}")
        return f"{'; '.join(parts)} ({self.why})"

    def to_json(self, times: Sequence[Mapping[str, Summary]]) -> dict[str, Any]:
        """What a command's --json adds to its own figures. times: what the steps of each rank took."""
        from edge.parallel.engine import DistributedEngine

        several = self.engine if isinstance(self.engine, DistributedEngine) else None
        links = several.links if several else {}
        ranks: list[dict[str, Any]] = []
        for rank, of in enumerate(times):
            kinds = {"decode": of.get("decode"), "prefill": of.get("prefill")}
            figures = {kind: found.to_json() if found else None for kind, found in kinds.items()}
            ranks.append({"rank": rank, "device": self.plan.devices[rank], "link": links.get(rank), **figures})
        return {
            "ranks": ranks,
            "links": [state.to_json() for state in several.link_states] if several else [],
            "link_changes": list(several.link_watch.changes) if several else [],
            "plan": self.plan.to_json(),
            "why": self.why,
            "transport": self.exchange.transport,
            "wire": self.exchange.wire,
            "allreduce": self.exchange.algorithm,
        }


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
    plan = _read_plan(args.plan)
    args.memory = args.memory or plan.shard(0).memory
    if args.affinity:
        keep_to_cores(args.affinity)
    else:
        keep_to_cores(plan.shard(0).affinity, f"{args.plan}: affinity of {plan.devices[0]}")
    return Devices(plan.devices[1:], plan)


@contextmanager
def deployed(args: argparse.Namespace, devices: Devices, path: Path, sequences: int = 1) -> Iterator[Deployed]:
    """The model at `path` on these devices, for so many sequences, until the end of the block.

    The errors of Fleet, arrange and Deployment.
    """
    from apps.show.progress import progress, say
    from edge.cluster.deployment import Deployment, Exchange
    from edge.cluster.fleet import Fleet
    from partition.model.check import check_loadable
    from quant.gguf.file import GgufFile

    file = GgufFile.open(path)
    check_loadable(file)
    if args.save_plan is not None:
        check_output(args.save_plan, [path], force=True)
    options = engine_options(args, sequences)
    exchange = Exchange(args.transport or "auto", args.allreduce or "auto", args.wire or "f32")
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(devices.addresses, insecure=args.insecure)) if devices.addresses else None
        plan, why, made = _plan(args, devices, fleet, file, options)
        if args.save_plan is not None:
            save_plan(args.save_plan, plan)
        if fleet is None or plan.world_size == 1:
            yield Deployed(stack.enter_context(_alone(path, options, plan)), plan, why, exchange, ("this device",))
            return
        label = f"Loading {path.name} on {len(set(plan.devices))} devices"
        with progress(label) as bar:
            deployment = Deployment(fleet, plan, file, options, exchange, bar.update, say)
        with deployment:
            yield Deployed(deployment.engine, plan, why, exchange, _names(fleet, plan))
            if made is not None and sequences == 1:
                _learn(made, deployment, plan)


def _learn(made: Arrangement, deployment: Deployment, plan: Plan) -> None:
    """Correct what was measured by what steps took, and say so."""
    from edge.errors import EdgeError
    from transport.errors import TransportError

    with suppress(EdgeError, TransportError):  # a rank has gone: the next session sees to it
        for line in made.learn(plan, deployment.engine.times()):
            print(printable(f"edge: {line}"), file=sys.stderr)


def _alone(path: Path, options: EngineOptions, plan: Plan) -> Engine:
    """The whole model on this device, as its plan says."""
    from apps.show.progress import progress
    from edge.llm.engine import Engine

    shard, size = plan.shard(0), path.stat().st_size
    options = replace(
        options,
        memory=options.memory or shard.memory,
        threads=options.threads or shard.threads,
        gpu_layers=shard.gpu_layers if options.gpu_layers is None else options.gpu_layers,
    )
    with progress(f"Loading {path.name}", size) as bar:
        return Engine(path, options, progress=lambda fraction: bar.update(fraction * size))


def _plan(
    args: argparse.Namespace, devices: Devices, fleet: Fleet | None, file: GgufFile, options: EngineOptions
) -> tuple[Plan, str, Arrangement | None]:
    """The plan, with what the options say of this device, why it is this one, and what it was made from."""
    from apps.show.progress import progress
    from edge.llm.options import resolve
    from edge.planning.arrange import arrange, work_of
    from edge.slices.local import OwnSlices
    from partition.errors import PlanError
    from partition.model.model import ModelShape

    with progress(f"Reading {file.path.name}") as bar:
        digest = OwnSlices().model_digest(file.path, bar.update)
    if devices.plan is not None or fleet is None:
        assert devices.plan is not None, "without a plan there are workers"
        if fleet is None and devices.plan.model_digest not in ("", digest):
            raise PlanError(f"{args.plan} is for another model than {file.path.name}, or it has changed; plan again")
        return _with_own(devices.plan, args), f"as {args.plan} says", None
    context, _, kv = resolve(options, ModelShape.from_gguf(file))
    work = work_of(file, context=context, concurrency=options.sequences, kv_type=kv.name, wire=args.wire or "f32")
    with progress("Measuring devices", unit="steps") as bar:
        made = arrange(
            fleet,
            devices.addresses,
            file,
            digest,
            parallel=args.parallel or "auto",
            shares=args.shares,
            work=work,
            threads=args.threads,
            memory=options.memory,
            transport=args.transport or "auto",
            on_step=bar.update,
        )
    return _with_own(made.plan, args), made.why, made


def _names(fleet: Fleet, plan: Plan) -> tuple[str, ...]:
    """What the devices of the ranks are called."""
    return tuple(fleet.workers[d].label if d in fleet.workers else d for d in plan.devices)


def _with_own(plan: Plan, args: argparse.Namespace) -> Plan:
    """The plan with what was said of this device on the command line, so that a saved one says it, too."""
    own = {
        "threads": args.threads,
        "affinity": args.affinity,
        "gpu_layers": args.gpu_layers,
        "memory": args.memory,
    }
    first, *others = plan.stages
    shard, *rest = first.shards
    shard = replace(shard, **{name: value for name, value in own.items() if value is not None})
    return replace(plan, stages=(replace(first, shards=(shard, *rest)), *others))


def _read_plan(path: Path) -> Plan:
    from edge.net.channel import parse_address
    from partition.errors import PlanError
    from partition.plan.plan import Plan

    try:
        plan = Plan.from_json(plan_in(json.loads(path.read_text(encoding="utf-8"))))
        for rank, device in enumerate(plan.devices):
            if rank:
                parse_address(device)
            if (plan.shard(rank).threads or 1) > MAX_THREADS:
                raise PlanError(
                    f"rank {rank} is to have {plan.shard(rank).threads} threads, {MAX_THREADS} are the most"
                )
    except (ValueError, RecursionError) as error:  # among them PlanError, and what is not JSON
        raise PlanError(f"{path} cannot be used as a plan: {error}") from None
    return plan


def save_plan(path: Path, plan: Plan | OnnxPlan, beside: Mapping[str, Any] | None = None) -> None:
    """OSError where it cannot be written. beside: what it is predicted to do, and the devices' names."""
    from devices.files import write_whole

    text = json.dumps(plan.to_json() | dict(beside or {}), indent=1, ensure_ascii=False)
    text = _NUMBERS.sub(lambda found: " ".join(found[0].split()), text)  # a range on one line, to be read and edited
    write_whole(path, (text + "\n").encode())


def first_given(args: argparse.Namespace, names: Sequence[str]) -> str:
    """The first of these options that was given, as it was written; "" if none was."""
    return next((f"--{name.replace('_', '-')}" for name in names if getattr(args, name) not in (None, False)), "")


def _check_shares(shares: tuple[float, ...] | None, workers: tuple[str, ...]) -> None:
    if shares is not None and len(shares) != len(workers) + 1:
        raise UsageError(
            f"--shares has {len(shares)} of the {len(workers) + 1} numbers needed: one for each device, this one first"
        )


def _workers(text: str) -> tuple[str, ...]:
    """HOST:PORT of each worker."""
    parts = items(text)
    if "local" in parts:
        raise argparse.ArgumentTypeError("this device takes part as it is; leave local out")
    if len(parts) > MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"takes up to {MOST_WORKERS} workers, got {len(parts)}")
    return tuple(map(address, parts))


def shares_of(text: str) -> tuple[float, ...]:
    """Numbers above 0."""
    shares = tuple(map(number, items(text)))
    if min(shares) <= 0:
        raise argparse.ArgumentTypeError(f"needs a number above 0 for each device, got {text[:80]!r}")
    return shares
