"""Several devices: which there are, what should run where, and a model that runs there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from devices.cluster_file import Cluster as ClusterFile
from devices.cluster_file import read_cluster
from devices.lab.lab import status as lab_status
from edge.api.onnx import OnnxModel
from edge.cluster.deployment import Exchange
from edge.cluster.fleet import MAX_WORKERS, Fleet
from edge.errors import WorkerError
from edge.llm.model import Model
from edge.llm.options import EngineOptions, PrefixOptions
from edge.models.paths import PathLike, model_path
from edge.planning.choice import PlanChoice
from edge.planning.deployed import alone
from edge.planning.describe import beside
from edge.planning.front import Front
from edge.planning.reproducible import SameCuts
from edge.planning.reproducible import settled as settled_plan
from edge.planning.spaces import DEFAULTS, PlanOptions, spaces
from edge.planning.supervisor import Supervisor
from edge.slices.local import OwnSlices
from edge.speculate.factory import drafts, model_with, settled, with_room
from edge.survey.profile import reachable
from edge.tasks import SILENT, Steps
from edge.units import as_bytes
from partition.errors import PlanError
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import LOCAL, Plan
from partition.predict.objectives import AXES, AxisName, ObjectiveName
from quant.gguf.file import GgufFile

if TYPE_CHECKING:
    from edge.onnx.bench import Flow


class Cluster:
    """This device and others. `open()` connects them, `close()` lets them go; it is also a context manager."""

    def __init__(self, workers: Sequence[str] = (), *, file: PathLike | None = None, insecure: bool = False) -> None:
        """workers: HOST or HOST:PORT of each; none: this device alone. file: a cluster.toml, in their place.
        insecure: also workers that do not encrypt. ValueError for both at once, and for a text in place of a list;
        PlanError for too many; ClusterFileError for a file that cannot be used."""
        if isinstance(workers, str):
            raise ValueError(f"workers must be a list, such as [{workers!r}]")
        if workers and file is not None:
            raise ValueError("the file names the devices, and so do workers: leave one of them out")
        self.devices = read_cluster(Path(file)) if file is not None else ClusterFile.of_addresses(workers)
        if (others := sum(not device.is_local for device in self.devices.devices)) > MAX_WORKERS:
            raise PlanError(f"{MAX_WORKERS} devices beside this one are the most, got {others}; leave some out")
        self.fleet: Fleet | None = None  # the workers that answered; None before `open`, and where there is none
        self.notes: list[str] = []  # who did not answer, for people
        self.insecure, self._has_names = insecure, file is not None
        self._stack = ExitStack()
        self._is_open = False

    @classmethod
    def of_lab(cls, *, insecure: bool = False) -> Cluster | None:
        """This device and the emulated ones of the lab that is up; None where no lab is."""
        state = lab_status()
        return None if state is None else cls(tuple(state.addresses.values()), insecure=insecure or state.shaped)

    @property
    def addresses(self) -> tuple[str, ...]:
        """HOST:PORT of each worker."""
        return tuple(device.address for device in self.devices.workers if device.address is not None)

    def open(self) -> Cluster:
        """Connect the workers that answer; `notes` names the others.

        TransportError or WorkerError for one that answers and cannot take part.
        """
        if not self._is_open:
            self.fleet, self.notes = self._stack.enter_context(reachable(self.devices, insecure=self.insecure))
            self._is_open = True
            if self.fleet is not None and not self._has_names:
                self.devices = _named(self.devices, self.fleet)
        return self

    def close(self) -> None:
        """End all connections, and with them what runs on the workers."""
        self.fleet, self._is_open = None, False
        self._stack.close()

    def check_open(self) -> None:
        """WorkerError where `open` was not called: without its workers, a plan would be for this device alone."""
        if not self._is_open:
            raise WorkerError("the cluster is not open: call open(), or use it in a with block")

    def __enter__(self) -> Cluster:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


def plan(
    model: PathLike | None,
    cluster: Cluster,
    *,
    objective: ObjectiveName = "latency",
    limits: Mapping[str, float] | None = None,
    options: PlanOptions = DEFAULTS,
    steps: Steps = SILENT,
) -> PlanChoice:
    """Where a model should run: the plan that is best by one objective, by measurement.

    limits: what objectives may be at most, in seconds (throughput: seconds a token or input), bytes or joules.
    PlanError, with need and have, where nothing fits; WorkerError where the cluster is not open.
    """
    cluster.check_open()
    path = model_path(model)
    (space,) = spaces(
        path, cluster.devices, cluster.fleet, cluster.notes, options, insecure=cluster.insecure, steps=steps
    )
    point, why = space.best(objective, limits or {})
    return PlanChoice(path, point.plan, why, point.predicted, options, beside(space, point))


def pareto(
    model: PathLike | None,
    cluster: Cluster,
    *,
    axes: Sequence[AxisName] = AXES[:2],
    measure: int = 0,
    types: Sequence[str] = (),
    options: PlanOptions = DEFAULTS,
    steps: Steps = SILENT,
) -> Front:
    """The plans between which a person can choose. measure: how many of the most promising ones are run and measured.

    types: choose between these types of the weights, too. `Front.pick` takes one of them. PlanError, with need and
    have, where nothing fits; WorkerError where the cluster is not open.
    """
    cluster.check_open()
    path = model_path(model)
    with_workers = (path, cluster.devices, cluster.fleet, cluster.notes, options)
    found = spaces(*with_workers, types=types, insecure=cluster.insecure, steps=steps)
    front = Front(found, axes, options)
    if measure:
        front.measure(measure, cluster.fleet, fresh=options.fresh, steps=steps)
    return front


def deploy(
    choice: PlanChoice,
    cluster: Cluster,
    *,
    exchange: Exchange | None = None,
    memory: int | str | None = None,
    prefix_cache: int | str = 0,
    draft: PathLike = "off",
    draft_worker: str | None = None,
    spare: int | Literal["auto"] = 0,
    reproducible: bool = False,
    steps: Steps = SILENT,
    **options: Any,
) -> Model:
    """A language model on the devices that its plan names.

    exchange: how tensors travel; None: as the plan's options say. memory: bytes, or a text such as "3GiB", for this
    device. prefix_cache: as for `load`; each device keeps its part. draft, draft_worker: as for `load`. spare: losses
    of devices to be ready for, by slices in place and a copy of keys and values here; "auto": as many as devices lend
    room for. reproducible: as for `load`, also where a device is lost. options: other fields of
    EngineOptions; context, sequences, threads, memory and kv_type that are not given are those the plan was made for.

    Where a device is lost, another plan takes over, with those that answer; `steps` says so.

    WorkerError where a device of the plan is not connected; PlanError for a plan of another model, or of a network in
    ONNX; NotEnoughMemory, with need and have; TransportError.
    """
    chosen, work = choice.plan, choice.options
    if isinstance(chosen, OnnxPlan):
        raise PlanError(f"{choice.model.name} is a network in ONNX: deploy it with deploy_onnx")
    planned = {
        "context": work.context,
        "sequences": 1 if reproducible else work.concurrency or 1,
        "threads": work.threads,
    }
    guesses = drafts(draft, choice.model, steps, worker=draft_worker, insecure=cluster.insecure)
    engine_options = EngineOptions(
        memory=as_bytes(memory) or work.memory,
        prefixes=PrefixOptions.of(as_bytes(prefix_cache)),
        **{**planned, "kv_type": work.kv_type, **options},
    )
    if reproducible:
        chosen, engine_options = settled_plan(chosen), settled(engine_options, guesses)
    engine_options = with_room(engine_options, guesses)
    if chosen.world_size == 1:
        engine = alone(choice.model, engine_options, chosen, steps)
        return model_with(guesses, engine, engine.close, steps)
    fleet = _connected(cluster, chosen)
    file = GgufFile.open(choice.model)
    travel = exchange or Exchange(work.transport, wire=work.wire)
    digest = OwnSlices().model_digest(file.path)
    survivors = SameCuts if reproducible else Supervisor
    survivor = survivors(file, digest, engine_options, travel, steps, cluster.insecure, spare=spare)
    try:
        running = survivor.start(fleet, chosen)
    except BaseException:
        survivor.close()
        raise
    return model_with(guesses, running, survivor.close, steps)


def deploy_onnx(
    choice: PlanChoice, cluster: Cluster, *, exchange: Exchange | None = None, steps: Steps = SILENT
) -> OnnxModel:
    """A network in ONNX on the devices that its plan names, loaded. Where one of them is lost it goes on over those of
    the cluster that answer, by another plan; `steps.say` is told.

    exchange: transport and wire type of its tensors; None: as the plan's options say. WorkerError where a device of the
    plan is not connected; PlanError for a plan of another model, or of a language model; TransportError.
    """
    work = choice.options
    if not isinstance(choice.plan, OnnxPlan):
        raise PlanError(f"{choice.model.name} is a language model: deploy it with deploy")
    travel = exchange or Exchange(work.transport, wire=work.wire)
    return OnnxModel.over(choice.model, partial(_pipeline, choice, choice.plan, cluster, travel, steps)).open()


def _named(devices: ClusterFile, fleet: Fleet) -> ClusterFile:
    """The same with the names that workers have, where these are different."""
    names = {address: worker.name for address, worker in fleet.workers.items()}
    if len({LOCAL, *names.values()}) <= len(names):
        return devices
    return replace(devices, devices=tuple(replace(d, name=names.get(d.address or "", d.name)) for d in devices.devices))


def _connected(cluster: Cluster, chosen: Plan | OnnxPlan) -> Fleet:
    """The workers of a plan."""
    there = cluster.fleet.workers if cluster.fleet else {}
    missing = [device for device in chosen.devices if device != LOCAL and device not in there]
    if missing or cluster.fleet is None:
        raise WorkerError(
            f"the plan needs {', '.join(missing)}; connected are {', '.join(there) or 'none'}: open a cluster with them"
        )
    return cluster.fleet


def _pipeline(
    choice: PlanChoice, chosen: OnnxPlan, cluster: Cluster, exchange: Exchange, steps: Steps, stack: ExitStack
) -> Flow:
    from edge.onnx.bench import sequential
    from edge.onnx.engine import OnnxEngine
    from edge.onnx.model import load_source
    from edge.planning.onnx_supervisor import OnnxPlacement, SurvivingDeployment

    path, dims = choice.model, dict(choice.options.dims)
    source = load_source(path, dims, choice.options.inputs)
    source.check(chosen)
    if chosen.own is not None and not chosen.remote:
        engine = OnnxEngine(path, chosen.own.threads, chosen.own.provider, dims=dims)
        return sequential(stack.enter_context(engine).run)
    placement = OnnxPlacement(
        chosen.devices, chosen, transport=exchange.transport, wire=exchange.wire, insecure=cluster.insecure
    )
    fleet = _connected(cluster, chosen)
    deployment = SurvivingDeployment(source, placement, chosen, choice.why, fleet, cluster.devices, steps=steps)
    return partial(stack.enter_context(closing(deployment)).pipeline.map, wire=exchange.wire)
